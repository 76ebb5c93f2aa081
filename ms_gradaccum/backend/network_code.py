"""The Python code of a network: its cells, the functions that they call, and the names in these."""

import contextlib
import dis
import functools
import itertools
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
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
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, np.generic, np.ndarray, Tensor)
_COLLECTIONS = (tuple, list, dict, set, frozenset)
_RECORDS = (SimpleNamespace, Namespace)
# So many items of a collection are looked at: what holds code holds less, and vocabularies and data hold more.
_MANY_ITEMS = 1000
# What is around a function in a class, and where it has it.
_AROUND = {property: "fget", functools.cached_property: "func", functools.partialmethod: "func"}
_AROUND |= {staticmethod: "__func__", classmethod: "__func__", functools.singledispatchmethod: "dispatcher"}


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
        self.functions = [value for value in self.reached if is_a(value, FunctionType) and is_users(value)]
        self.codes = [code for function in self.functions for code in codes_in(function.__code__)]
        self.names = names_in(self.codes)

    def has_own_backward(self) -> bool:
        """Return whether some code says itself what its backward pass is, which then need not be linear.

        That is a `bprop` or a hook of a cell, wherever the network has the cell, an operator that inserts a gradient,
        or a hook of a tensor.
        """
        return bool(self.names & _BACKWARD_NAMES) or any(map(_has_own_backward, self.reached))


def _has_own_backward(value: Any) -> bool:
    if is_a(value, nn.Cell):
        return any(vars(value).get(name) for name in ("_lazy_backward_hook", "_lazy_backward_pre_hook"))
    if is_a(value, type):
        # A cell, or what MindSpore calls a function. Those of MindSpore, such as that of `recompute`, are linear.
        bases = {kind.__name__ for kind in value.__mro__}
        own = {name for kind in value.__mro__ if is_user(kind) for name in vars(kind)}
        return ("Cell" in bases and "bprop" in own) or ("_Function" in bases and "backward" in own)
    return is_a(value, _BACKWARD_OPERATORS)


def _reached_from(values: Iterable[Any]) -> list[Any]:
    """Return the values and all that they lead to, each once."""
    found: dict[int, Any] = {}
    ahead = list(values)
    while ahead:
        value = ahead.pop()
        if id(value) not in found:
            found[id(value)] = value
            try:
                ahead += [each for each in _leads_to(value) if not is_a(each, _PLAIN)]
            except Exception:  # Objects may do anything when they are looked at. This one leads nowhere.
                continue
    return list(found.values())


def _leads_to(value: Any) -> Iterable[Any]:
    """Return what a value has, if it is of the user's or a collection, and what it calls."""
    if is_a(value, _COLLECTIONS):
        return itertools.islice(value.values() if is_a(value, dict) else value, _MANY_ITEMS)
    if is_a(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if is_a(value, MethodType):
        return (value.__func__, value.__self__)
    if is_a(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if is_a(value, FunctionType):
        # One of a library may be around one of the user's.
        return _named_by(value) if is_users(value) else around(value)
    if is_a(value, type):
        own = [item for kind in value.__mro__ if is_user(kind) for item in vars(kind).items()]
        return [unwrapped(each) for name, each in own if name != "__init__"]
    if is_a(value, nn.Cell) or (is_user(type(value)) and not is_a(value, ModuleType)):
        return (type(value), *attributes_of(value).values())
    return ()


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is one of these, whatever it says itself that it is."""
    return issubclass(type(value), kinds)


def unwrapped(value: Any) -> Any:
    """Return the function of what is around one in a class, such as a property, and all else as it is."""
    place = _AROUND.get(type(value))
    return value if place is None else unwrapped(getattr(value, place))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object has itself, in slots too. No code of its class runs."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).items() if "__slots__" in vars(kind) else ()
        for name, slot in slots:
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # It is empty.
                    found[name] = slot.__get__(value)
    return found | (object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {})


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
    """Return whether a class or a function is none of a library's; a plain record is the user's."""
    return kind in _RECORDS or _is_user_module(str(getattr(kind, "__module__", "")))


def _is_user_module(name: str) -> bool:
    package = name.split(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for name, value in vars(kind).items():
        value = unwrapped(value)
        if is_a(value, FunctionType) and name != "__init__":
            yield value


def _named_by(function: FunctionType) -> list[Any]:
    """Return the values that a function names: of globals, of variables around it, defaults, and in user's modules."""
    codes = list(codes_in(function.__code__))
    names = names_in(codes)
    values = [*around(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named = {name: function.__globals__[name] for name in names if name in function.__globals__}
    modules = {name: value for name, value in named.items() if _is_module_of_user(value)}
    return values + list(named.values()) + ([*_named_in(modules, codes)] if modules else [])


def _named_in(modules: dict[str, Any], codes: Iterable[CodeType]) -> Iterator[Any]:
    """Yield what code takes of modules that it knows by these names, as attributes or by a text."""
    for code in codes:
        value = None
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = modules.get(each.argval)
            elif value is not None and isinstance(each.argval, str):
                found = vars(value).get(each.argval)
                yield found
                value = found if _is_module_of_user(found) else None


def around(function: FunctionType) -> list[Any]:
    """Return the values of the variables around a function."""
    closures = ClosureValues(function)
    return [closures[name] for name in closures.cells if name in closures]


def _is_module_of_user(value: Any) -> bool:
    file = vars(value).get("__file__") if is_a(value, ModuleType) else None  # None for what is part of Python.
    return file is not None and _is_user_module(value.__name__) and not _is_standard(file)


def is_users(function: FunctionType) -> bool:
    """Return whether a function is the user's, and none of Python's."""
    return is_user(function) and not _is_standard(function.__code__.co_filename)


def _is_standard(path: str) -> bool:
    return path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def methods_of(kind: type) -> list[FunctionType]:
    """Return the methods of a user's class, decorated ones too."""
    found = [each for base in kind.__mro__ if is_user(base) for each in _functions_of(base)]
    for each in found:
        found += [value for value in around(each) if is_a(value, FunctionType) and value not in found]
    return found


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
