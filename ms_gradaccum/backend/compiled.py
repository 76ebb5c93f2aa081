"""Run a cell as a compiled graph, in any mode of the caller."""

import ctypes
import inspect
import itertools
import operator
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mindspore as ms
from mindspore import JitConfig, Tensor, nn

from ms_gradaccum._checks import LIBRARIES, argument_error, first_line, is_lost, typed
from ms_gradaccum.backend.device import keeps_calls
from ms_gradaccum.backend.mindspore_private import (
    accept_jit_functions,
    cell_graph_executor,
    get_mode,
    pynative_executor,
)

# The number of graphs for fixed shapes that are compiled before one graph for dynamic shapes takes over. An uneven
# split has two shapes, and the last batch of the data two more.
MAX_FIXED_SHAPES = 4

_DEFAULT_JIT_CONFIG = JitConfig().jit_config_dict

NOTHING = Tensor(0.0, ms.float32)  # A placeholder for graphs without inputs.

# Only glibc has this function.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None

# Cells by number: during compilation, a graph passes only plain values to functions of the host.
_numbered: "weakref.WeakValueDictionary[int, nn.Cell]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

Shapes = tuple[tuple[int, ...], ...]
_shape_of = operator.attrgetter("shape")

# Patterns in compiler errors: an operator without a kernel on this device, and a line of code.
_NO_KERNEL = re.compile(r"Unsupported op \[\w+\] on \w+|The kernel \w+ unregistered")
_PLACE = re.compile(r"In file (\S+?):(\d+)")
# The class names that errors of this package during compilation begin with.
_OWNERS = "GradAccumulation GradCacheLoss ContrastiveLoss TokenMeanLoss TrainOneStepCell Accumulator MixedPrecision"
_SENTENCES = tuple(f"For '{name}'" for name in _OWNERS.split())


