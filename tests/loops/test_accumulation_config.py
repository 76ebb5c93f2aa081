"""AccumulationConfig: how many batches make an update, and when that changes."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import descend, line, sgd, weight_of
from loop_toy import FOUR, batch, nan_batch, toy_loop, train, updates_of
from mindspore import nn
from refusal import refuses, typed
from step_probe import compilations
from tiers import share_of

from ms_gradaccum import AccumulationConfig, Accumulator

# What the compiler makes of it is tested where a test asks for a mode.
pytestmark = pytest.mark.usefixtures("eager")


def windows_of(accumulator, dataset, epochs):
    """For each epoch the numbers of batches of its windows; nothing is computed."""
    diary = []
    for _ in range(epochs):
        sizes = []
        for _ in dataset:
            with accumulator.accumulate():
                if accumulator.sync_gradients:
                    sizes.append(accumulator.driver.batches)
        diary.append(sizes)
    return diary


# Lightning's test_gradient_accumulation_scheduler.py: so many updates of ten batches in each epoch.
LIGHTNING = [
    ({1: 2, 3: 4}, [10, 5, 5, 3]),
    ({0: 2, 2: 1}, [5, 5, 10, 10]),
    ({0: 10, 1: 3}, [1, 4, 4, 4]),
    ({3: 2}, [10, 10, 10, 5]),
]


@pytest.mark.parametrize("schedule, updates", LIGHTNING, ids=str)
def test_a_schedule_by_epoch(schedule, updates):
    _, accumulator = toy_loop(schedule=schedule)
    diary = windows_of(accumulator, accumulator.prepare(range(10)), 4)
    assert [len(sizes) for sizes in diary] == updates
    # The last window of an epoch has what is left of it.
    assert [sum(sizes) for sizes in diary] == [10] * 4


def test_a_carried_window_keeps_its_number_of_batches_in_the_next_epoch():
    _, accumulator = toy_loop(schedule={0: 4, 1: 2}, sync_with_dataloader=False)
    assert windows_of(accumulator, accumulator.prepare(range(6)), 3) == [[4], [4, 2, 2], [2, 2, 2]]


def run_updates(schedule, batches):
    """The numbers of batches of the windows, with every update really made."""
    _, accumulator = toy_loop(schedule=schedule)
    sizes, size = [], 0
    for update in updates_of(accumulator, batches):
        size += 1
        if update:
            sizes.append(size)
            size = 0
    return sizes


def test_a_schedule_by_updates():
    assert run_updates([1, 1, 3, 2, 2].__getitem__, [batch(1)] * 9) == [1, 1, 3, 2, 2]
    # A skipped window is no update: the third is one of three batches again.
    sizes = [batch(1), batch(1), batch(1), nan_batch(), batch(1), *[batch(1)] * 5]
    assert run_updates([1, 1, 3, 2].__getitem__, sizes) == [1, 1, 6, 2]


def test_a_new_number_of_steps_compiles_nothing_and_divides_by_what_there_is():
    network, accumulator = toy_loop(1)
    list(train(accumulator, FOUR))
    network, accumulator = toy_loop(schedule={0: 1, 1: 3, 2: 4})
    dataset = accumulator.prepare(FOUR)
    with compilations() as compiled:
        for _ in range(3):
            list(train(accumulator, dataset))
    assert compiled == []
    pairs = [(1, 2), (3, 4), (5, 6), (7, 8)]
    expected = descend(*pairs, (1, 2, 3, 4, 5, 6), (7, 8), (1, 2, 3, 4, 5, 6, 7, 8))
    assert weight_of(network) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=share_of(40), deadline=None)
@given(st.dictionaries(st.integers(0, 9), st.integers(1, 6), min_size=1), st.lists(st.integers(0, 8), max_size=6))
def test_a_window_never_has_more_batches_than_when_it_began(milestones, passes):
    _, accumulator = toy_loop(schedule=milestones, sync_with_dataloader=False)
    schedule = AccumulationConfig(schedule=milestones)
    dataset = accumulator.prepare(range(0))
    batches, begun = 0, None
    for epoch, length in enumerate(passes):
        dataset.dataset = range(length)
        for _ in dataset:
            begun = epoch if batches == 0 else begun
            batches += 1
            with accumulator.accumulate():
                assert accumulator.sync_gradients == (batches == schedule.steps_for(begun, 0))
            batches *= not accumulator.sync_gradients
    assert schedule.steps_for(min(milestones), 0) == milestones[min(milestones)]
    assert schedule.steps_for(-1, 0) == 1


def test_a_schedule_by_epochs_needs_a_prepared_dataset():
    _, accumulator = toy_loop(schedule={0: 2})
    for _ in range(2):
        with refuses(ValueError, "'schedule'"), accumulator.accumulate():
            pass
    # Nothing stays of it.
    assert windows_of(accumulator, accumulator.prepare(range(3)), 1) == [[2, 1]]


def test_a_function_must_return_a_positive_int():
    _, accumulator = toy_loop(schedule=lambda updates: 0)
    with refuses(ValueError, "'schedule(0)'"), accumulator.accumulate():
        pass
    _, accumulator = toy_loop(schedule=lambda updates: 2.0)
    with refuses(TypeError, "'schedule(0)'", typed(2.0)), accumulator.accumulate():
        pass


def test_the_count_of_the_config_and_that_of_the_argument():
    network = line()

    def steps_of(*args, **settings):
        optimizer = sgd(network)
        return Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, *args, **settings).config

    carried = AccumulationConfig(sync_with_dataloader=False)
    assert steps_of() == AccumulationConfig() and steps_of(3) == AccumulationConfig(3)
    assert steps_of(config=AccumulationConfig(4)) == steps_of(4, config=AccumulationConfig(4)) == AccumulationConfig(4)
    assert steps_of(4, config=carried) == AccumulationConfig(4, sync_with_dataloader=False)
    each = AccumulationConfig(sync_each_batch=True)
    assert steps_of(4, config=each) == AccumulationConfig(4, sync_each_batch=True)
    assert steps_of({0: 2}, config=each) == AccumulationConfig({0: 2}, sync_each_batch=True)


def test_a_count_and_a_schedule_contradict_each_other():
    with refuses(ValueError, "'accumulation_steps'", "Leave the schedule out"):
        AccumulationConfig(4, schedule={0: 2})
    network = line()
    loss_cell = nn.WithLossCell(network, nn.MSELoss())
    for config in (AccumulationConfig(schedule={0: 2}), AccumulationConfig({0: 2}), AccumulationConfig(3)):
        for steps in (4, {0: 3}):
            with refuses(ValueError, "'accumulation_steps'", "only once"):
                Accumulator(loss_cell, sgd(network), steps, config=config)


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        AccumulationConfig().accumulation_steps = 2
    assert len({AccumulationConfig({0: 2}), AccumulationConfig({0: 3}), AccumulationConfig(schedule={0: 3})}) == 3


def test_all_ranks_have_the_same_text_for_a_function():
    texts = {AccumulationConfig(make()).as_text() for make in (make_schedule, make_schedule)}
    assert len(texts) == 1 and "make_schedule.<locals>.steps" in texts.pop()
    assert AccumulationConfig({0: 2}).as_text() != AccumulationConfig({0: 3}).as_text()


def make_schedule():
    def steps(updates):
        return 1 + updates

    return steps
