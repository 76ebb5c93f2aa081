"""TrainingPlan: against loops over batches, MindSpore's datasets, and trainings that really run."""

import dataclasses
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import Recorder, line
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import GradAccumulation, Model, TrainingPlan

# What the compiler makes of it is tested where a test asks for a mode.
pytestmark = pytest.mark.usefixtures("eager")


def plan(dataset_size=8, batch_size=2, epochs=1, **settings):
    return TrainingPlan(dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, **settings)


@pytest.mark.parametrize("settings", [{}, {"micro_size": 4}, {"steps": 375}])
def test_1000_samples_in_batches_of_8_are_375_batches_in_3_epochs(settings):
    got = TrainingPlan(
        dataset_size=1000, batch_size=8, **({"epochs": 3} if "steps" not in settings else {}), **settings
    )
    assert (got.batches_per_epoch, got.batches, got.updates) == (125, 375, 375)
    assert type(got.updates) is int


# Lightning's estimated_stepping_batches: 64 batches of one row, up to 4 nodes of 7 devices.
@pytest.mark.parametrize(
    "window,ranks,updates", [(1, 1, 64), (2, 1, 32), (3, 1, 22), (1, 7, 10), (1, 14, 5), (1, 21, 4), (1, 28, 3)]
)
def test_an_epoch_of_64_rows_has_the_updates_that_lightning_estimates(window, ranks, updates):
    assert plan(64, 1, accumulation_steps=window, ranks=ranks).updates == updates


# 31 and 30 batches of 4. Hugging Face ends a window with the epoch, Keras counts on over the epochs.
@pytest.mark.parametrize(
    "rows,last_window,updates_of_epochs",
    [
        (123, "apply", {1: 7, 2: 14, 5: 35}),
        (123, "drop", {1: 6, 2: 12, 5: 30}),
        (123, "carry", {1: 6, 2: 12, 5: 31}),
        *[(120, last_window, {1: 6, 2: 12, 5: 30}) for last_window in ("apply", "drop", "carry")],
    ],
)
def test_123_and_120_rows_with_five_batches_of_4_to_an_update(rows, last_window, updates_of_epochs):
    for epochs, updates in updates_of_epochs.items():
        assert plan(rows, 4, epochs, accumulation_steps=5, last_window=last_window).updates == updates


def test_a_global_batch_of_256_on_4_ranks_with_batches_of_8_takes_8_batches():
    got = plan(1024, 8, ranks=4, global_batch=256)
    assert (got.accumulation_steps, got.rows_per_update, got.update_rows) == (8, 256, [256] * 4)


@dataclasses.dataclass
class Simulation:
    """A loop over the batches of all ranks."""

    rank_rows: list
    batch_size: int
    window: int
    last_window: str
    drop_remainder: bool

    def run(self, epochs=None, steps=None):
        self.updates, self.per_epoch, open_window, self.batches, number = [], Counter(), [], 0, 0
        while number != epochs and self.batches != steps:
            for rows in self.epoch():
                open_window.append(rows)
                self.batches += 1
                if len(open_window) == self.window:
                    self.update(number, open_window)
                if self.batches == steps:
                    break
            if self.last_window == "apply" and open_window:
                self.update(number, open_window)
            if self.last_window == "drop":
                open_window.clear()
            number += 1
        return self

    def epoch(self):
        left = list(self.rank_rows)
        while any(rows >= (self.batch_size if self.drop_remainder else 1) for rows in left):
            taken = [min(rows, self.batch_size) for rows in left]
            if self.drop_remainder:
                taken = [rows if rows == self.batch_size else 0 for rows in taken]
            left = [rows - used for rows, used in zip(left, taken)]
            yield sum(taken)

    def update(self, epoch, open_window):
        self.updates.append(list(open_window))
        self.per_epoch[epoch] += 1
        open_window.clear()


LENGTHS = st.one_of(
    st.fixed_dictionaries({"epochs": st.integers(1, 4)}), st.fixed_dictionaries({"steps": st.integers(1, 40)})
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 30),
    ranks=st.integers(1, 4),
    missing=st.integers(0, 3),
    batch_size=st.integers(1, 8),
    window=st.integers(1, 6),
    last_window=st.sampled_from(["apply", "drop", "carry"]),
    drop_remainder=st.booleans(),
    length=LENGTHS,
)
def test_counting_agrees_with_a_loop(rows, ranks, missing, batch_size, window, last_window, drop_remainder, length):
    rank_rows = [max(rows, batch_size) if drop_remainder else rows] * ranks
    done = Simulation(rank_rows, batch_size, window, last_window, drop_remainder).run(**length)
    got = TrainingPlan(
        # MindSpore's shards repeat what the last one lacks.
        dataset_size=sum(rank_rows) - missing % ranks,
        ranks=ranks,
        batch_size=batch_size,
        accumulation_steps=window,
        last_window=last_window,
        drop_remainder=drop_remainder,
        **length,
    )
    assert got.batches == done.batches
    assert got.updates == len(done.updates)
    assert got.updates_per_epoch == max(done.per_epoch.values(), default=0)
    assert got.update_rows == [sum(rows) for rows in done.updates]
    assert got.unused_batches == done.batches - sum(map(len, done.updates))
    assert got.dropped_rows == sum(rank_rows) - sum(done.epoch())
    assert str(got)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("rows,ranks", [(10, 1), (10, 3), (11, 4), (8, 4)])
