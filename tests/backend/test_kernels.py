"""Sums on CPU: the kernels of this package do what MindSpore's operators do, in their place and in their order."""

import ctypes
import os
import shutil
import subprocess
import sysconfig

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from quick_mindspore import compiling
from step_probe import Weights, operators

from ms_gradaccum import Accumulator, ClipByGlobalNorm, GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend import kernels
from ms_gradaccum.backend.device import with_condition
from ms_gradaccum.backend.kernels import add_in_place, at_once, fill_in_place, scale_in_place, sum_of_squares

ODD = np.array([0.0, -0.0, 1e-37, -1e-30, 3.4e38, np.inf, -np.inf, np.nan, 1.0], np.float32)

NONE = (None,) * len(kernels._NAMES)


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


class SumInThreadPool(Sum):
    """The same, which by its condition several threads of MindSpore run."""

    def construct(self, part):
        before, between, after = super().construct(part)
        return before, between, ops.depend(after, with_condition(ops.abs(part.sum())))


class SumSometimes(Sum):
    """Adds where a tensor says so, without a use of what adding returns."""

    def construct(self, part):
        for _ in range(3):
            if part.sum() > 0:
                add_in_place(self.total, part)
                self.total = self.total * 2.0
        return self.total + 0.0


def numbers(shape, seed):
    return np.array(np.random.default_rng(seed).standard_normal(shape), np.float32)


