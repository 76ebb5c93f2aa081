"""The Python code of a network: its cells, the functions that they call, and the names in these."""

import dis
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from mindspore import nn, ops

# Whose code is taken for what it is: nobody changes it between two steps.
_LIBRARIES = ("mindspore", "ms_gradaccum", "numpy")
_STANDARD = (str(Path(dis.__file__).parent), "<frozen")
# Operators with which a user says what a backward pass is, and what is called for that.
_BACKWARD_OPERATORS = (ops.InsertGradientOf, ops.HookBackward, ops.Custom)
_BACKWARD_NAMES = {"InsertGradientOf", "HookBackward", "register_hook"}


class NetworkCode:
    """The code of a network's cells and of the functions that they call.

    Args:
        network: The network.

    Attributes:
        cells: Its cells by their names.
        classes: The user's classes of these.
        functions: The methods of the classes, and what they call, as far as it is the user's.
        codes: The code of all of these, with the functions inside them.
        names: The names that the code uses.
    """

    def __init__(self, network: nn.Cell) -> None:
        self.cells = {name: cell for name, cell in network.cells_and_names()}
        self.classes = unique(kind for cell in self.cells.values() for kind in type(cell).__mro__ if is_user(kind))
        own = [function for kind in self.classes for function in _functions_of(kind)]
        held = [value for cell in self.cells.values() for value in vars(cell).values() if _is_users_function(value)]
        self.functions = _with_called([*own, *held])
        self.codes = [code for function in self.functions for code in _codes(function.__code__)]
        self.names = names_in(self.codes)

    def has_own_backward(self) -> bool:
        """Return whether some code says itself what its backward pass is, which then need not be linear.

        That is a `bprop` or a hook of a cell, wherever the network has the cell, an operator that inserts a gradient,
        or a hook of a tensor.
        """
        return bool(self.names & _BACKWARD_NAMES) or any(map(_has_own_backward, self._parts()))

    def _parts(self) -> Iterator[Any]:
        """Yield the cells, what else they have as attributes, and what the functions name."""
        yield from self.cells.values()
        held = [value for cell in self.cells.values() for value in vars(cell).values()]
        named = [value for function in self.functions for value in _named_by(function)]
        known = {id(cell) for cell in self.cells.values()}
        for value in _items([*held, *named]):
            if isinstance(value, nn.Cell) and id(value) not in known:
                yield from (cell for _, cell in value.cells_and_names())
            else:
                yield value


def _has_own_backward(value: Any) -> bool:
    if isinstance(value, nn.Cell):
        # Those of MindSpore, such as that of `recompute`, are linear.
        return bool((value.has_bprop and is_user(type(value))) or value._backward_hook or value._backward_pre_hook)
    return isinstance(value, _BACKWARD_OPERATORS)


def _items(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and those in tuples, lists and dicts of them."""
    for value in values:
        yield value
        if isinstance(value, (tuple, list, dict)):
            yield from value.values() if isinstance(value, dict) else value


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
    return str(kind.__module__).split(".")[0] not in (*_LIBRARIES, "builtins")


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for name, value in vars(kind).items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and name != "__init__":
            yield value


def _named_by(function: FunctionType) -> list[Any]:
    """Return the values of the globals and of the variables around it that a function names."""
    names = [name for code in _codes(function.__code__) for name in code.co_names]
    closures = ClosureValues(function)
    around = [closures[name] for name in closures.cells if name in closures]
    return [function.__globals__.get(name) for name in names] + around


def _with_called(functions: list[FunctionType]) -> list[FunctionType]:
    """Return the functions and those of the user's that they name, and so on."""
    found: dict[int, FunctionType] = {}
    ahead = list(functions)
    while ahead:
        function = ahead.pop()
        if id(function) not in found:
            found[id(function)] = function
            ahead += [value for value in _named_by(function) if _is_users_function(value)]
    return list(found.values())


def _is_users_function(value: Any) -> bool:
    is_function = isinstance(value, FunctionType) and is_user(value)
    return is_function and not value.__code__.co_filename.startswith(_STANDARD)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def codes_of(kind: type) -> list[CodeType]:
    """Return the code of the methods of a class of cells, with those that it inherits."""
    kinds = [each for each in kind.__mro__ if each not in nn.Cell.__mro__]
    return [code for each in kinds for function in _functions_of(each) for code in _codes(function.__code__)]


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