def test_ranks_have_the_rows_that_mindspores_shards_have(rows, ranks, drop_remainder):
    got = plan(rows, 2, ranks=ranks, drop_remainder=drop_remainder)
    batch_rows, seen = Counter(), Counter()
    for rank in range(ranks):
        data = NumpySlicesDataset((np.arange(rows),), num_shards=ranks, shard_id=rank, shuffle=False)
        seen.update(item.item() for (item,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True))
        data = data.batch(2, drop_remainder=drop_remainder)
        assert data.get_dataset_size() == got.batches_per_epoch
        for i, (items,) in enumerate(data.create_tuple_iterator(num_epochs=1, output_numpy=True)):
            batch_rows[i] += len(items)
    assert got.update_rows == list(batch_rows.values())
    assert got.dropped_rows == seen.total() - batch_rows.total()


RATES = {
    "a number": lambda plan: [0.01] * plan.updates,
    "a list": lambda plan: nn.cosine_decay_lr(0.0, 0.01, plan.updates, plan.updates_per_epoch, 2),
}
# Rows, rows of a batch, batches of a window, length, what becomes of the last window, other settings, rates.
RUNS = [
    (12, 3, 2, {"epochs": 2}, "apply", {}, "a list"),
    (11, 2, 4, {"epochs": 2}, "apply", {"micro_size": 2}, "a list"),
    (11, 2, 4, {"epochs": 2}, "drop", {}, "a list"),
    (11, 2, 4, {"epochs": 3}, "carry", {}, "a number"),
    (11, 2, 3, {"epochs": 2}, "apply", {"drop_remainder": True}, "a list"),
    (10, 2, 3, {"steps": 6}, "apply", {}, "a number"),
    (10, 2, 3, {"steps": 9}, "drop", {}, "a number"),
]


@pytest.mark.parametrize("rows,batch_size,window,length,last_window,others,rates", RUNS)
def test_a_training_does_what_was_planned(rows, batch_size, window, length, last_window, others, rates):
    network = line()
    planned = TrainingPlan(
        dataset_size=rows,
        batch_size=batch_size,
        accumulation_steps=window,
        last_window=last_window,
        **length,
        **others,
    )
    # As many rates as there are updates.
    learning_rates = RATES[rates](planned)
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), others.get("micro_size", 1))
    optimizer = nn.SGD(network.trainable_params(), learning_rates)
    model = Model(loss_cell, optimizer=optimizer, accumulation_steps=window, last_window=last_window)
    outputs = record_updates(model)
    x = np.linspace(-1, 1, rows, dtype=np.float32).reshape(rows, 1)
    data = NumpySlicesDataset((x, 2 * x), shuffle=False)
    data = data.batch(batch_size, drop_remainder=others.get("drop_remainder", False))
    recorder = Recorder(stop_after=length.get("steps"))
    model.train(length.get("epochs", 100), data, recorder)

    assert planned.updates > 1
    assert planned.batches_per_epoch == data.get_dataset_size()
    assert planned.batches == len(recorder.outputs)
    assert planned.updates == len(outputs) == optimizer.global_step.asnumpy().item()
    assert planned.update_rows == [int(output.weight.asnumpy()) for output in outputs]
    np.testing.assert_allclose(learning_rates, [o.learning_rate.asnumpy() for o in outputs], rtol=1e-6)


def record_updates(model):
    """Return the list into which the outputs of all updates will go, of those too that no callback sees."""
    outputs, window = [], model.train_network.body.window
    close = window.close

    def recorded_close(*clips):
        outputs.append(close(*clips))
        assert outputs[-1].updated.asnumpy()
        return outputs[-1]

    window.close = recorded_close
    return outputs


def test_the_memory_of_a_plan_is_that_of_one_epoch_and_of_the_updates():
    tracemalloc.start()
    got = plan(10**5, 1, epochs=1000, accumulation_steps=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert got.batches == 10**8 and got.update_rows == 10**5 * [1000] and peak < 10**8


def test_a_plan_is_a_dataclass():
    got = plan(10, 2, accumulation_steps=2)
    assert dataclasses.asdict(got)["updates"] == 3
    assert dataclasses.asdict(got)["update_rows"] == [4, 4, 2]
    assert dataclasses.replace(got, epochs=2) == plan(10, 2, 2, accumulation_steps=2)
    assert hash(got) != hash(dataclasses.replace(got, epochs=2))
    assert "updates=3" in repr(got)


def test_a_plan_with_a_global_batch_can_be_planned_again():
    got = plan(1024, 8, ranks=4, global_batch=256)
    assert dataclasses.replace(got, epochs=1) == got
