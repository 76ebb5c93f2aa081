"""The code reachable from a network, and whether it defines its own backward pass."""

import dis
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import TypeGuard, TypeVar

from mindspore import nn, ops

_T = TypeVar("_T")
_LIBRARIES = {"mindspore", "ms_gradaccum", "numpy"} | sys.stdlib_module_names
# Modules of containers, methods, partial functions, caches and namespaces, whose contents may be the user's.
_HOLDERS = {"builtins", "functools", "collections", "types", "argparse"}
_BACKWARD_OPERATORS = (ops.InsertGradientOf, ops.HookBackward, ops.Custom)
_HOOK_NAMES = {"InsertGradientOf", "HookBackward", "register_hook"}
# The number of items of a container that are visited. Vocabularies have more, containers of code have fewer.
_MANY_ITEMS = 1000


class NetworkCode:
    """The objects reachable from a network or an optimizer: cells, their attributes, and globals used by functions."""

    def __init__(self, network: nn.Cell) -> None:
        self.reached = _reached_from(network)
        functions = (value for value in self.reached if is_a(value, FunctionType) and is_user(value))
        self.names = frozenset(name for function in functions for name in _names_in(function.__code__))

    def has_hooks(self) -> bool:
        """Return whether the backward pass calls hooks of cells or tensors."""
        names = ("_lazy_backward_hook", "_lazy_backward_pre_hook")
        cells = (vars(cell) for cell in self.reached if is_a(cell, nn.Cell))
        return bool(self.names & _HOOK_NAMES) or any(cell.get(name) for cell in cells for name in names)

    def has_own_backward(self) -> bool:
        """Return whether there is a `bprop` or a hook in the backward pass, which then need not be linear."""
        return self.has_hooks() or any(map(_has_own_backward, self.reached))


def _has_own_backward(value: object) -> bool:
    if not is_a(value, type):
        return is_a(value, _BACKWARD_OPERATORS)
    # MindSpore's own ones, such as that of `recompute`, are linear.
    bases = {kind.__name__ for kind in value.__mro__}
    own = {name for kind in value.__mro__ if is_user(kind) for name in vars(kind)}
    return ("Cell" in bases and "bprop" in own) or ("_Function" in bases and "backward" in own)


def _reached_from(start: object) -> list[object]:
    found: dict[int, object] = {}
    ahead = [start]
    while ahead:
        value = ahead.pop()
        if id(value) not in found:
            found[id(value)] = value
            try:
                ahead += _leads_to(value)
            except Exception:  # Inspecting a user's class may raise anything. It is skipped then.
                continue
    return list(found.values())


def _leads_to(value: object) -> Iterable[object]:
    """Return the objects that a value refers to, from the garbage collector, so that no code of the user runs."""
    if is_a(value, FunctionType):
        inputs = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        return [*inputs, *_named_by(value)] if is_user(value) else inputs
    if is_a(value, type):
        items = (item for kind in value.__mro__ if is_user(kind) for item in vars(kind).items())
        return [each for name, each in items if name != "__init__"]
    kind = type(value)
    if is_a(value, ModuleType) or not (is_a(value, nn.Cell) or is_user(kind) or kind.__module__ in _HOLDERS):
        return ()
    return [kind, *itertools.islice(gc.get_referents(value), _MANY_ITEMS)]


def _named_by(function: FunctionType) -> Iterator[object]:
    """Yield the globals that a function uses, and the attributes that it reads from the user's modules."""
    names = _names_in(function.__code__)
    named = {name: value for name, value in function.__globals__.items() if name in names}
    yield from named.values()
    value: object = None
    for each in itertools.chain(*map(dis.get_instructions, _codes_in(function.__code__))):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = named.get(each.argval)
        elif is_a(value, ModuleType) and is_user(value) and isinstance(each.argval, str):
            value = vars(value).get(each.argval)
            yield value


def is_a(value: object, kinds: type[_T] | tuple[type[_T], ...]) -> TypeGuard[_T]:
    """Return whether a value has one of these types, even if it overrides ``__class__``."""
    return issubclass(type(value), kinds)


def is_user(value: object) -> bool:
    """Return whether a class, a function or a module belongs to no library."""
    name = vars(value).get("__name__") if is_a(value, ModuleType) else getattr(value, "__module__", "")
    return str(name).split(".")[0] not in _LIBRARIES


def _codes_in(code: CodeType) -> list[CodeType]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return [code, *(found for each in inner for found in _codes_in(each))]


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, including strings, which may be for `getattr`."""
    codes = _codes_in(code)
    return {name for each in codes for name in (*each.co_names, *each.co_consts) if isinstance(name, str)}
