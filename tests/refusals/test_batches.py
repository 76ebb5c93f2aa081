"""Inputs, batches, gradients and datasets: used row by row, or refused in a sentence and nothing changed."""

import warnings
from collections import UserDict

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, batches, descend, line, toy, weight_of
from loop_toy import toy_loop
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import Callback
from refusal import loss_cell, new_step, refuses, warns
from step_probe import Of, changed, keeping_step, number, values_of
from strategies import endless, refusal

from ms_gradaccum import GradAccumulation, GradAccumulationWarning, TokenMeanLoss, verify

EIGHT, FOUR_ROWS, NO_ROWS = Tensor(X), Tensor(X[:4]), np.zeros((0, 1), np.float32)
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


def test_what_is_like_a_dict_goes_whole_into_a_network_of_whole_batches(eager):
    of_mapping = Of(line(), lambda out, labels: (out - labels["y"]).square().mean())
    assert number(keeping_step(of_mapping, 1)(EIGHT, UserDict(y=2 * EIGHT)).loss) == 102


class LossOf(nn.Cell):
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
        with warnings.catch_warnings(), refuses(ValueError, "'network'", what, f"but got {got}"):
            warnings.simplefilter("error", GradAccumulationWarning)
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
    "long doubles": ((X.astype(np.longdouble), X), TypeError, "an array of float128"),
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: batches(2).skip(100),
        lambda: NumpySlicesDataset((np.ones((3, 1), np.float32),) * 2).batch(4, drop_remainder=True),
        lambda: GeneratorDataset(lambda: iter([]), ["x", "y"]),
    ],
    ids=["skipped", "short", "generator"],
)
def test_no_batches_at_all(make):
    network, model = toy()
    # MindSpore checks it itself before anything is trained.
    stock = "There is no valid data in dataset|The input value must be"
    assert refusal(model.train, 1, make(), stock=stock) and weight_of(network) == 0


@pytest.mark.parametrize("columns", [1, 3])
def test_a_dataset_with_other_columns_than_the_network(columns):
    network, model = toy(2, accumulation_steps=2)
    x = np.ones((4, 1), np.float32)
    assert refusal(model.train, 1, NumpySlicesDataset((x,) * columns).batch(2)) is not None
    assert (weight_of(network), model.train_network.open_batches()) == (0, 0)


class Stumbling(Callback):
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


@pytest.mark.parametrize("event", EVENTS)
def test_a_training_after_one_that_a_callback_has_ended(event):
    network, model = toy(2, accumulation_steps=2)
    with pytest.raises(OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a window that is dropped with its last batch.
        model.train(2, batches(1), callbacks=Stumbling(event))
    assert model.train_network.open_batches() == 0
    expected = descend(range(1, 5), range(5, 9), weight=weight_of(network))
    model.train(1, batches(2))
    assert weight_of(network) == pytest.approx(expected, rel=1e-4)
