"""Run a cell as a compiled graph, in any mode of the caller."""

import ctypes
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mindspore as ms
from mindspore import JitConfig, Tensor, nn

from ms_gradaccum._checks import is_lost, typed, warn
from ms_gradaccum.backend.device import keeps_calls
from ms_gradaccum.backend.mindspore_private import (
    accept_jit_functions,
    copy_compiler_settings,
    free_graphs,
    get_mode,
    primexpr,
    pynative_executor,
    run_graph,
    use_jit_config,
)
from ms_gradaccum.backend.user_code import UserCode

# The number of graphs for fixed shapes that are compiled before one graph for dynamic shapes takes over. An uneven
# split has two shapes, and the last batch of the data two more.
MAX_FIXED_SHAPES = 4

NOTHING = Tensor(0.0, ms.float32)  # A placeholder for graphs without inputs.

# Only glibc has this function.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None

# Cells by number: during compilation, a graph passes only plain values to functions of the host.
_numbered: "weakref.WeakValueDictionary[int, nn.Cell]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

Shapes = tuple[tuple[int, ...], ...]
_shape_of = operator.attrgetter("shape")
_DEFAULT_JIT_CONFIG = JitConfig().jit_config_dict


class RunRecord:
    """A caller's record of a call, which tells after an error how far the call has come."""

    has_run = False  # True once a graph runs. It may have changed parameters even if it failed.


class Compiled:
    """Call a cell as a compiled graph, in PYNATIVE mode too.

    A graph is for fixed shapes. After ``most_fixed`` of them, one graph with dynamic shapes follows, from another cell
    of ``make_cell``: never with ``needs_fixed``, at once for ``open_axes`` (one per input). Errors name ``owner``,
    ``what``, and lines of the user's ``code``, whose hooks are refused.
    """

    def __init__(
        self,
        make_cell: Callable[[], nn.Cell],
        owner: str,
        what: str,
        code: nn.Cell | None = None,
        needs_fixed: bool = False,
        most_fixed: int = MAX_FIXED_SHAPES,
        open_axes: Sequence[int | None] | None = None,
    ) -> None:
        self.make_cell = make_cell
        self.code = UserCode(owner, what, code)
        self.open_axes = open_axes
        self.most_fixed = most_fixed
        # True for an operator that takes only fixed shapes. Set when the first graph for dynamic shapes has failed.
        self.needs_fixed = needs_fixed
        self.cell = make_cell()
        self.fixed: set[Shapes] = set()  # The shapes with a graph of their own.
        # The shapes of all calls so far, with -1 for an axis whose length changes. None before the first call.
        self.general: Shapes | None = None
        # The cell with the graph for dynamic shapes, once needed.
        self.general_cell: nn.Cell | None = None
        # MindSpore's names of the graphs, by the cell's phase (training or not) and the shapes. All graphs are dropped
        # when one fails.
        self.graphs: dict[tuple[str, Shapes], str] = {}

    def set_train(self, mode: bool) -> None:
        for cell in self._cells():
            cell.set_train(mode)

    def set_jit_config(self, jit_config: object) -> None:
        for cell in self._cells():
            cell.set_jit_config(jit_config)

    def _cells(self) -> list[nn.Cell]:
        return [self.cell] if self.general_cell is None else [self.cell, self.general_cell]

    def __call__(self, *tensors: Tensor, record: RunRecord | None = None) -> Any:
        """Run with tensors whose dtypes and numbers of axes are always the same. ``record`` is written, not read."""
        if os.getenv("MS_JIT") == "0":
            if record is not None:
                record.has_run = True
            with op_by_op():
                return self.cell(*tensors)
        shapes = tuple(map(tuple, map(_shape_of, tensors)))
        if get_mode() == ms.PYNATIVE_MODE:
            self.code.refuse_hooks()
        cell = self.cell
        name = self.graphs.get((cell.phase, shapes))
        if name is None:
            try:
                cell, name = self._compiled_for(tensors, shapes)
            except Exception as error:
                self.code.raise_compile_error(error)
        if record is not None:
            record.has_run = True
        try:
            with nullcontext() if get_mode() == ms.GRAPH_MODE else graph_mode():
                for tensor in tensors:
                    if tensor.const_arg or tensor.has_init:
                        return cell(*tensors)
                use_jit_config(cell.jit_config_dict or _DEFAULT_JIT_CONFIG)
                return run_graph(cell, *tensors, phase=name)
        except BaseException as error:
            is_lost(self.code.owner, error)
            # A graph that has failed at run time, for example at a label out of range, cannot run again.
            free_graphs(cell)
            self.fixed.clear()
            self.graphs.clear()
            self.general_cell = None
            raise

    def _compiled_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> tuple[nn.Cell, str]:
        """Return a cell and the name of its graph for these shapes."""
        if shapes in self.fixed:
            return self.cell, self._compile(self.cell, tensors, shapes)
        general = _joined(self.general, shapes) if self.general else _opened(shapes, self.open_axes)
        is_due = (
            len(self.fixed) >= self.most_fixed or self.open_axes is not None
        ) and not self.needs_fixed
        if self.general_cell is None or general != self.general:
            self.general_cell = self._general_cell_for(tensors, general) if is_due else None
        if self.general_cell is not None:
            self.general = general
            return self.general_cell, self._compile(self.general_cell, tensors, general)
        name = self._compile(self.cell, tensors, shapes)
        # These shapes compile, so it was the dynamic shape that failed.
        self.needs_fixed = self.needs_fixed or is_due
        self.fixed.add(shapes)
        self.general = general
        return self.cell, name

    def _general_cell_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> nn.Cell | None:
        cell = like_mode(self.make_cell(), self.cell)
        inputs = []
        for shape, tensor in zip(shapes, tensors):
            lengths = [None if length < 0 else length for length in shape]
            inputs.append(Tensor(shape=lengths, dtype=tensor.dtype))
        try:
            # In PYNATIVE mode, MindSpore would then also treat the user's operators as dynamic.
            with graph_mode():
                cell.set_inputs(*inputs)
            self._compile(cell, tensors, shapes)
        except Exception:
            return None
        return cell

    def _compile(self, cell: nn.Cell, tensors: tuple[Tensor, ...], shapes: Shapes) -> str:
        """Compile the cell for these shapes if necessary, and return the name of the graph."""
        # The cell itself would look up the graph in each call, which takes twice as long as running a small graph, and
        # would not find it after another cell with such inputs was freed.
        name = self.graphs.get((cell.phase, shapes))
        if name is None:
            # With parameter_broadcast=True, MindSpore would give all ranks the sums and shards of rank 0 here.
            cell.parameters_broadcast_dict = dict
            with graph_mode(), inlined(self.code.cells):
                accept_jit_functions()
                cell.compile(*tensors)
            name = self.graphs[cell.phase, shapes] = cell.phase_cache[cell.phase]
            return_memory()
        return name


