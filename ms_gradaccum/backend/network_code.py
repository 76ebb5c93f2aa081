"""The Python code of a network: its cells, the functions that they call, and the names in these."""

import functools
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

# Whose code is taken for what it is: nobody changes it between two steps.
_LIBRARIES = ("mindspore", "ms_gradaccum", "numpy")
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")
# Where Python has no environment of its own, these are folders among the standard library.
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Operators with which a user says what a backward pass is, and what is called for that.
_BACKWARD_OPERATORS = (ops.InsertGradientOf, ops.HookBackward, ops.Custom)
_BACKWARD_NAMES = {"InsertGradientOf", "HookBackward", "register_hook"}
# What leads to no code, and can be there in large numbers.
_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, np.ndarray)


class NetworkCode:
    """The code of a network's cells and of the functions that they call.

    Args:
        network: The network.

    Attributes:
        cells: Its cells by their names.
        classes: The user's classes of these.
        reached: The network and all that it leads to: cells, what they have, and what their code names.
        functions: The user's functions among these.
        codes: The code of these, with the functions inside them.
        names: The names that the code uses.
    """

    def __init__(self, network: nn.Cell) -> None:
        self.cells = {name: cell for name, cell in network.cells_and_names()}
        self.classes = unique(kind for cell in self.cells.values() for kind in type(cell).__mro__ if is_user(kind))
        self.reached = _reached_from([network])
        self.functions = [value for value in self.reached if _is_a(value, FunctionType) and _is_users(value)]
        self.codes = [code for function in self.functions for code in codes_in(function.__code__)]
        self.names = names_in(self.codes)

    def has_own_backward(self) -> bool:
        """Return whether some code says itself what its backward pass is, which then need not be linear.

        That is a `bprop` or a hook of a cell, wherever the network has the cell, an operator that inserts a gradient,
        or a hook of a tensor.
        """
        return bool(self.names & _BACKWARD_NAMES) or any(map(_has_own_backward, self.reached))


def _has_own_backward(value: Any) -> bool:
    if _is_a(value, nn.Cell):
        return bool(value._backward_hook or value._backward_pre_hook)
    if _is_a(value, type):
        # A cell, or what MindSpore calls a function. Those of MindSpore, such as that of `recompute`, are linear.
        bases = {kind.__name__ for kind in value.__mro__}
        own = {name for kind in value.__mro__ if is_user(kind) for name in vars(kind)}
        return ("Cell" in bases and "bprop" in own) or ("_Function" in bases and "backward" in own)
    return _is_a(value, _BACKWARD_OPERATORS)


def _reached_from(values: Iterable[Any]) -> list[Any]:
    """Return the values and all that they lead to, each once."""
    found: dict[int, Any] = {}
    ahead = list(values)
    while ahead:
        value = ahead.pop()
        if id(value) not in found:
            found[id(value)] = value
            ahead += (each for each in _leads_to(value) if not _is_a(each, _PLAIN))
    return list(found.values())


def _leads_to(value: Any) -> Iterable[Any]:
    """Return what a value has, if it is of the user's or a collection, and what it calls."""
    if _is_a(value, (tuple, list, set, frozenset)):
        return [*value]
    if _is_a(value, dict):
        return dict.values(value)
    if _is_a(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if _is_a(value, MethodType):
        return (value.__func__, value.__self__)
    if _is_a(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if _is_a(value, FunctionType):
        # One of a library may be around one of the user's.
        return _named_by(value) if _is_users(value) else _around(value)
    if _is_a(value, type):
        return [function for kind in value.__mro__ if is_user(kind) for function in _functions_of(kind)]
    if _is_a(value, nn.Cell) or (is_user(type(value)) and not _is_a(value, ModuleType)):
        return (type(value), *(vars(value).values() if type(value).__dictoffset__ else ()))
    return ()


def _is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is one of these, whatever it says itself that it is."""
    return issubclass(type(value), kinds)


class ClosureValues:
    """The variables of outer functions that a function sees, as a mapping."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def __contains__(self, name: object) -> bool:
        try:
            return name in self.cells and self[str(name)] is not self
        except ValueError:  # It has no value yet.
            return False

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents


def is_user(kind: Any) -> bool:
    """Return whether a class or a function is none of a library's."""
    return _is_user_module(str(kind.__module__))


def _is_user_module(name: str) -> bool:
    return name.split(".")[0] not in (*_LIBRARIES, "builtins")


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for name, value in vars(kind).items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and name != "__init__":
            yield value


def _named_by(function: FunctionType) -> list[Any]:
    """Return the values that a function names: of globals, of variables around it, and in the user's modules."""
    names = names_in(codes_in(function.__code__))
    values = _around(function)
    spaces = [function.__globals__]
    for space in spaces:
        named = [space[name] for name in names if name in space]
        spaces += [vars(each) for each in named if isinstance(each, ModuleType) and _is_module_of_user(each, spaces)]
        values += named
    return values


def _around(function: FunctionType) -> list[Any]:
    """Return the values of the variables around a function."""
    closures = ClosureValues(function)
    return [closures[name] for name in closures.cells if name in closures]


def _is_module_of_user(module: ModuleType, known: list[dict[str, Any]]) -> bool:
    file = vars(module).get("__file__")  # None for what is part of Python.
    is_known = any(vars(module) is space for space in known)
    return not is_known and _is_user_module(module.__name__) and file is not None and not _is_standard(file)


def _is_users(function: FunctionType) -> bool:
    return is_user(function) and not _is_standard(function.__code__.co_filename)


def _is_standard(path: str) -> bool:
    return path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def is_method_of(function: FunctionType, cell: nn.Cell) -> bool:
    """Return whether a function is a method of the class of a cell."""
    return any(each is function for kind in type(cell).__mro__ if is_user(kind) for each in _functions_of(kind))


def codes_of(kind: type) -> list[CodeType]:
    """Return the code of the methods of a class of cells, with those that it inherits."""
    kinds = [each for each in kind.__mro__ if each not in nn.Cell.__mro__]
    return [code for each in kinds for function in _functions_of(each) for code in codes_in(function.__code__)]


def names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return the names that code uses, those in texts for `getattr` too."""
    found: set[str] = set()
    for code in codes:
        found.update(code.co_names)
        found.update(value for value in code.co_consts if isinstance(value, str) and value.isidentifier())
    return frozenset(found)


def unique(items: Iterable[Any]) -> list[Any]:
    """Return the items without those that come again."""
    return list(dict.fromkeys(items))
