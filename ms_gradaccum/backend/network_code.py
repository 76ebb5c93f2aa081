"""The code reachable from a network: own backward passes, and parts that MindSpore compiles in PYNATIVE mode."""

import dis
import gc
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import is_a

_LIBRARIES = {"mindspore", "ms_gradaccum", "numpy"} | sys.stdlib_module_names
# Modules of containers, methods, partial functions, caches, namespaces and queues, whose contents may be the user's.
_HOLDERS = {
    "builtins",
    "functools",
    "collections",
    "types",
    "argparse",
    "queue",
    "weakref",
    "_thread",
}
_BACKWARD_OPERATORS = (ops.InsertGradientOf, ops.HookBackward, ops.Custom)
_HOOK_NAMES = {"InsertGradientOf", "HookBackward", "register_hook"}
_COLLECTIVES = re.compile(
    "all_?(reduce|gather|to_?all)|reduce_?scatter|broadcast$|neighbor_?exchange|^(i?send|i?recv|receive)$",
    re.I,
)
_REDUCTIONS = frozenset(
    "AllReduce ReduceScatter all_reduce reduce_scatter reduce_scatter_tensor".split()
)
# The Python instructions that use a name or load a constant: a string constant may be for `getattr`.
_NAMING = {*dis.hasname, *dis.hasconst}
# The number of visited items of a container. Vocabularies have more, containers of code have fewer.
_MANY_ITEMS = 1000
_versions = itertools.count(1)


class NetworkCode:
    """The objects reachable from networks or an optimizer, and the names and strings in the user's functions there."""

    def __init__(self, *roots: object) -> None:
        self.names: set[str] = set()
        # The variables of modules that functions assign: the namespace of the module, and the name.
        self.assigned: list[tuple[dict[str, object], str]] = []
        found: dict[int, object] = {}
        ahead = list(roots)
        while ahead:
            value = ahead.pop()
            if id(value) not in found:
                found[id(value)] = value
                try:
                    ahead += self._leads_to(value)
                except Exception:  # A user's object may raise anything here: leave it out.
                    found[id(value)] = None
        self.reached = list(found.values())

    def _leads_to(self, value: object) -> Iterable[object]:
        """Return the objects that a value refers to. The garbage collector finds them without running user code."""
        if is_a(value, FunctionType):
            inputs: list[object] = [value.__closure__, value.__defaults__, value.__kwdefaults__]
            if is_user(value):
                inputs += [vars(value), *self._named_by(value.__code__, value.__globals__)]
            return inputs
        if is_a(value, type):
            if not is_user(value):
                return ()
            return [
                *value.__bases__,
                *(each for name, each in vars(value).items() if name != "__init__"),
            ]
        kind = type(value)
        is_open = is_a(value, nn.Cell) or is_user(kind) or kind.__module__ in _HOLDERS
        if not is_open or is_a(value, ModuleType):
            return ()
        attributes = getattr(value, "__dict__", None)
        return [kind, attributes, *itertools.islice(gc.get_referents(value), _MANY_ITEMS)]

    def _named_by(self, code: CodeType, known: dict[str, object]) -> Iterator[object]:
        """Record the names in code, and yield its globals and the values that it reads from the user's modules."""
        value: object = None
        instructions = list(dis.get_instructions(code))
        set_names = [each.argval for each in instructions if each.opname == "STORE_ATTR"]
        for each in instructions:
            if each.opcode in _NAMING and isinstance(each.argval, str):
                self.names.add(each.argval)
            if each.opname == "STORE_GLOBAL":
                self.assigned.append((known, each.argval))
            if isinstance(each.argval, CodeType):
                yield from self._named_by(each.argval, known)
            elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = known.get(each.argval)
            elif is_a(value, ModuleType) and is_user(value) and isinstance(each.argval, str):
                self.assigned += [(vars(value), name) for name in set_names]
                value = vars(value).get(each.argval)
            yield value

    def of_kind(self, kinds: Any) -> list[Any]:
        """Return the reached objects of some types."""
        return [each for each in self.reached if is_a(each, kinds)]

    def reductions(self) -> list[str]:
        """Return the names of operators and functions that reduce over processes."""
        # MindSpore's fault tolerance adds up a flag of its own.
        names = {
            each.name
            for each in self.of_kind(ops.Primitive)
            if "tft_report_before" not in each.attrs
        }
        return sorted((names | self.names) & _REDUCTIONS)

    def communicates(self) -> bool:
        """Return whether the forward pass has operators or functions that communicate between processes."""
        operators = {each.name for each in self.of_kind(ops.Primitive)}
        return any(map(_COLLECTIVES.search, self.names | operators))

    def has_hooks(self) -> bool:
        """Return whether the backward pass calls hooks of cells or tensors."""
        return bool(self.names & _HOOK_NAMES) or any(map(has_backward_hook, self.of_kind(nn.Cell)))

    def has_own_backward(self) -> bool:
        """Return whether the backward pass has a `bprop` or a hook, so that it may be nonlinear."""
        return self.has_hooks() or any(map(_has_own_backward, self.reached))


def has_backward_hook(cell: nn.Cell) -> bool:
    return bool(vars(cell).get("_lazy_backward_hook") or vars(cell).get("_lazy_backward_pre_hook"))


class JitParts:
    """The parts of cells with ``@jit``, which MindSpore compiles in PYNATIVE mode and finds by the cells' phases."""

    def __init__(self, cells: Sequence[nn.Cell], parameters: Iterable[Tensor]) -> None:
        self.cells = cells
        self.parameters = list(parameters)
        # The memory addresses of the parameters for which the parts were compiled.
        self.places: list[int] = []
        self.version = ""

    def follow(self) -> None:
        """Let MindSpore compile the parts again if a parameter has moved: they would keep using the old memory."""
        places = self.places
        self.note_places()
        if self.places != places:
            self.version = f" {next(_versions)}"
        for cell in self.cells:
            if not cell.phase.endswith(self.version):  # `set_train` changes it, too.
                cell.phase = cell.phase.partition(" ")[0] + self.version

    def note_places(self) -> None:
        self.places = [parameter.data_ptr() for parameter in self.parameters]


def _has_own_backward(value: object) -> bool:
    if not is_a(value, type):
        return is_a(value, _BACKWARD_OPERATORS)
    bases = {kind.__name__ for kind in value.__mro__}
    own: set[str] = set()
    for kind in filter(is_user, value.__mro__):  # MindSpore's own ones are linear.
        own.update(vars(kind))
    return ("Cell" in bases and "bprop" in own) or ("_Function" in bases and "backward" in own)


def is_user(value: object) -> bool:
    """Return whether a class, a function or a module is user code and not from a library."""
    name = (
        vars(value).get("__name__") if is_a(value, ModuleType) else getattr(value, "__module__", "")
    )
    return str(name).split(".")[0] not in _LIBRARIES