def number_of(cell: nn.Cell) -> int:
    """Return a number by which `numbered` finds ``cell`` while it exists."""
    number = next(_numbers)
    _numbered[number] = cell
    return number


# Returns the cell of a number, or None if it no longer exists.
numbered: Callable[[int], nn.Cell | None] = _numbered.get
# Warns while a graph is compiled that calls it with a constant.
warn_in_graph = primexpr(warn)


class Method(nn.Cell):
    """A cell that calls a method of ``cell``, with its mode and settings, and with Python ``constants`` first."""

    def __init__(self, cell: nn.Cell, name: str, *constants: object) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.method = getattr(cell, name)
        self.constants = constants
        like_mode(self, cell)

    def construct(self, *tensors: Tensor) -> Any:
        return self.method(*self.constants, *tensors)


@contextmanager
def execution_mode(mode: int) -> Iterator[None]:
    """Switch to a mode and back. A switch costs 20 us and keeps compiled graphs."""
    before = get_mode()
    try:
        if mode != before:
            ms.set_context(mode=mode)
        yield
    finally:
        if mode != before:
            ms.set_context(mode=before)


@contextmanager
def op_by_op() -> Iterator[None]:
    """Switch to PYNATIVE mode and back, for code that runs op by op: in a context, or as a decorator of a function."""
    # True if MindSpore records operators for the caller's `loss.backward()`. A gradient here would end the recording.
    records = pynative_executor.grad_flag()
    with execution_mode(ms.PYNATIVE_MODE):
        try:
            yield
        except BaseException:
            # Without this, after two errors in a gradient MindSpore cannot even index a tensor.
            clear_autograd_records()
            raise
        finally:
            pynative_executor.set_grad_flag(records)


def clear_autograd_records() -> None:
    """Free MindSpore's records of passes in PYNATIVE mode. Hooks stay."""
    records = pynative_executor.grad_flag()
    pynative_executor.clear_res()
    pynative_executor.set_grad_flag(records)


def graph_mode() -> AbstractContextManager[None]:
    """Switch to GRAPH mode and back."""
    return execution_mode(ms.GRAPH_MODE)


@contextmanager
def inlined(cells: Iterable[nn.Cell]) -> Iterator[None]:
    """Except on Ascend, let the compiler inline cells built with ``lazy_inline`` as ``policy="front"`` does.

    Without this, MindSpore fails there (its own step does), which can break the next compilation in the process.
    """
    late = []
    for cell in cells:
        is_lazy = getattr(cell, "cell_init_args", "").startswith("lazy_inline_")
        if is_lazy and not keeps_calls() and not hasattr(cell, "no_inline"):
            # A policy has already set it.
            cell.no_inline = False
            late.append(cell)
    try:
        yield
    finally:
        for cell in late:
            del cell.no_inline


def return_memory() -> None:
    """Return freed memory to the operating system: after a compilation, about 10 MB that tensors cannot use."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _opened(shapes: Shapes, axes: Sequence[int | None] | None) -> Shapes:
    """Return the shapes with -1 on these axes."""
    if axes is None:
        return shapes
    opened = []
    for shape, axis in zip(map(list, shapes), axes):
        if axis is not None:
            shape[axis] = -1
        opened.append(tuple(shape))
    return tuple(opened)


def _joined(general: Shapes, shapes: Shapes) -> Shapes:
    """Return the shapes with -1 for each axis that has another length in ``general``."""
    pairs = [zip(*pair) for pair in zip(general, shapes)]
    return tuple(tuple(a if a == b else -1 for a, b in pair) for pair in pairs)


def like_mode(cell: nn.Cell, like: nn.Cell) -> nn.Cell:
    """Return a cell with the mode and the compiler settings of another one. The cells inside keep their modes."""
    cell.phase = like.phase
    cell.add_flags(training=like.training)
    copy_compiler_settings(cell, like)
    return cell


def runs_eagerly(compiles: bool) -> bool:
    """Return whether the user's code runs op by op: in PYNATIVE mode, unless ``compiles``."""
    return os.getenv("MS_JIT") == "0" or (get_mode() == ms.PYNATIVE_MODE and not compiles)


def check_compile(owner: str, value: object) -> bool:
    """Return the argument ``compile`` as a bool: True if the user's code is compiled in PYNATIVE mode, too."""
    if value is None or value is True:
        return value is True
    kind = ValueError if value is False else TypeError
    raise kind(
        f"For '{owner}', the argument 'compile' must be True or None, but got {typed(value)}. None "
        f"follows MindSpore's mode: set_context(mode=PYNATIVE_MODE) runs the network op by op."
    )
