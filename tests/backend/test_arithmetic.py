"""Sums in place: each change is that of NumPy, in its place and in its order."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from quick_mindspore import compiling
from step_probe import Weights, operators

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend.arithmetic import add_in_place, fill_in_place, scale_in_place, sum_of_squares


class Sum(nn.Cell):
    """A sum, what reads it between two additions, and what uses the second one's result."""

    def __init__(self, start):
        super().__init__()
        self.total = Parameter(Tensor(start), "total")

    def construct(self, part):
        before = self.total * 5.0
        add_in_place(self.total, part)
        between = self.total * 3.0
        return before, between, add_in_place(self.total, part) * 2.0


def numbers(shape, seed):
    return np.array(np.random.default_rng(seed).standard_normal(shape), np.float32)


@pytest.mark.parametrize("shape", [(), (7,), (1000, 33)], ids=str)
def test_sums_are_those_of_numpy_bit_by_bit_without_a_product(shape):
    ms.set_context(mode=ms.GRAPH_MODE)
    start, part = numbers(shape, 1), numbers(shape, 2)
    cell = Sum(start)
    before, between, after = cell(Tensor(part))
    once = start + part
    np.testing.assert_array_equal(before.asnumpy(), start * np.float32(5))
    np.testing.assert_array_equal(between.asnumpy(), once * np.float32(3))
    np.testing.assert_array_equal(after.asnumpy(), (once + part) * np.float32(2))
    np.testing.assert_array_equal(cell.total.asnumpy(), once + part)
    found = operators(cell, cell.current_phase)
    # The three products are those of the cell: a factor of 1 is none.
    assert found.count("AssignAdd") == 2
    assert sum(name.startswith("Mul") for name in found) == 3


class Chain(nn.Cell):
    def __init__(self, start):
        super().__init__()
        self.total = Parameter(Tensor(start), "total")

    def construct(self, factor, number):
        squares = sum_of_squares(self.total)
        scaled = scale_in_place(factor, self.total) + 1.0
        squares_of_scaled = sum_of_squares(self.total)
        filled = fill_in_place(number, self.total) * 2.0
        return squares, scaled, squares_of_scaled, filled


@pytest.mark.parametrize("shape", [(), (1,), (4097,), (3, 5, 7), (1000, 33)], ids=str)
def test_each_change_is_that_of_numpy(shape):
    ms.set_context(mode=ms.GRAPH_MODE)
    start, factor = numbers(shape, 1), np.float32(0.3)
    cell = Chain(start)
    squares, scaled, squares_of_scaled, filled = (out.asnumpy() for out in cell(Tensor(factor), Tensor(7.0)))
    assert squares.shape == squares_of_scaled.shape == ()
    assert squares == pytest.approx(np.square(start.astype(np.float64)).sum())
    np.testing.assert_array_equal(scaled, start * factor + np.float32(1))
    assert squares_of_scaled == pytest.approx(np.square((start * factor).astype(np.float64)).sum())
    np.testing.assert_array_equal(filled, np.full(shape, 14, np.float32))
    np.testing.assert_array_equal(cell.total.asnumpy(), np.full(shape, 7, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e19])
@pytest.mark.parametrize("place", [0, 4999])
def test_squares_show_what_is_not_finite_or_too_large(bad, place, mode):
    values = np.ones(5000, np.float32)
    values[place] = bad
    squares = float(sum_of_squares(Tensor(values)).asnumpy())
    assert np.isnan(squares) if np.isnan(bad) else squares == np.inf


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64])
def test_totals_of_other_dtypes_keep_them(dtype, mode):
    total = Parameter(Tensor([1.0, 2.0], dtype), "total")
    assert float(sum_of_squares(total).asnumpy()) == 5.0
    np.testing.assert_array_equal(scale_in_place(Tensor(0.5, dtype), total).asnumpy(), [0.5, 1.0])
    np.testing.assert_array_equal(fill_in_place(Tensor(3.0, dtype), total).asnumpy(), [3.0, 3.0])
    assert total.dtype == dtype


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float64])
def test_other_dtypes_are_cast_before_they_are_added(dtype):
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = Sum(np.ones(3, np.float32))
    if dtype == ms.float64:
        cell.total = Parameter(ops.ones(3, ms.float64), "total")
    cell(Tensor(np.full(3, 0.5), dtype))
    np.testing.assert_array_equal(cell.total.asnumpy(), [2.0, 2.0, 2.0])


@pytest.mark.parametrize("columns", [1, 3])
def test_each_gradient_is_added_however_rows_change(columns, mode):
    network = Weights(columns)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0), check_loss=False)
    expected = np.zeros(columns)
    # From the third on in a graph that does not know the gradient's shape.
    with compiling("the network", "the sum of the gradients"):
        for rows in (8, 6, 5, 3):
            x = numbers((rows, columns), rows)
            step(Tensor(x))
            expected -= x.mean(0)
    np.testing.assert_allclose(network.weight.asnumpy(), expected, rtol=1e-5)
