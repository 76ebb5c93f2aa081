"""Inputs of a network: any number, nesting, dtype and batch axis; and real networks, small."""

from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mutable, nn, ops
from open_window import buffer_of
from refusal import refuses
from step_probe import keeping_step, number

pytestmark = pytest.mark.usefixtures("eager")

X = np.float32([1, 2, 3, 4, 5])
Y = 2 * X
# The weight is 1, so x * weight - y = -x: the loss is mean(x^2) = 11 and its gradient -2 mean(x^2) = -22.
ROWS, LOSS, GRADIENT_SUM = 5, 11, 5 * -22


class Line(nn.Cell):
    """The base of the loss cells below: the mean over the rows of (x * weight - y)^2, times a factor."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")

    def loss(self, x, y, factor=1.0):
        return ops.square(x * self.weight - y).mean() * factor


class TakesMore(Line):
    def construct(self, x, y=None, factor=1.0, *others):
        return self.loss(x, 2 * x if y is None else y, factor)


class TakesPair(Line):
    def construct(self, pair):
        return self.loss(pair[0], pair[1][0])


class TakesDict(Line):
    def construct(self, batch):
        return self.loss(batch["rows"], batch["labels"]["y"])


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


class TakesBatch(Line):
    def construct(self, batch):
        return self.loss(batch.x, batch.y)


def open_step(loss_cell, micro_size=2, **settings):
    """A step whose window stays open: what it has summed can be read, and only the micro step is compiled."""
    return keeping_step(loss_cell, micro_size, accumulation_steps=100, **settings)


def assert_sums(step, *args, factor=1, **kwargs):
    step.drop()
    output = step(*args, **kwargs)
    assert (number(output.weight), number(output.loss)) == (ROWS, pytest.approx(factor * LOSS))
    assert number(buffer_of(step).sums[0]) == pytest.approx(factor * GRADIENT_SUM)


def test_tensors_arrays_defaults_none_python_values_and_numbers_as_tensors():
    step = open_step(TakesMore())
    assert_sums(step, Tensor(X), Tensor(Y))
    assert_sums(step, X, Y)
    assert_sums(step, Tensor(X), y=Y)
    assert_sums(step, y=Tensor(Y), x=X)
    assert_sums(step, X)
    assert_sums(step, x=X)
    assert_sums(step, X, None, 3, factor=3)
    assert_sums(step, X, Y, 0.5, factor=0.5)
    assert_sums(step, X, Y, True, "text", None, ms.float32)
    # Without axes, they go into each micro batch.
    for factor in (Tensor(3.0), np.array(3, np.float32)):
        assert_sums(step, X, Y, factor, factor=3)


@pytest.mark.parametrize(
    ("loss_cell", "inputs"),
    [
        (TakesPair, (Tensor(X), (Tensor(Y),))),
        (TakesPair, [X, [Y]]),
        (TakesDict, {"rows": X, "labels": {"y": Tensor(Y)}}),
        (TakesPair, mutable((Tensor(X), (Tensor(Y),)))),
    ],
    ids=["tuple", "list", "dict", "mutable"],
)
def test_nested_inputs(loss_cell, inputs):
    assert_sums(open_step(loss_cell()), inputs)


def test_a_named_tuple_keeps_its_names_where_python_runs_the_network(monkeypatch):
    assert_sums(open_step(TakesBatch()), Batch(Tensor(X), Tensor(Y)))
    monkeypatch.delenv("MS_JIT")
    with refuses(ValueError, "'compile'", "gradient in a graph"):
        open_step(TakesBatch(), compile=True)(Batch(Tensor(X), Tensor(Y)))


class TakesAnyDtype(Line):
    def construct(self, x, half, double, whole, long, flag):
        y = 2 * half.astype(ms.float32) + double.astype(ms.float32) - whole + long - flag.astype(ms.float32)
        return self.loss(x, y)


def test_inputs_of_many_dtypes():
    ones = np.ones(ROWS)
    others = [ones.astype(np.float64), ones.astype(np.int32), ones.astype(np.int64), ones.astype(bool)]
    assert_sums(open_step(TakesAnyDtype()), X, X.astype(np.float16), *others)


class TakesColumns(Line):
    """Takes x with its rows on axis 1 and a table that belongs to all rows."""

    def construct(self, x, table, y):
        return self.loss(x.sum(0), y) + 0 * table.sum()


class TakesNest(TakesColumns):
    def construct(self, batch):
        return super().construct(batch["x"], batch["table"], batch["y"])


@pytest.mark.parametrize("axes", [(1, None, 0), [-1, None, -1]])
def test_each_input_may_have_a_batch_axis_of_its_own(axes):
    inputs = {"x": np.stack([X - 1, np.ones_like(X)]), "table": np.ones((7, 7), np.float32), "y": Y}
    assert_sums(open_step(TakesColumns(), batch_axis=axes), *inputs.values())
    assert_sums(open_step(TakesNest(), batch_axis=(dict(zip(inputs, axes)),)), inputs)