class Compiled:
    """Call a cell as a compiled graph, in PYNATIVE mode too.

    A graph is for fixed shapes. After some shapes, one graph with dynamic shapes follows, from another cell of
    ``make_cell``: never with ``needs_fixed``, at once for ``open_axes`` (one per input). Errors name ``owner``,
    ``what``, and lines of the user's ``code``, whose hooks are refused.
    """

    def __init__(
        self,
        make_cell: Callable[[], nn.Cell],
        owner: str,
        what: str,
        code: nn.Cell | None = None,
        needs_fixed: bool = False,
        open_axes: Sequence[int | None] | None = None,
    ) -> None:
        self.owner, self.what, self.code = owner, what, code
        self.make_cell, self.open_axes = make_cell, open_axes
        self.cell = make_cell()
        # A flat list, because every call iterates over it.
        self.hooked = [] if code is None else [cell for _, cell in code.cells_and_names()]
        self.parameters = [] if code is None else code.trainable_params()
        # True if the last call has started to run a graph. It may have changed parameters even if it failed.
        self.has_run = False
        self.fixed: set[Shapes] = set()  # The shapes with a graph of their own.
        # MindSpore's names of the graphs, by the cell's phase (training or not) and the shapes.
        self.graphs: dict[tuple[str, Shapes], str] = {}
        # The shapes of all calls so far, with -1 for an axis whose length changes. None before the first call.
        self.general: Shapes | None = None
        self.general_cell: nn.Cell | None = None  # The cell with the graph for dynamic shapes, once needed.
        # Becomes True if an operator of the network turns out to need fixed shapes.
        self.needs_fixed = needs_fixed

    def set_train(self, mode: bool) -> None:
        for cell in self._cells():
            cell.set_train(mode)

    def set_jit_config(self, jit_config: object) -> None:
        for cell in self._cells():
            cell.set_jit_config(jit_config)

    def _cells(self) -> list[nn.Cell]:
        return [self.cell] if self.general_cell is None else [self.cell, self.general_cell]

    def __call__(self, *tensors: Tensor) -> Any:
        """Run with tensors whose dtypes and numbers of axes are always the same."""
        if os.getenv("MS_JIT") == "0":
            with op_by_op():
                return self.cell(*tensors)
        shapes = tuple(map(tuple, map(_shape_of, tensors)))
        self.has_run = False
        if get_mode() == ms.PYNATIVE_MODE:
            self._refuse_hooks()
        cell, name = self.cell, self.graphs.get((self.cell.phase, shapes))
        try:
            if name is None:
                cell, name = self._compiled_for(tensors, shapes)
        except Exception as error:
            raise compile_error(error, self.owner, self.what, self.code) from error
        self.has_run = True
        try:
            with nullcontext() if get_mode() == ms.GRAPH_MODE else graph_mode():
                for tensor in tensors:
                    if tensor.const_arg or tensor.has_init:
                        return cell(*tensors)
                cell_graph_executor._graph_executor.set_jit_config(cell.jit_config_dict or _DEFAULT_JIT_CONFIG)
                return cell_graph_executor._exec_pip(cell, *tensors, phase=name)
        except BaseException as error:
            is_lost(self.owner, error)
            # A graph that has failed at run time, for example at a label out of range, cannot run again.
            cell.compile_cache.clear()
            self.fixed.clear()
            self.graphs.clear()
            self.general_cell = None
            raise

    def _refuse_hooks(self) -> None:
        """Raise if the network has hooks, which a graph does not call. Hooks can be registered at any time."""
        names = [parameter.name for parameter in self.parameters if parameter.hooks()]
        for cell in self.hooked:
            if cell._forward_hook or cell._forward_pre_hook or cell._backward_hook or cell._backward_pre_hook:
                names.append(cell.cls_name)
        if names:
            rule, remedy = f"None where {self.what} has hooks", "Remove the hook, or leave compile out."
            got = f"True, and {names[0]} has a hook, which a graph would not call"
            raise ValueError(argument_error(self.owner, "compile", rule, got, remedy))

    def _compiled_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> tuple[nn.Cell, str]:
        """Return a cell and the name of its graph for these shapes."""
        if shapes in self.fixed:
            return self.cell, self._compile(self.cell, tensors, shapes)
        # -1 for each axis that has had two lengths.
        pairs = zip(self.general or _opened(shapes, self.open_axes), shapes)
        general = tuple(tuple(a if a == b else -1 for a, b in zip(*pair)) for pair in pairs)
        is_due = (len(self.fixed) >= MAX_FIXED_SHAPES or self.open_axes is not None) and not self.needs_fixed
        if self.general_cell is None or general != self.general:
            self.general_cell = self._general_cell_for(tensors, general) if is_due else None
        if self.general_cell is not None:
            self.general = general
            return self.general_cell, self._compile(self.general_cell, tensors, general)
        name = self._compile(self.cell, tensors, shapes)
        self.needs_fixed = self.needs_fixed or is_due  # These shapes compile, so it was the dynamic shape that failed.
        self.fixed.add(shapes)
        self.general = general
        return self.cell, name

    def _general_cell_for(self, tensors: tuple[Tensor, ...], shapes: Shapes) -> nn.Cell | None:
        cell = like_mode(self.make_cell(), self.cell)
        lengths = [[None if length < 0 else length for length in shape] for shape in shapes]
        try:
            # In PYNATIVE mode, MindSpore would then also treat the user's operators as dynamic.
            with graph_mode():
                cell.set_inputs(*(Tensor(shape=shape, dtype=t.dtype) for shape, t in zip(lengths, tensors)))
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
            with graph_mode(), inlined(self.hooked):
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


