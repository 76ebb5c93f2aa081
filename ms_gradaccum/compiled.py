"""Run a cell as a compiled graph, whatever the mode of the caller."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

# Graphs compiled for fixed shapes before one graph for changing shapes takes over. A split that does not come
# out even makes two shapes, the last batch of the data two more.
MAX_FIXED_SHAPES = 4

Shapes = tuple[tuple[int, ...], ...]


class Compiled:
    """Calls a cell as a compiled graph, in PYNATIVE mode too, where a compiled micro step is 3 to 100 times faster.

    A cell that cannot be compiled runs eagerly if the user's mode is PYNATIVE, after one warning that says why.
    """

    def __init__(self, make_cell: Callable[[], nn.Cell], owner: str, what: str) -> None:
        self.make_cell = make_cell
        self.owner = owner
        self.what = what
        self.cell = make_cell()
        # A flat list, since it is gone through before every call.
        self.cells = [cell for _, cell in self.cell.cells_and_names()]
        self.eager = False
        # The shapes for which there is a graph of fixed shapes.
        self.fixed: set[Shapes] = set()
        # What fits all shapes so far: -1 for an axis whose length changes. None before the first call.
        self.general: Shapes | None = None
        # The cell whose graph takes changing shapes. None before it is needed, and if it cannot be compiled.
        self.general_cell: nn.Cell | None = None

    def set_train(self, mode: bool) -> None:
        """Set the mode of the cells, see ``nn.Cell.set_train``."""
        for cell in (self.cell, self.general_cell):
            if cell is not None:
                cell.set_train(mode)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run with tensors whose dtypes and numbers of axes are always the same."""
        if self.eager or os.getenv("MS_JIT") == "0":
            return self.cell(*tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        try:
            self._refuse_hooks()
            cell = self.cell if shapes in self.fixed else self._compiled_for(tensors, shapes)
        except Exception as error:
            if ms.get_context("mode") == ms.GRAPH_MODE:
                raise _without_call_stack(error) from error
            return self._fall_back(tensors, error)
        with graph_mode():
            return cell(*tensors)

    def _refuse_hooks(self) -> None:
        """A graph calls no hooks of a network that was written for PYNATIVE mode; they can come at any time."""
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            return
        for cell in self.cells:
            if cell._forward_hook or cell._forward_pre_hook or cell._backward_hook or cell._backward_pre_hook:
                raise RuntimeError(f"its {cell.cls_name} has a hook, which a graph would not call")

    def _compiled_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> nn.Cell:
        known, self.general = self.general, _widen(self.general or shapes, shapes)
        if self.general_cell is not None and known == self.general:
            return self.general_cell
        if len(self.fixed) >= MAX_FIXED_SHAPES and self._compile_general(tensors, self.general):
            return self.general_cell
        with graph_mode():
            self.cell.compile(*tensors)
        self.fixed.add(shapes)
        return self.cell

    def _compile_general(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> bool:
        cell = self.make_cell()
        cell.set_train(self.cell.training)
        lengths = [[None if length < 0 else length for length in shape] for shape in shapes]
        try:
            with graph_mode():
                cell.set_inputs(*(Tensor(shape=shape, dtype=t.dtype) for shape, t in zip(lengths, tensors)))
                cell.compile(*tensors)
        except Exception:  # An operator that needs fixed lengths: each shape gets its graph.
            cell = None
        self.general_cell = cell
        return cell is not None

    def _fall_back(self, tensors: tuple[Tensor, ...], error: Exception) -> Any:
        try:
            output = self.cell(*tensors)
        except Exception as eager_error:
            # Wrong in both modes: the inputs or the network are at fault, not the compiler.
            raise _without_call_stack(eager_error) from None
        self.eager = True
        warnings.warn(
            f"For '{self.owner}', {self.what} cannot be compiled and runs eagerly, which is slower: "
            f"{_first_line(error)}",
            stacklevel=4,
        )
        return output


@contextmanager
def graph_mode() -> Iterator[None]:
    """Switch to GRAPH mode and back; the switch costs 20 us and keeps what was compiled."""
    mode = ms.get_context("mode")
    if mode == ms.GRAPH_MODE:
        yield
        return
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=mode)


def _widen(general: Shapes, shapes: Shapes) -> Shapes:
    """Return the shapes that fit both."""
    return tuple(tuple(a if a == b else -1 for a, b in zip(*pair)) for pair in zip(general, shapes))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _without_call_stack(error: Exception) -> Exception:
    """Return an error of ours as it was raised, without the compiler's call stack below the sentence."""
    text = _first_line(error)
    return type(error)(text) if text.startswith("For 'GradAccumulation'") else error
