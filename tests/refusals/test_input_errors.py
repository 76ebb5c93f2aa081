"""Batches and networks that are refused: every error is one sentence, the same in both modes, and changes nothing."""

from collections import UserDict

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line
from mindspore import Parameter, Tensor, nn, ops
from refusal import AXIS, raises
from refusal import NO_TENSOR as PYTHON_OBJECT
from step_probe import changed, keeping_step, values_of

from ms_gradaccum import GradAccumulation

TENSORS = "Give tensors, or tuples, lists and dicts of them; dict(batch) makes a dict of what is like one."


EIGHT, FOUR, NO_ROWS = Tensor(X), Tensor(X[:4]), np.zeros((0, 1), np.float32)
BATCHES = {
    "rows that disagree": (
        (EIGHT, FOUR),
        0,
        "the inputs must have the same number of rows on their batch axis, but got 8 in input[0] and 4 in input[1]. "
        + AXIS,
    ),
    "no rows": (
        (NO_ROWS, NO_ROWS),
        0,
        "a batch must have at least one row, but got 0 in input[1]. Skip empty batches.",
    ),
    "no tensor": ((2.0, None), 0, f"at least one input must be a tensor, but got float, NoneType. {TENSORS}"),
    "something like a dict": (
        (UserDict(x=EIGHT),),
        0,
        f"at least one input must be a tensor, but got UserDict. {TENSORS}",
    ),
    "nothing to split": (
        (EIGHT, EIGHT),
        None,
        f"at least one input must be a tensor with a batch axis, but got none. {AXIS}",
    ),
    "an axis too many": (
        (EIGHT, EIGHT),
        (0, 2),
        "the argument 'batch_axis' must be an axis of each input that is split, but got 2 for input[1] of shape "
        f"(8, 1). {AXIS}",
    ),
    "an entry too many": (
        (EIGHT, EIGHT),
        (0, 0, 0),
        f"the argument 'batch_axis' must be as long as the 2 inputs, but got 3 entries. {AXIS}",
    ),
    "an entry too few": (
        (EIGHT, EIGHT),
        (0,),
        f"the argument 'batch_axis' must be as long as the 2 inputs, but got 1 entry. {AXIS}",
    ),
    "a tree for a tensor": (
        (EIGHT, EIGHT),
        (0, (0, 1)),
        f"the argument 'batch_axis' must be an int or None for input[1], but got (0, 1). {AXIS}",
    ),
    "other names": (
        ({"x": EIGHT, "y": EIGHT},),
        ({"x": 0},),
        f"the argument 'batch_axis' must be a dict with the names ['x', 'y'], but got ['x']. {AXIS}",
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_split_is_refused_and_changes_nothing(case):
    inputs, batch_axis, sentence = BATCHES[case]
    step = keeping_step(nn.WithLossCell(line(), nn.MSELoss()), 2, batch_axis=batch_axis)
    before = values_of(step)
    with raises(ValueError, "For 'GradAccumulation', " + sentence):
        step(*inputs)
    assert not changed(before, values_of(step))


class Returns(nn.Cell):
    """A loss cell that returns something of its squared errors."""

    def __init__(self, form):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")
        self.form = form

    def construct(self, x):
        return self.form(ops.square(x * self.weight))


MEAN_RULE = "must return its mean loss, a floating-point scalar, first, but got"
MEAN_REMEDY = (
    "Reduce it to its mean, for example with reduction='mean', or return (loss_sum, weight) with weighted=True."
)
SUM_RULE = "must return its loss sum, a floating-point scalar, first, but got"
WEIGHT_RULE = "must return its weight, a scalar, after the loss sum, but got"
PAIR_REMEDY = "Return (loss_sum, weight), two scalars, or use weighted=False for a mean loss."


def a_vector(errors):
    return errors.reshape(-1)


def an_int(errors):
    return errors.mean().astype(ms.int32)


def nothing(errors):
    return None


def a_number(errors):
    return 1.0


def no_items(errors):
    return ()


def a_dict(errors):
    return {"loss": errors.mean()}


def one_sum(errors):
    return errors.sum()


def a_vector_sum(errors):
    return errors.reshape(-1), 4


def a_vector_weight(errors):
    return errors.sum(), errors.reshape(-1)


def a_text_weight(errors):
    return errors.sum(), "4"


def an_int_sum(errors):
    return errors.sum().astype(ms.int32), 4


NO_TENSOR = PYTHON_OBJECT.partition("but got ")[2]
RETURNS = [
    (a_vector, False, f"{MEAN_RULE} Float32 of shape (4,). {MEAN_REMEDY}"),
    (an_int, False, f"{MEAN_RULE} Int32 of shape (). {MEAN_REMEDY}"),
    *((form, False, f"{MEAN_RULE} {NO_TENSOR}") for form in (nothing, a_number, no_items, a_dict)),
    (a_vector_sum, True, f"{SUM_RULE} Float32 of shape (4,). {PAIR_REMEDY}"),
    (an_int_sum, True, f"{SUM_RULE} Int32 of shape (). {PAIR_REMEDY}"),
    (one_sum, True, f"{WEIGHT_RULE} no number. {PAIR_REMEDY}"),
    (a_text_weight, True, f"{WEIGHT_RULE} no number. {PAIR_REMEDY}"),
    (a_vector_weight, True, f"{WEIGHT_RULE} a tensor of shape (4,). {PAIR_REMEDY}"),
]


@pytest.mark.parametrize(("form", "weighted", "sentence"), RETURNS, ids=lambda value: getattr(value, "__name__", None))
def test_a_network_that_returns_something_else_is_refused_in_both_modes(form, weighted, sentence):
    step = keeping_step(Returns(form), 2, weighted=weighted)
    before = values_of(step)
    for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
        ms.set_context(mode=mode)
        with raises(ValueError, f"For 'GradAccumulation', the argument 'network' {sentence}"):
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
    with raises(
        TypeError,
        "For 'GradAccumulation', the inputs must be positional arguments of the network's construct, but got the "
        "keyword-only scale. Remove the '*' from its signature.",
    ):
        step(EIGHT, scale=2.0)


def test_nested_inputs_in_a_larger_graph_are_refused(mode):
    cell = GradAccumulation(Returns(a_vector), 2).set_train()
    with (
        pytest.warns(UserWarning, match="^For 'GradAccumulation', the train cell around it"),
        raises(
            TypeError,
            "For 'GradAccumulation', the inputs inside a larger graph must be tensors and Python values, but got a "
            "tuple, list or dict. Give its tensors one by one.",
        ),
    ):
        cell((EIGHT,))
