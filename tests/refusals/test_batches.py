"""Inputs, batches, gradients and datasets: used row by row, or refused in a sentence and nothing changed."""

import functools
import warnings
from collections import UserDict

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_toy import Recorder, X, batches, descend, toy, weight_of
from loop_toy import toy_loop
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import Callback
from refusal import new_step, refuses, warns
from step_probe import changed, keeping_step, values_of
from strategies import ODD, endless, examples, loss_cell, refusal

from ms_gradaccum import GradAccumulation, TokenMeanLoss, verify

EIGHT, FOUR_ROWS, THREE_ROWS, NO_ROWS = Tensor(X), Tensor(X[:4]), Tensor(X[:3]), np.zeros((0, 1), np.float32)
# The inputs, the batch_axis, and what is said of it.
BATCHES = {
    "rows that disagree": ((EIGHT, FOUR_ROWS), 0, "8 in input[0] and 4 in input[1]"),
    "no rows": ((NO_ROWS, NO_ROWS), 0, "0 in input[1]"),
    "no tensor": ((2.0, None), 0, "float, NoneType"),
    "something like a dict": ((UserDict(x=EIGHT),), 0, "but got UserDict"),
    "nothing to split": ((EIGHT, EIGHT), None, "but got none"),
    "an axis too many": ((EIGHT, EIGHT), (0, 2), "'batch_axis'", "2 for input[1] of shape (8, 1)"),
    "an entry too many": ((EIGHT, EIGHT), (0, 0, 0), "'batch_axis'", "3 entries"),
    "an entry too few": ((EIGHT, EIGHT), (0,), "'batch_axis'", "1 entry"),
    "a tree for a tensor": ((EIGHT, EIGHT), (0, (0, 1)), "'batch_axis'", "(0, 1)"),
    "other names": (({"x": EIGHT, "y": EIGHT},), ({"x": 0},), "'batch_axis'", "['x', 'y'], but got ['x']"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_split_is_refused_and_changes_nothing(case):
    inputs, batch_axis, *keys = BATCHES[case]
    step = keeping_step(loss_cell(), 2, batch_axis=batch_axis)
    before = values_of(step)
    with refuses(ValueError, *keys):
        step(*inputs)
    assert not changed(before, values_of(step))


class LossOf(nn.Cell):
    """A loss cell that returns something of its squared errors."""

    def __init__(self, form):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")
        self.form = form

    def construct(self, x):
        errors = ops.square(x * self.weight)
        if self.form == "a vector":
            return errors.reshape(-1)
        if self.form == "an int":
            return errors.mean().astype(ms.int32)
        if self.form == "nothing":
            return None
        if self.form == "a number":
            return 1.0
        if self.form == "no items":
            return ()
        if self.form == "a dict":
            return {"loss": errors.mean()}
        if self.form == "a vector and a weight":
            return errors.reshape(-1), 4
        if self.form == "an int and a weight":
            return errors.sum().astype(ms.int32), 4
        if self.form == "a sum and a text":
            return errors.sum(), "4"
        if self.form == "a sum and a vector":
            return errors.sum(), errors.reshape(-1)
        return errors.sum()


RETURNS = [
    ("a vector", False, "mean loss", "Float32 of shape (4,)"),
    ("an int", False, "mean loss", "Int32 of shape ()"),
    ("nothing", False, "mean loss", "a Python object"),
    ("a number", False, "mean loss", "a Python object"),
    ("no items", False, "mean loss", "a Python object"),
    ("a dict", False, "mean loss", "a Python object"),
    ("a vector and a weight", True, "loss sum", "Float32 of shape (4,)"),
    ("an int and a weight", True, "loss sum", "Int32 of shape ()"),
    ("a sum", True, "its weight", "no number"),
    ("a sum and a text", True, "its weight", "no number"),
    ("a sum and a vector", True, "its weight", "a tensor of shape (4,)"),
]


@pytest.mark.parametrize("form, weighted, what, got", RETURNS)
def test_a_network_that_returns_something_else_is_refused_in_both_modes(form, weighted, what, got):
    step = keeping_step(LossOf(form), 2, weighted=weighted)
    before = values_of(step)
    for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
        ms.set_context(mode=mode)
        with refuses(ValueError, "'network'", what, f"but got {got}"):
            step(EIGHT)
        assert not changed(before, values_of(step))


class KeywordOnly(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")

    def construct(self, x, *, scale=1.0):
        return (x * self.weight * scale).mean()


def test_keyword_only_arguments_are_refused():
    step = keeping_step(KeywordOnly(), 2)
    with refuses(TypeError, "the keyword-only scale"):
        step(EIGHT, scale=2.0)


def test_nested_inputs_in_a_larger_graph_are_refused(mode):
    cell = GradAccumulation(LossOf("a vector"), 2).set_train()
    with warns("train cell around"), refuses(TypeError, "a tuple, list or dict"):
        cell((EIGHT,))


INPUTS = {
    "too many": ((X, X, X), TypeError, "construct(data, label): too many positional arguments"),
    "too few": ((X,), TypeError, "construct(data, label): missing a required argument: 'label'"),
    "objects": ((np.array([[None]] * 8), X), TypeError, "an array of object"),
    "endless": ((endless(), X), ValueError, "a container that contains itself"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_no_network_has(case):
    inputs, error, key = INPUTS[case]
    step = new_step()
    before = values_of(step)
    with refuses(error, "For 'TrainOneStepCell'", key):
        step(*inputs)
    with refuses(error, "For 'GradAccumulation'", key):
        verify(loss_cell(), inputs, 2)
    assert not changed(before, values_of(step)) and step.events.batches == 0


@pytest.mark.parametrize("dtype", [np.int32, np.complex64], ids=lambda dtype: dtype.__name__)
def test_gradients_are_floating_point_numbers(dtype):
    _, accumulator = toy_loop(2)
    grad = Tensor(np.ones((1, 1), dtype))
    with refuses(TypeError, "'grads'", f"but got one of {grad.dtype}."):
        accumulator(grad)


def test_gradients_may_be_kept_in_parameters(mode):
    network, accumulator = toy_loop(2)
    kept = Parameter(Tensor([[3.0]]), "weight")
    accumulator((kept,), 1)
    kept.set_data(Tensor([[1.0]]))
    accumulator((kept,), 1)
    assert weight_of(network) == pytest.approx(-0.02 * 2)


def test_labels_are_integers(mode):
    with refuses(TypeError, "the labels", "got a tensor of Float32"):
        TokenMeanLoss(nn.Dense(1, 2))(FOUR_ROWS, Tensor(np.ones(4, np.float32)))


@pytest.mark.parametrize("form, key", [("no items", "no tensor"), ("a dict", "no tensor"), ("a sum", "an axis of")])
def test_a_backbone_returns_logits(form, key, eager):
    labels = Tensor(1) if form == "a sum" else Tensor(np.ones(4, np.int32))
    with refuses(ValueError, "the backbone", key):
        TokenMeanLoss(LossOf(form))(FOUR_ROWS, labels)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64], ids=lambda dtype: dtype.__name__)
def test_a_dtype_that_the_network_cannot_compute_with_changes_nothing(dtype, eager):
    step = new_step(accumulation_steps=2)
    step(EIGHT, EIGHT)
    before = values_of(step)
    # The network's own operator says it, as it does without accumulation.
    stock = "For 'MatMul', the type of 'x2' should be same as"
    assert refusal(step, Tensor(np.ones((3, 1), dtype)), THREE_ROWS, stock=stock)
    assert not changed(before, values_of(step)) and step.open_batches() == 1


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
    step.network.micro_size = micro_size
    step.body.accumulation_steps = accumulation_steps
    model.last_window = last_window
    step.drop()
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
