"""Run a cell as a compiled graph, whatever the mode of the caller."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import JitConfig, Tensor, nn

# Not ms.get_context("mode"), which takes 25 times as long, and this is asked before every call.
from mindspore.context import _get_mode

from ms_gradaccum._checks import first_line, warn

try:
    from mindspore.graph.api import _cell_graph_executor, _pynative_executor
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import _cell_graph_executor, _pynative_executor

# Graphs compiled for fixed shapes before one graph for changing shapes takes over. A split that does not come
# out even makes two shapes, the last batch of the data two more.
MAX_FIXED_SHAPES = 4

_DEFAULT_JIT_CONFIG = JitConfig().jit_config_dict

# The input of a graph that needs none.
NOTHING = Tensor(0.0, ms.float32)

# Of glibc.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None

Shapes = tuple[tuple[int, ...], ...]


class Compiled:
    """Calls a cell as a compiled graph, in PYNATIVE mode too, where a compiled micro step is 3 to 100 times faster.

    A cell that cannot be compiled runs eagerly if the user's mode is PYNATIVE, after one warning that says why.
    """

    def __init__(
        self,
        make_cell: Callable[[], nn.Cell],
        owner: str,
        what: str,
        why_not: str = "",
        *,
        takes_gradient: bool = False,
    ) -> None:
        self.make_cell = make_cell
        self.owner = owner
        self.what = what
        # Known beforehand: why it cannot be compiled in PYNATIVE mode.
        self.why_not = why_not
        self.cell = make_cell()
        # A flat list, since it is gone through before every call.
        self.cells = [cell for _, cell in self.cell.cells_and_names()]
        # Those whose hooks a gradient would call.
        self.parameters = self.cell.trainable_params() if takes_gradient else []
        self.eager = False
        # Whether the last call got as far as running a graph, which may have changed something before it failed.
        self.has_run = False
        # The shapes for which there is a graph of fixed shapes.
        self.fixed: set[Shapes] = set()
        # What MindSpore calls the graphs that have run, by the cell's phase (training or not) and the shapes.
        self.graphs: dict[tuple[str, Shapes], str] = {}
        # What fits all shapes so far: -1 for an axis whose length changes. None before the first call.
        self.general: Shapes | None = None
        # The cell whose graph takes changing shapes, once it is needed.
        self.general_cell: nn.Cell | None = None
        # Whether the network has an operator that needs fixed lengths, so that each shape gets its own graph.
        self.needs_fixed = False

    def set_train(self, mode: bool) -> None:
        """Set the mode of the cells, see ``nn.Cell.set_train``."""
        for cell in (self.cell, self.general_cell):
            if cell is not None:
                cell.set_train(mode)

    def set_jit_config(self, jit_config: Any) -> None:
        """Set how the cells are compiled from now on, see ``nn.Cell.set_jit_config``."""
        for cell in (self.cell, self.general_cell):
            if cell is not None:
                cell.set_jit_config(jit_config)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run with tensors whose dtypes and numbers of axes are always the same."""
        if self.eager or os.getenv("MS_JIT") == "0":
            with _op_by_op():
                return self.cell(*tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.has_run = False
        try:
            self._refuse_what_graphs_ignore()
            cell = self.cell if shapes in self.fixed else self._compiled_for(tensors, shapes)
        except Exception as error:
            if _get_mode() == ms.GRAPH_MODE:
                raise _without_call_stack(error) from error
            return self._fall_back(tensors, error)
        self.has_run = True
        try:
            with graph_mode():
                return self._run(cell, tensors, shapes if cell is self.cell else self.general)
        except BaseException:
            # A graph that has failed while it ran, for example at a label out of range, runs never again.
            cell.compile_cache.clear()
            self.fixed.clear()
            self.graphs.clear()
            self.general_cell = None
            raise

    def _run(self, cell: nn.Cell, tensors: tuple[Tensor, ...], shapes: Any) -> Any:
        """Run the graph for these shapes; by its name, if it has run before.

        A call of a cell looks for its graph anew, which takes twice as long as a small graph itself. MindSpore goes
        the same way in the phases of incremental inference.
        """
        name = self.graphs.get((cell.phase, shapes))
        if name is None or any(tensor.const_arg or tensor.has_init for tensor in tensors):
            output = cell(*tensors)
            self.graphs[cell.phase, shapes] = cell.phase_cache[cell.phase]
            return output
        _cell_graph_executor._graph_executor.set_jit_config(cell.jit_config_dict or _DEFAULT_JIT_CONFIG)
        return _cell_graph_executor._exec_pip(cell, *tensors, phase=name)

    def _refuse_what_graphs_ignore(self) -> None:
        """A graph calls no hooks of a network that was written for PYNATIVE mode; they can come at any time."""
        if _get_mode() != ms.PYNATIVE_MODE:
            return
        if self.why_not:
            raise RuntimeError(self.why_not)
        for cell in self.cells:
            if cell._forward_hook or cell._forward_pre_hook or cell._backward_hook or cell._backward_pre_hook:
                raise RuntimeError(f"its {cell.cls_name} has a hook, which a graph would not call")
        for parameter in self.parameters:
            if parameter.hooks():
                raise RuntimeError(f"{parameter.name} has a hook, which a graph would not call")

    def _compiled_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> nn.Cell:
        general = _widen(self.general or shapes, shapes)
        if self.general_cell is not None and general == self.general:
            return self.general_cell
        general_cell = None
        if len(self.fixed) >= MAX_FIXED_SHAPES and not self.needs_fixed:
            general_cell = self.general_cell = self._compile_general(tensors, general)
        if general_cell is None:
            with graph_mode():
                self.cell.compile(*tensors)
            # The shapes are good, so what failed was the length that changes.
            self.needs_fixed = len(self.fixed) >= MAX_FIXED_SHAPES
            self.fixed.add(shapes)
        self.general = general
        return_memory()
        return general_cell or self.cell

    def _compile_general(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> nn.Cell | None:
        cell = self.make_cell()
        cell.set_train(self.cell.training)
        lengths = [[None if length < 0 else length for length in shape] for shape in shapes]
        try:
            with graph_mode():
                cell.set_inputs(*(Tensor(shape=shape, dtype=t.dtype) for shape, t in zip(lengths, tensors)))
                cell.compile(*tensors)
        except Exception:
            return None
        return cell

    def _fall_back(self, tensors: tuple[Tensor, ...], error: Exception) -> Any:
        try:
            with _op_by_op():
                output = self.cell(*tensors)
        except Exception as eager_error:
            # Wrong in both modes: the inputs or the network are at fault, not the compiler.
            raise _without_call_stack(eager_error) from None
        self.eager = True
        warn(
            f"For '{self.owner}', {self.what} cannot be compiled and runs eagerly, which is slower: "
            f"{first_line(error)}",
        )
        return output


@contextmanager
def execution_mode(mode: int) -> Iterator[None]:
    """Switch to a mode and back; the switch costs 20 us and keeps what was compiled."""
    before = _get_mode()
    if before == mode:
        yield
        return
    ms.set_context(mode=mode)
    try:
        yield
    finally:
        ms.set_context(mode=before)


@contextmanager
def _op_by_op() -> Iterator[None]:
    """Run what has a gradient in PYNATIVE mode."""
    with execution_mode(ms.PYNATIVE_MODE):
        try:
            yield
        except BaseException:
            # After two errors inside a gradient MindSpore would not even index a tensor any more.
            _pynative_executor.clear_res()
            raise


def graph_mode() -> Any:
    """Switch to GRAPH mode and back."""
    return execution_mode(ms.GRAPH_MODE)


def return_memory() -> None:
    """Give back to the system what has been freed. After a compilation it is 10 MB, where no tensor would go."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _widen(general: Shapes, shapes: Shapes) -> Shapes:
    """Return the shapes that fit both."""
    return tuple(tuple(a if a == b else -1 for a, b in zip(*pair)) for pair in zip(general, shapes))


def _without_call_stack(error: Exception) -> Exception:
    """Return an error of ours as it was raised, without the compiler's call stack below the sentence."""
    text = first_line(error)
    return type(error)(text) if text.startswith("For 'GradAccumulation'") else error
