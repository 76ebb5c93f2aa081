"""Model.train with data of any length and with what is no dataset: the right weight, or a sentence."""

import functools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_toy import Recorder, batches, descend, toy, weight_of
from mindspore import Tensor, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import Callback
from strategies import ODD, examples, refusal

RATE = 0.005
# MindSpore checks these itself before anything is trained, each in a sentence of its own.
STOCK = (
    r"There is no valid data in dataset|The input value must be|For 'Model.train', the parameter 'epoch' must"
    r"|When the 'callbacks' is a list"
)


@functools.cache
def built():
    """Compiled once: no setting that changes here is in a graph."""
    return toy(1, RATE)


def new_model(micro_size=1, accumulation_steps=1, last_window="apply"):
    network, model = built()
    step = model.train_network
    step.network.micro_size, step.body.accumulation_steps, model.last_window = (
        micro_size,
        accumulation_steps,
        last_window,
    )
    step.body.buffer.clear()
    network.weight.set_data(ops.zeros_like(network.weight))
    return network, model


def of_rows(rows, batch_size):
    """The values 1, 2 and so on, in batches."""
    x = np.arange(1, rows + 1, dtype=np.float32).reshape(-1, 1)
    return NumpySlicesDataset((x, 2 * x), shuffle=False).batch(batch_size)


def windows_of(rows, batch_size, accumulation_steps, last_window, epochs):
    """The rows of each update."""
    every = list(range(1, rows + 1))
    per_epoch = [every[i : i + batch_size] for i in range(0, rows, batch_size)]
    passes = [per_epoch * epochs] if last_window == "carry" else [per_epoch] * epochs
    for each in passes:
        for i in range(0, len(each), accumulation_steps):
            window = each[i : i + accumulation_steps]
            if len(window) == accumulation_steps or last_window == "apply":
                yield [row for batch in window for row in batch]


@examples(20)
@given(
    rows=st.integers(1, 8),
    batch_size=st.integers(1, 9),
    micro_size=st.integers(1, 10),
    accumulation_steps=st.integers(1, 9) | st.just(2**31 - 1),
    last_window=st.sampled_from(["apply", "drop", "carry"]),
    epochs=st.integers(1, 3),
)
def test_any_length_of_data(rows, batch_size, micro_size, accumulation_steps, last_window, epochs):
    network, model = new_model(micro_size, accumulation_steps, last_window)
    model.train(epochs, of_rows(rows, batch_size))
    windows = list(windows_of(rows, batch_size, accumulation_steps, last_window, epochs))
    assert weight_of(network) == pytest.approx(descend(*windows, learning_rate=RATE), rel=1e-4)
    left = epochs * -(-rows // batch_size) % accumulation_steps if last_window == "carry" else 0
    assert model.train_network.open_batches() == left


def is_fine_for_stock(name, value):
    if name == "epoch":  # A number of epochs; and an int that is too large for MindSpore's own check.
        return isinstance(value, int) and (0 < value or value < -(10**300)) and not isinstance(value, bool)
    # MindSpore asks whether it is true, which a tensor of two numbers cannot say; what is not true is nothing to call.
    return name == "callbacks" and (isinstance(value, (Tensor, np.ndarray)) or not value)


@pytest.mark.parametrize("odd", ["dataset", "epoch", "callbacks"])
def test_what_is_no_dataset_no_number_and_no_callback(odd):
    network, model = new_model(2, 2)
    good = {"epoch": 1, "dataset": batches(2), "callbacks": None}
    for value in (make() for make in ODD):
        if is_fine_for_stock(odd, value):
            continue
        given_ = {**good, odd: value}
        said = refusal(model.train, given_["epoch"], given_["dataset"], callbacks=given_["callbacks"], stock=STOCK)
        assert said is not None, value
        assert (weight_of(network), model.train_network.open_batches()) == (0, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_rows(8, 2).skip(100),
        lambda: NumpySlicesDataset((np.ones((3, 1), np.float32),) * 2).batch(4, drop_remainder=True),
        lambda: GeneratorDataset(lambda: iter([]), ["x", "y"]),
    ],
    ids=["skipped", "short", "generator"],
)
def test_no_batches_at_all(make):
    network, model = new_model()
    assert refusal(model.train, 1, make(), stock=STOCK) and weight_of(network) == 0


@pytest.mark.parametrize("columns", [1, 3])
def test_a_dataset_with_other_columns_than_the_network(columns):
    network, model = new_model(2, 2)
    x = np.ones((4, 1), np.float32)
    assert refusal(model.train, 1, NumpySlicesDataset((x,) * columns).batch(2)) is not None
    assert (weight_of(network), model.train_network.open_batches()) == (0, 0)


class Stumbling(Callback):
    """Raises at one of the events of a training, the second time that it comes."""

    def __init__(self, event):
        super().__init__()
        self.left = 2
        setattr(self, event, self.stumble)

    def stumble(self, _):
        self.left -= 1
        if self.left == 0:
            raise OSError("no more storage")


EVENTS = ["on_train_step_begin", "on_train_step_end", "on_micro_batch_begin", "on_micro_batch_end"]
EVENTS += ["on_update_begin", "on_update_end"]


@examples(20)
@given(event=st.sampled_from(EVENTS), accumulation_steps=st.integers(1, 3), micro_size=st.integers(1, 2))
def test_a_training_after_one_that_a_callback_has_ended(event, accumulation_steps, micro_size):
    network, model = new_model(micro_size, accumulation_steps)
    with pytest.raises(OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a window that is dropped with its last batch.
        model.train(2, batches(1), callbacks=Stumbling(event))
    weight, recorder = weight_of(network), Recorder()
    assert model.train_network.open_batches() == 0
    model.train(1, batches(2), callbacks=recorder)
    windows = windows_of(8, 2, accumulation_steps, "apply", 1)
    assert weight_of(network) == pytest.approx(descend(*windows, weight=weight, learning_rate=RATE), rel=1e-4)
    assert not np.isnan(weight)