needs_kernels = pytest.mark.skipif(not kernels.LIBRARY.exists(), reason="no C++ compiler for kernels.cc")


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """Let machines of many cores add as those of few do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    load(monkeypatch)


def load(monkeypatch):
    """Look for the kernels anew."""
    for name, kernel in zip(kernels._NAMES, kernels._make_kernels()):
        monkeypatch.setattr(kernels, f"_{name}", kernel)


def test_the_kernels_are_there_if_there_is_a_compiler():
    compiler = sysconfig.get_config_var("CXX").split()[0]
    assert kernels.has_kernels() or not shutil.which(compiler), f"{kernels.LIBRARY}: install again"


@needs_kernels
def test_many_cores_add_by_the_operator_that_uses_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(5)))
    assert kernels._make_kernels() == NONE


@needs_kernels
@pytest.mark.parametrize("source", ["", "int add_in_place;"], ids=["no library", "another version"])
def test_no_kernel_of_a_library_that_cannot_be_used(source, monkeypatch, tmp_path):
    library = tmp_path / "library.so"
    (tmp_path / "library.cc").write_text(f'extern "C" {{ {source} }}' if source else "")
    if source:
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "library.cc"], check=True)
    else:
        library.write_text("no library")
    monkeypatch.setattr(kernels, "LIBRARY", library)
    assert kernels._make_kernels() == NONE


@pytest.fixture(params=["kernel", "AssignAdd"])
def operator(request, monkeypatch):
    """Run the test with the kernels, and as if they had not been built."""
    if request.param == "AssignAdd":
        monkeypatch.setattr(kernels, "LIBRARY", kernels.LIBRARY.with_name("missing.so"))
        load(monkeypatch)
    elif not kernels.LIBRARY.exists():
        pytest.skip("no C++ compiler for kernels.cc")
    return {"kernel": "Custom", "AssignAdd": "AssignAdd"}[request.param]


@pytest.mark.parametrize("kind", [Sum, SumInThreadPool])
@pytest.mark.parametrize("shape", [(), (7,), (1000, 33)], ids=str)
def test_sums_are_those_of_numpy_bit_by_bit(shape, kind, operator):
    ms.set_context(mode=ms.GRAPH_MODE)
    start, part = numbers(shape, 1), numbers(shape, 2)
    cell = kind(start)
    before, between, after = cell(Tensor(part))
    once = start + part
    np.testing.assert_array_equal(before.asnumpy(), start * np.float32(5))
    np.testing.assert_array_equal(between.asnumpy(), once * np.float32(3))
    np.testing.assert_array_equal(after.asnumpy(), (once + part) * np.float32(2))
    np.testing.assert_array_equal(cell.total.asnumpy(), once + part)
    assert operators(cell, cell.current_phase).count(operator) == 2


def test_numbers_that_are_not_finite_or_large_are_added_as_numpy_does(operator):
    start, part = (np.ascontiguousarray(grid) for grid in np.meshgrid(ODD, ODD))
    cell = Sum(start)
    ms.set_context(mode=ms.GRAPH_MODE)
    cell(Tensor(part))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(cell.total.asnumpy(), start + part + part)


def test_a_view_is_added_as_what_it_shows(operator, mode):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    view = Tensor(numbers((4, 3), 1)).T
    assert not view.is_contiguous()
    ms.set_context(mode=mode)
    cell = Sum(np.zeros((3, 4), np.float32))
    cell(view)
    np.testing.assert_array_equal(cell.total.asnumpy(), 2 * numbers((4, 3), 1).T)


def test_adding_keeps_its_place_in_conditions(operator):
    cell = SumSometimes(np.array([1.0, 2.0], np.float32))
    ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_array_equal(cell(Tensor([1.0, 3.0])).asnumpy(), [22.0, 58.0])
    np.testing.assert_array_equal(cell(Tensor([-1.0, 0.0])).asnumpy(), [22.0, 58.0])
    assert operator in operators(cell, cell.current_phase)


class Chain(nn.Cell):
    """Kernels that change a total, with a look at it and at its squares between them, and a condition for the pool."""

    def __init__(self, start, pooled):
        super().__init__()
        self.total = Parameter(Tensor(start), "total")
        self.pooled = pooled

    def construct(self, factor, number):
        squares = sum_of_squares(self.total)
        scaled = scale_in_place(factor, self.total) + 1.0
        squares_of_scaled = sum_of_squares(self.total)
        if self.pooled:
            squares = with_condition(squares)
        filled = fill_in_place(number, self.total) * 2.0
        return squares, scaled, squares_of_scaled, filled


@pytest.mark.parametrize("pooled", [False, True], ids=["Chain", "ChainInThreadPool"])
@pytest.mark.parametrize("shape", [(), (1,), (15,), (16,), (4097,), (3, 5, 7), (1000, 33)], ids=str)
def test_each_kernel_does_what_numpy_does(shape, pooled, operator):
    ms.set_context(mode=ms.GRAPH_MODE)
    start, factor = numbers(shape, 1), np.float32(0.3)
    cell = Chain(start, pooled)
    squares, scaled, squares_of_scaled, filled = (out.asnumpy() for out in cell(Tensor(factor), Tensor(7.0)))
    assert squares.shape == squares_of_scaled.shape == ()
    assert squares == pytest.approx(np.square(start.astype(np.float64)).sum(), rel=1e-6)
    np.testing.assert_array_equal(scaled, start * factor + np.float32(1))
    assert squares_of_scaled == pytest.approx(np.square((start * factor).astype(np.float64)).sum(), rel=1e-6)
    np.testing.assert_array_equal(filled, np.full(shape, 14, np.float32))
    np.testing.assert_array_equal(cell.total.asnumpy(), np.full(shape, 7, np.float32))
    found = operators(cell, cell.current_phase)
    assert ("Switch" in found) == pooled
    assert found.count("Custom") == (4 if operator == "Custom" else 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e19])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_squares_show_what_is_not_finite_or_too_large(bad, place, operator, mode):
    values = np.ones(5000, np.float32)
    values[place] = bad
    squares = float(sum_of_squares(Tensor(values)).asnumpy())
    assert np.isnan(squares) if np.isnan(bad) else squares == np.inf


@needs_kernels
def test_many_small_squares_beside_a_large_one_are_not_lost(mode):
    values = np.full(10**7, 1e-3, np.float32)
    values[0] = 100.0
    assert float(sum_of_squares(Tensor(values)).asnumpy()) == pytest.approx(10**4 + 10, rel=1e-7)


@needs_kernels
@pytest.mark.parametrize("dtype", [ms.float16, ms.float64])
def test_totals_of_other_dtypes_are_left_to_operators(dtype, mode):
    total = Parameter(Tensor([1.0, 2.0], dtype), "total")
    assert float(sum_of_squares(total).asnumpy()) == 5.0
    np.testing.assert_array_equal(scale_in_place(Tensor(0.5, dtype), total).asnumpy(), [0.5, 1.0])
    np.testing.assert_array_equal(fill_in_place(Tensor(3.0, dtype), total).asnumpy(), [3.0, 3.0])


@needs_kernels
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float64])
def test_other_dtypes_are_cast_before_they_are_added(dtype):
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = Sum(np.ones(3, np.float32))
    if dtype == ms.float64:
        cell.total = Parameter(ops.ones(3, ms.float64), "total")
    cell(Tensor(np.full(3, 0.5), dtype))
    np.testing.assert_array_equal(cell.total.asnumpy(), [2.0, 2.0, 2.0])
    # The kernel is for float32 totals alone.
    assert dtype != ms.float64 or "Custom" not in operators(cell, cell.current_phase)


def test_op_by_op_it_adds_too(operator, eager):
    total = Parameter(Tensor([1.0, 2.0]), "total")
    add_in_place(total, Tensor([0.5, -2.0]))
    np.testing.assert_array_equal(total.asnumpy(), [1.5, 0.0])
    scale_in_place(Tensor(3.0), total)
    np.testing.assert_array_equal(total.asnumpy(), [4.5, 0.0])
    assert float(sum_of_squares(total).asnumpy()) == 20.25
    fill_in_place(Tensor(-1.0), total)
    np.testing.assert_array_equal(total.asnumpy(), [-1.0, -1.0])


@needs_kernels
def test_no_kernel_from_a_folder_that_the_user_forbids(monkeypatch, tmp_path):
    assert kernels._make_kernels() != NONE
    monkeypatch.setenv("MS_CUSTOM_AOT_WHITE_LIST", str(tmp_path))
    assert kernels._make_kernels() == NONE


def answer(kernel, *arrays):
    """Call a kernel without MindSpore, and return 0 if it could use these arrays and a result."""
    arrays = [np.ascontiguousarray(array, np.float32) for array in (*arrays, np.zeros(1))]
    shapes = [(ctypes.c_int64 * each.ndim)(*each.shape) for each in arrays]
    count = len(arrays)
    tensors = (ctypes.c_void_p * count)(*(each.ctypes.data for each in arrays))
    dimensions = (ctypes.c_int * count)(*(each.ndim for each in arrays))
    places = (ctypes.c_void_p * count)(*map(ctypes.addressof, shapes))
    library = ctypes.CDLL(str(kernels.LIBRARY))
    return getattr(library, kernel)(count, tensors, dimensions, places, None, None, None)


@needs_kernels
@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 2), (2, 2)], ids=str)
def test_a_part_of_another_shape_is_refused(shape):
    one, total = np.ones(()), np.zeros(2)
    assert answer("scaled_add_in_place", one, total, np.ones(2)) == 0
    assert answer("scaled_add_in_place", one, total, np.ones(shape)) == 1


@needs_kernels
def test_what_a_kernel_refuses_is_an_error(operator, mode):
    with pytest.raises((RuntimeError, ValueError)):
        Sum(np.zeros(2, np.float32))(Tensor(np.ones((2, 2), np.float32)))


@pytest.mark.parametrize("columns", [1, 3])
def test_each_gradient_is_added_by_it_however_rows_change(columns, operator, mode):
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
    steps = step.body.window.micro_steps
    (compiled,) = [each.adding for each in steps.eager.values()] or steps.by_structure.values()
    # Op by op the kernel adds all gradients without a graph.
    if mode == ms.GRAPH_MODE or not kernels.has_kernels():
        assert operators(compiled.cell, compiled.cell.current_phase).count(operator) >= 1


@needs_kernels
def test_one_call_of_a_kernel_takes_many_tensors(eager):
    shapes = [(), (3,), (2, 5), (1, 1, 4)]
    starts, parts = ([numbers(shape, seed) for shape in shapes] for seed in (0, 1))
    totals = [Parameter(Tensor(start), f"total {i}") for i, start in enumerate(starts)]
    at_once("add_all_in_place", Tensor(3.0, ms.float32), *totals, *map(Tensor, parts))
    sums = [start + 3 * part for start, part in zip(starts, parts)]
    squares = at_once("sum_of_squares", *totals).asnumpy()
    np.testing.assert_allclose(squares, [sum((total**2).sum() for total in sums)], rtol=1e-6)
    at_once("scaled_in_place", Tensor(0.5, ms.float32), *totals)
    for total, expected in zip(totals, sums):
        np.testing.assert_allclose(total.asnumpy(), expected / 2, rtol=1e-6)
    count = Parameter(Tensor(7, ms.int32), "count")
    at_once("filled_in_place", Tensor(0.0, ms.float32), *totals, count)
    assert [np.abs(each.asnumpy()).max() for each in (*totals, count)] == [0] * 5


@needs_kernels
def test_inputs_of_a_kernel_are_waited_for_asleep(monkeypatch, eager):
    # A kernel that is called earlier waits in a busy loop: convolutions on one core took 1.5 times as long.
    order = []
    kernel = kernels._sum_of_squares
    monkeypatch.setattr(kernels, "wait", lambda: order.append("wait"))
    monkeypatch.setattr(kernels, "_sum_of_squares", lambda *tensors: order.append("kernel") or kernel(*tensors))
    assert at_once("sum_of_squares", Tensor([3.0])).asnumpy().item() == 9
    assert order == ["wait", "kernel"]


@needs_kernels
def test_parts_of_other_shapes_are_refused_among_many():
    one, totals = np.ones(()), [np.zeros(2), np.zeros(3)]
    assert answer("add_all_in_place", one, *totals, np.ones(2), np.ones(3)) == 0
    assert answer("add_all_in_place", one, *totals, np.ones(3), np.ones(2)) == 1
    assert answer("add_all_in_place", one, *totals, np.ones(2)) == 1


@needs_kernels
@pytest.mark.parametrize("clip", [None, ClipByGlobalNorm(0.5)], ids=["no clip", "clip"])
@pytest.mark.parametrize("optimizer", [nn.Momentum, optim.SGD], ids=["compiled", "op by op"])
def test_a_window_without_graphs_is_that_of_graphs(optimizer, clip, monkeypatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    found = []
    for _ in range(2):
        network = Weights(3)
        made = optimizer([network.weight], 0.5, 0.9)
        step = TrainOneStepCell(GradAccumulation(network, 3), made, clip=clip, check_loss=False)
        outputs = [step(Tensor(numbers((rows, 3), rows) + 1)) for rows in (8, 6)]
        reports = [float(each.asnumpy()) for output in outputs for each in output._asdict().values()]
        found.append([*reports, *network.weight.asnumpy()])
        assert {str(each.dtype) for each in outputs[0]._asdict().values()} == {"Float32", "Bool"}
        monkeypatch.setattr(kernels, "_scaled_add_in_place", None)
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert network.weight.asnumpy().any()


def test_a_gradient_that_a_hook_has_rounded_is_not_read_as_float32():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    found = []
    for dtype in (ms.float32, ms.float16):
        network = Weights(3)
        network.weight.register_hook(lambda grad, dtype=dtype: ops.cast(grad, dtype))
        step = TrainOneStepCell(GradAccumulation(network, 3), nn.SGD([network.weight], 0.5), check_loss=False)
        step(Tensor(numbers((6, 3), 0)))
        found.append(network.weight.asnumpy())
    np.testing.assert_allclose(*found, rtol=1e-2)
    assert np.abs(found[0]).max() > 0.1


def test_micro_batches_with_and_without_the_kernel_have_one_mean_loss():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    losses = []
    for is_rounded in (False, True):
        network, rounded = Weights(3), iter([False, is_rounded, False])
        network.weight.set_data(Tensor(numbers((3,), 1)))
        network.weight.register_hook(
            lambda grad, rounded=rounded: ops.cast(grad, ms.float16) if next(rounded) else grad
        )
        accumulator = Accumulator(GradAccumulation(network, 3), nn.SGD([network.weight], 0.5), check_loss=False)
        losses.append(float(accumulator.backward(Tensor(numbers((6, 3), 0))).asnumpy()))
        accumulator.step()
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert abs(losses[0]) > 0.01