class Eager:
    """Call a cell op by op. ``forgets`` clears MindSpore's earlier passes, whose rows may divide a gradient."""

    def __init__(self, cell: nn.Cell, forgets: bool) -> None:
        self.cell, self.forgets = cell, forgets

    def __call__(self, *tensors: Tensor) -> Any:
        if self.forgets:
            clear_autograd_records()
        with op_by_op():
            return self.cell(*tensors)


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
    """Switch to PYNATIVE mode and back, for code that computes gradients op by op."""
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
    inlines = not keeps_calls()
    built = [cell for cell in cells if inlines and getattr(cell, "cell_init_args", "").startswith("lazy_inline_")]
    late = [cell for cell in built if not hasattr(cell, "no_inline")]  # A policy has already set it.
    for cell in late:
        cell.no_inline = False
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
    return tuple(
        tuple(-1 if axis is not None and i == axis % len(shape) else length for i, length in enumerate(shape))
        for shape, axis in zip(shapes, axes or [None] * len(shapes))
    )


def like_mode(cell: nn.Cell, like: nn.Cell) -> nn.Cell:
    """Return a cell with the mode and the compiler settings of another one. The cells inside keep their modes."""
    cell.phase = like.phase
    cell.add_flags(training=like.training)
    cell._get_attr_from_cell(like)
    return cell


def runs_eagerly(compiles: bool) -> bool:
    """Return whether the user's code runs op by op: in PYNATIVE mode, unless ``compiles``."""
    return os.getenv("MS_JIT") == "0" or (get_mode() == ms.PYNATIVE_MODE and not compiles)


def check_compile(owner: str, value: object) -> bool:
    """Return the argument ``compile`` as a bool: True if the user's code is compiled in PYNATIVE mode, too."""
    if value is None or value is True:
        return value is True
    remedy = "None follows MindSpore's mode: set_context(mode=PYNATIVE_MODE) runs the network op by op."
    kind = ValueError if value is False else TypeError
    raise kind(argument_error(owner, "compile", "True or None", typed(value), remedy))


def compile_error(error: Exception, owner: str, what: str, code: nn.Cell | None) -> Exception:
    """Return a compiler error whose first line names the user's line of code and a remedy."""
    text, first = str(error), first_line(error)
    if first.startswith(_SENTENCES):
        return type(error)(first)  # Without the compiler's call stack below it.
    kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
    remedy = "Rewrite the code so that it compiles in GRAPH mode, or use PYNATIVE mode without compile=True."
    cells = () if code is None else [cell for _, cell in code.cells_and_names()]
    other = next((place for cell in cells if (place := _other_self(cell))), "")
    if other:
        first, remedy = f"{other}.", "Call it 'self', the only name for it that the compiler knows."
    missing = _NO_KERNEL.search(text)
    if missing is not None:
        first, remedy = f"{missing[0]}.", "Use another device, or operators that have a kernel on this one."
    got = f"{'' if other else _place_of(text, code)}{first} No parameter was changed."
    return kind(f"For '{owner}', MindSpore must be able to compile {what}, but got {got} {remedy}\n{text}")


def _other_self(cell: nn.Cell) -> str:
    """Return the first argument of a cell's `construct` and its line, unless the name is `self`."""
    code = getattr(inspect.unwrap(type(cell).construct), "__code__", None)
    if code is None or code.co_argcount == 0 or code.co_varnames[0] == "self":
        return ""
    place = f"{code.co_filename}:{code.co_firstlineno}"
    return f"a construct of {type(cell).__name__} at {place} with {code.co_varnames[0]!r} first"


def _place_of(text: str, code: nn.Cell | None) -> str:
    # The compiler lists the calls from the outermost to the innermost one.
    places = [f"{file}:{line}" for file, line in _PLACE.findall(text) if not file.startswith(LIBRARIES)]
    if places:
        return f"at {places[-1]}: "
    # The compiler names no line of code that it cannot parse.
    source = None if code is None else inspect.getsourcefile(type(code).construct)
    if code is None or source is None or source.startswith(LIBRARIES):
        return ""
    return f"in {type(code).__name__} at {source}:{inspect.getsourcelines(type(code).construct)[1]}: "


def program_of(cell: nn.Cell) -> bytes:
    """Return the program of a cell's last compilation, as MindIR."""
    program: bytes = cell_graph_executor._get_func_graph_proto(cell, cell.current_phase, "mind_ir")
    return program
