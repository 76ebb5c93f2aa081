"""TrainingPlan: against loops over batches, MindSpore's datasets, and trainings that really run."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import Recorder, line, mse, sgd
from mindspore.dataset import NumpySlicesDataset
from modelled_window import plan
from refusal import refuses

from ms_gradaccum import Model, TrainingPlan

pytestmark = pytest.mark.usefixtures("eager")


def updates_of_epochs(lengths, window, last_window):
    found, is_open = [], 0
    for length in lengths:
        updates = 0
        for _ in range(length):
            is_open += 1
            if is_open == window:
                updates, is_open = updates + 1, 0
        if last_window != "carry":
            updates += last_window == "apply" and is_open > 0
            is_open = 0
        found.append(updates)
    return found


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 30),
    ranks=st.integers(1, 4),
    missing=st.integers(0, 3),
    batch_size=st.integers(1, 8),
    window=st.integers(1, 6),
    last_window=st.sampled_from(["apply", "drop", "carry"]),
    drop_remainder=st.booleans(),
    length=st.one_of(st.tuples(st.just("epochs"), st.integers(1, 4)), st.tuples(st.just("steps"), st.integers(1, 40))),
)
def test_counting_agrees_with_a_loop(rows, ranks, missing, batch_size, window, last_window, drop_remainder, length):
    rows = max(rows, batch_size) if drop_remainder else rows
    batches = [batch for batch in range(0, rows, batch_size) if not drop_remainder or batch + batch_size <= rows]
    epochs = [len(batches)] * length[1]
    if length[0] == "steps":
        whole, rest = divmod(length[1], len(batches))
        epochs = [len(batches)] * whole + [rest] * (rest > 0)
    updates = updates_of_epochs(epochs, window, last_window)
    got = TrainingPlan(
        # MindSpore's shards repeat what the last one lacks.
        dataset_size=rows * ranks - missing % ranks,
        ranks=ranks,
        batch_size=batch_size,
        accumulation_steps=window,
        last_window=last_window,
        drop_remainder=drop_remainder,
        **dict([length]),
    )
    assert (got.batches_per_epoch, got.batches) == (len(batches), sum(epochs))
    assert (got.updates, got.updates_per_epoch) == (sum(updates), max(updates))
    assert str(got)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("rows,ranks", [(10, 1), (10, 3), (11, 4), (8, 4)])
def test_ranks_have_the_batches_that_mindspores_shards_have(rows, ranks, drop_remainder):
    got = plan(dataset_size=rows, batch_size=2, ranks=ranks, drop_remainder=drop_remainder)
    lengths = Counter()
    for rank in range(ranks):
        data = NumpySlicesDataset((np.arange(rows),), num_shards=ranks, shard_id=rank, shuffle=False)
        lengths[data.batch(2, drop_remainder=drop_remainder).get_dataset_size()] += 1
    assert lengths == {got.batches_per_epoch: ranks}


# Rows, rows of a batch, batches of a window, length, what becomes of the last window, and other settings.
RUNS = [
    (11, 2, 4, {"epochs": 2}, "apply", {}),
    (11, 2, 4, {"epochs": 2}, "drop", {}),
    (11, 2, 4, {"epochs": 3}, "carry", {}),
    (11, 2, 3, {"epochs": 2}, "apply", {"drop_remainder": True}),
    (10, 2, 3, {"steps": 9}, "drop", {}),
]


@pytest.mark.parametrize("rows,batch_size,window,length,last_window,others", RUNS)
def test_a_training_does_what_was_planned(rows, batch_size, window, length, last_window, others):
    network = line()
    counted = {"accumulation_steps": window, "last_window": last_window}
    planned = TrainingPlan(dataset_size=rows, batch_size=batch_size, **counted, **length, **others)
    optimizer = sgd(network)
    model = Model(mse(network), optimizer=optimizer, **counted)
    x = np.linspace(-1, 1, rows, dtype=np.float32).reshape(rows, 1)
    data = NumpySlicesDataset((x, 2 * x), shuffle=False)
    data = data.batch(batch_size, drop_remainder=others.get("drop_remainder", False))
    recorder = Recorder(stop_after=length.get("steps"))
    model.train(length.get("epochs", 100), data, recorder)
    assert planned.updates > 1
    assert planned.batches_per_epoch == data.get_dataset_size()
    assert planned.batches == len(recorder.outputs)
    assert planned.updates == optimizer.global_step.asnumpy().item()


def test_a_plan_is_a_dataclass_and_can_be_planned_again():
    got = plan(dataset_size=1024, ranks=4, global_batch=256)
    assert dataclasses.asdict(got)["updates"] == 4 and "updates=4" in repr(got)
    assert dataclasses.replace(got, epochs=1) == got != dataclasses.replace(got, epochs=2)


MULTIPLE = "a multiple of batch_size * ranks = 32"
# The settings, what is said of the last one, and the value.
REFUSED = [
    ({"drop_remainder": True, "ranks": 2, "dataset_size": 14}, "at least one batch of 8 rows", "7 rows on each"),
    ({"ranks": 4, "global_batch": 250}, MULTIPLE, "250"),
    ({"ranks": 4, "global_batch": 25}, MULTIPLE, "25"),
    ({"global_batch": 16, "accumulation_steps": 3}, "2 for a global_batch of 16", "3"),
    ({"epochs": None, "steps": 0}, "a positive int", "0"),
    ({"epochs": None}, "epochs or steps", "neither"),
    ({"steps": 3}, "epochs or steps", "epochs=1 and steps=3"),
]


@pytest.mark.parametrize("settings,rule,got", REFUSED)
def test_wrong_settings_are_refused(settings, rule, got):
    name = "" if rule == "epochs or steps" else f"'{list(settings)[-1]}'"
    with refuses(ValueError, name, rule, f"but got {got}. "):
        plan(**settings)
