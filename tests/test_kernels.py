"""Sums on CPU: the kernel of this package adds what AssignAdd adds, in its place and in its order."""

import os
import shutil
import subprocess
import sysconfig

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from step_probe import Weights, operators

from ms_gradaccum import GradAccumulation, TrainOneStepCell, kernels
from ms_gradaccum.kernels import add_in_place

ODD = np.array([0.0, -0.0, 1e-37, -1e-30, 3.4e38, np.inf, -np.inf, np.nan, 1.0], np.float32)


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
        before = self.total * 5.0
        add_in_place(self.total, part)
        between = self.total * 3.0
        after = add_in_place(self.total, part) * 2.0
        if part.sum() < -1e30:  # never
            after = after + 1.0
        return before, between, after


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


needs_kernel = pytest.mark.skipif(not kernels.LIBRARY.exists(), reason="no C++ compiler for add_in_place.cc")


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """Let machines of many cores add as those of few do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(kernels, "_kernel", kernels._make_kernel())


def test_the_kernel_is_there_if_there_is_a_compiler():
    compiler = sysconfig.get_config_var("CXX").split()[0]
    assert kernels.has_kernel() or not shutil.which(compiler), f"{kernels.LIBRARY}: install again"


@needs_kernel
def test_many_cores_add_by_the_operator_that_uses_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(5)))
    assert isinstance(kernels._make_kernel(), ops.AssignAdd)


@needs_kernel
@pytest.mark.parametrize("source", ["", "int add_in_place;"], ids=["no library", "another version"])
def test_no_kernel_of_a_library_that_cannot_be_used(source, monkeypatch, tmp_path):
    library = tmp_path / "library.so"
    (tmp_path / "library.cc").write_text(f'extern "C" {{ {source} }}' if source else "")
    if source:
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "library.cc"], check=True)
    else:
        library.write_text("no library")
    monkeypatch.setattr(kernels, "LIBRARY", library)
    assert isinstance(kernels._make_kernel(), ops.AssignAdd)


@pytest.fixture(params=["kernel", "AssignAdd"])
def operator(request, monkeypatch):
    """Run the test with the kernel, and as if it had not been built."""
    if request.param == "AssignAdd":
        monkeypatch.setattr(kernels, "LIBRARY", kernels.LIBRARY.with_name("missing.so"))
        monkeypatch.setattr(kernels, "_kernel", kernels._make_kernel())
    elif not kernels.LIBRARY.exists():
        pytest.skip("no C++ compiler for add_in_place.cc")
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


@needs_kernel
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float64])
def test_other_dtypes_are_left_to_the_operator_that_casts(dtype):
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = Sum(np.ones(3, np.float32))
    if dtype == ms.float64:
        cell.total = Parameter(ops.ones(3, ms.float64), "total")
    cell(Tensor(np.full(3, 0.5), dtype))
    np.testing.assert_array_equal(cell.total.asnumpy(), [2.0, 2.0, 2.0])
    assert "Custom" not in operators(cell, cell.current_phase)


def test_op_by_op_it_adds_too(operator, eager):
    total = Parameter(Tensor([1.0, 2.0]), "total")
    add_in_place(total, Tensor([0.5, -2.0]))
    np.testing.assert_array_equal(total.asnumpy(), [1.5, 0.0])


@needs_kernel
def test_no_kernel_from_a_folder_that_the_user_forbids(monkeypatch, tmp_path):
    assert isinstance(kernels._make_kernel(), ops.Custom)
    monkeypatch.setenv("MS_CUSTOM_AOT_WHITE_LIST", str(tmp_path))
    assert isinstance(kernels._make_kernel(), ops.AssignAdd)


@needs_kernel
def test_a_part_of_another_shape_is_refused(operator, mode):
    with pytest.raises((RuntimeError, ValueError)):
        Sum(np.zeros(2, np.float32))(Tensor([1.0]))


@pytest.mark.parametrize("columns", [1, 3])
def test_each_gradient_is_added_by_it_however_rows_change(columns, operator, mode):
    network = Weights(columns)
    step = TrainOneStepCell(GradAccumulation(network, 2), nn.SGD([network.weight], 1.0))
    expected = np.zeros(columns)
    # From the third on in a graph that does not know the gradient's shape.
    for rows in (8, 6, 5, 3):
        x = numbers((rows, columns), rows)
        step(Tensor(x))
        expected -= x.mean(0)
    np.testing.assert_allclose(network.weight.asnumpy(), expected, rtol=1e-5)
    (compiled,) = step.micro_steps.by_structure.values()
    assert operators(compiled.cell, compiled.cell.current_phase).count(operator) >= 1
