"""The code reachable from a network, and whether it defines its own backward pass."""

import dis
import functools
import gc
import itertools
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

_LIBRARIES = {"mindspore", "ms_gradaccum", "numpy"} | sys.stdlib_module_names
# Without a virtual environment, installed packages are in folders below the standard library.
_STANDARD, _INSTALLED = (sysconfig.get_path("stdlib"), "<frozen"), ("/site-packages/", "/dist-packages/")
_BACKWARD_OPERATORS = (ops.InsertGradientOf, ops.HookBackward, ops.Custom)
_BACKWARD_NAMES = {"InsertGradientOf", "HookBackward", "register_hook"}
# Types of values that lead to no code, and types of containers.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, np.generic, np.ndarray, Tensor)
_HOLDERS: tuple[type, ...] = (
    *(tuple, list, dict, set, frozenset, CellType, MethodType, property, staticmethod, classmethod),
    *(functools.partial, functools.partialmethod, functools.cached_property, functools.singledispatchmethod),
    functools._lru_cache_wrapper,
)
# The number of items of a container that are visited. Vocabularies have more, containers of code have fewer.
_MANY_ITEMS = 1000


class NetworkCode:
    """The objects reachable from a network or an optimizer: cells, their attributes, and globals used by functions."""

    def __init__(self, network: nn.Cell) -> None:
        self.reached = _reached_from(network)
        self.functions = [value for value in self.reached if is_a(value, FunctionType) and is_users(value)]
        self.names = frozenset(name for function in self.functions for name in _names_in(function.__code__))

    def has_own_backward(self) -> bool:
        """Return whether there is a `bprop` or a hook in the backward pass, which then need not be linear."""
        return bool(self.names & _BACKWARD_NAMES) or any(map(_has_own_backward, self.reached))


def _has_own_backward(value: Any) -> bool:
    if is_a(value, nn.Cell):
        return any(vars(value).get(name) for name in ("_lazy_backward_hook", "_lazy_backward_pre_hook"))
    if is_a(value, type):
        # MindSpore's own ones, such as that of `recompute`, are linear.
        bases = {kind.__name__ for kind in value.__mro__}
        own = {name for kind in value.__mro__ if is_user(kind) for name in vars(kind)}
        return ("Cell" in bases and "bprop" in own) or ("_Function" in bases and "backward" in own)
    return is_a(value, _BACKWARD_OPERATORS)


def _reached_from(value: object) -> list[Any]:
    found: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        value = ahead.pop()
        if id(value) not in found and not is_a(value, _PLAIN):
            found[id(value)] = value
            try:
                ahead += _leads_to(value)
            except Exception:  # Inspecting a user's class may raise anything. It is skipped then.
                continue
    return list(found.values())


def _leads_to(value: Any) -> Iterable[object]:
    """Return the objects that a value refers to, from the garbage collector, so that no code of the user runs."""
    if is_a(value, FunctionType):
        own = (value.__closure__, value.__defaults__, value.__kwdefaults__)
        return [*own, *_named_by(value)] if is_users(value) else own[:1]
    if is_a(value, type):
        items = (item for kind in value.__mro__ if is_user(kind) for item in vars(kind).items())
        return [each for name, each in items if name != "__init__"]
    is_users_own = is_a(value, nn.Cell) or (is_user(type(value)) and not is_a(value, ModuleType))
    if not is_users_own and not is_a(value, _HOLDERS):
        return ()
    return [*itertools.islice(gc.get_referents(value), _MANY_ITEMS), *([type(value)] if is_users_own else [])]


def _named_by(function: FunctionType) -> Iterator[object]:
    """Yield the globals that a function uses, and the attributes that it reads from the user's modules."""
    names = _names_in(function.__code__)
    named = {name: value for name, value in function.__globals__.items() if name in names}
    yield from named.values()
    for code in _codes_in(function.__code__):
        value = None
        for each in dis.get_instructions(code) if any(map(_is_module_of_user, named.values())) else ():
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = named.get(each.argval)
            elif _is_module_of_user(value) and isinstance(each.argval, str):
                value = vars(value).get(each.argval)
                yield value


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value has one of these types, even if it overrides ``__class__``."""
    return issubclass(type(value), kinds)


def is_user(kind: object) -> bool:
    """Return whether a class or a function belongs to no library. Plain records count as the user's."""
    package = str(getattr(kind, "__module__", "")).split(".")[0]
    return kind in (SimpleNamespace, Namespace) or package not in _LIBRARIES


def is_users(function: FunctionType) -> bool:
    """Return whether a function is the user's and not part of Python."""
    return is_user(function) and not _is_standard(function.__code__.co_filename)


def _is_module_of_user(value: Any) -> bool:
    file = vars(value).get("__file__") if is_a(value, ModuleType) else None  # None for what is part of Python.
    return file is not None and value.__name__.split(".")[0] not in _LIBRARIES and not _is_standard(file)


def _is_standard(path: str) -> bool:
    return path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)


def _codes_in(code: CodeType) -> list[CodeType]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return [code, *(found for each in inner for found in _codes_in(each))]


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, including strings, which may be for `getattr`."""
    codes = _codes_in(code)
    return {name for each in codes for name in (*each.co_names, *each.co_consts) if isinstance(name, str)}
