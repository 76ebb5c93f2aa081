"""AccumulationConfig: how many batches make an update, and when that changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import sgd
from loop_toy import FOUR, nan_batch, toy_loop, updates_of
from refusal import loss_cell, refuses
from tiers import share_of

from ms_gradaccum import AccumulationConfig, Accumulator

pytestmark = pytest.mark.usefixtures("eager")


def test_a_skipped_window_is_no_update_of_a_schedule():
    _, accumulator = toy_loop(schedule=[1, 1, 3, 2].__getitem__)
    updates = updates_of(accumulator, [FOUR[0], FOUR[0], FOUR[0], nan_batch(), *FOUR, *FOUR[:2]])
    assert [number for number, update in enumerate(updates, 1) if update] == [1, 2, 8, 10]


@settings(max_examples=share_of(60), deadline=None)
@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 6), min_size=1),
    st.lists(st.integers(0, 8), max_size=6),
    st.booleans(),
)
def test_windows_partition_any_passes_and_never_have_more_batches_than_when_they_began(milestones, passes, apply):
    _, accumulator = toy_loop(schedule=milestones, sync_with_dataloader=apply)
    schedule = AccumulationConfig(schedule=milestones)
    dataset = accumulator.prepare(range(0))
    batches, begun = 0, None
    for epoch, length in enumerate(passes):
        dataset.dataset = range(length)
        for index in dataset:
            begun = epoch if batches == 0 else begun
            batches += 1
            is_last = apply and index == length - 1
            with accumulator.accumulate():
                assert accumulator.sync_gradients == (is_last or batches == schedule.steps_for(begun, 0))
            batches *= not accumulator.sync_gradients
    assert schedule.steps_for(min(milestones), 0) == milestones[min(milestones)]
    assert schedule.steps_for(-1, 0) == 1


def test_a_schedule_by_epochs_needs_a_prepared_dataset():
    _, accumulator = toy_loop(schedule={0: 2})
    for _ in range(2):
        with refuses(ValueError, "'schedule'"), accumulator.accumulate():
            pass
    assert updates_of(accumulator, accumulator.prepare(FOUR[:3])) == [False, True, True]


def test_the_count_of_the_config_and_that_of_the_argument():
    def steps_of(*args, **settings):
        cell = loss_cell()
        return Accumulator(cell, sgd(cell), *args, **settings).config

    carried = AccumulationConfig(sync_with_dataloader=False)
    assert steps_of() == AccumulationConfig() and steps_of(3) == AccumulationConfig(3)
    assert steps_of(config=AccumulationConfig(4)) == steps_of(4, config=AccumulationConfig(4)) == AccumulationConfig(4)
    assert steps_of(4, config=carried) == AccumulationConfig(4, sync_with_dataloader=False)
    each = AccumulationConfig(sync_each_batch=True)
    assert steps_of(4, config=each) == AccumulationConfig(4, sync_each_batch=True)
    assert steps_of({0: 2}, config=each) == AccumulationConfig({0: 2}, sync_each_batch=True)
    with refuses(ValueError, "'accumulation_steps'", "Leave the schedule out"):
        AccumulationConfig(4, schedule={0: 2})
    for config in (AccumulationConfig(schedule={0: 2}), AccumulationConfig({0: 2}), AccumulationConfig(3)):
        for steps in (4, {0: 3}):
            with refuses(ValueError, "'accumulation_steps'", "only once"):
                steps_of(steps, config=config)


def test_configs_can_be_told_apart_and_all_ranks_have_the_same_text_for_a_function():
    assert len({AccumulationConfig({0: 2}), AccumulationConfig({0: 3}), AccumulationConfig(schedule={0: 3})}) == 3
    texts = {AccumulationConfig(make()).as_text() for make in (make_schedule, make_schedule)}
    assert len(texts) == 1 and "make_schedule.<locals>.steps" in texts.pop()
    assert AccumulationConfig({0: 2}).as_text() != AccumulationConfig({0: 3}).as_text()


def make_schedule():
    def steps(updates):
        return 1 + updates

    return steps
