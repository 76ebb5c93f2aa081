"""Cells as bytes, so that another process can train them.

MindSpore's primitives and meta functions cannot be pickled: they are made anew from what they were made of, as
copying a cell makes them. Classes and functions of the main program go by value, since that is not run again.
"""

import linecache
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import IO, Any

import dill
from mindspore.ops import GradOperation, HyperMap, Map, MultitypeFuncGraph
from mindspore.ops.composite.base import _Grad
from mindspore.ops.primitive import Primitive

# What each of them is made of, in the order of its arguments; what it has compiled since is left behind.
_GRAD = ("get_all", "get_by_list", "sens_param")
_MADE_OF: tuple[tuple[type, tuple[str, ...]], ...] = (
    (_Grad, (*_GRAD, "get_by_position", "has_aux", "get_value", "return_ids", "merge_forward")),
    (GradOperation, _GRAD),
    (HyperMap, ("ops",)),
    (Map, ("ops",)),
)


def save(thing: Any, file: IO[bytes]) -> None:
    """Write ``thing`` to a file for `load`. Raise whatever error says that it cannot be written."""
    # Of code that is in no file, as in a notebook, the lines that the compiler will ask for.
    lines = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    _Pickler(file, protocol=5, recurse=True).dump((lines, thing))


def load(file: IO[bytes]) -> Any:
    """Read what `save` has written, and give what it uses of the main program to this process's."""
    unpickler = _Unpickler(file, ignore=True)
    lines, thing = unpickler.load()
    linecache.cache.update(lines)
    _publish(unpickler.functions)
    return thing


class _Pickler(dill.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """Say how to make ``thing`` anew, or that it is pickled as usual."""
        if isinstance(thing, Primitive):
            return _make_primitive, (type(thing), thing.init_attrs, _added(thing))
        if isinstance(thing, MultitypeFuncGraph):
            entries = [([str(kind) for kind in types], function) for types, function in thing.entries]
            return _make_multitype, (type(thing), entries, thing.default_func)
        for kind, names in _MADE_OF:
            if isinstance(thing, kind):
                return type(thing), tuple(getattr(thing, name) for name in names)
        return NotImplemented


class _Unpickler(dill.Unpickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: list[FunctionType] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return a global, and take note of the functions that are made by value."""
        found = super().find_class(module, name)
        return self._noting(found) if (module, name) == ("dill._dill", "_create_function") else found

    def _noting(self, create: Callable[..., FunctionType]) -> Callable[..., FunctionType]:
        def create_and_note(*args: Any) -> FunctionType:
            self.functions.append(create(*args))
            return self.functions[-1]

        return create_and_note


def _publish(functions: Iterable[FunctionType]) -> None:
    """Let the compiler find what functions use: it looks in the module that they say they are from."""
    for function in functions:
        name = function.__module__ or "__main__"
        module = sys.modules.setdefault(name, ModuleType(name))
        for key, value in function.__globals__.items():
            module.__dict__.setdefault(key, value)


def _added(primitive: Primitive) -> dict[str, Any]:
    """Return the attributes that have come to it since it was made."""
    made = vars(type(primitive)(**primitive.init_attrs))["attrs"]
    return {name: value for name, value in primitive.attrs.items() if name not in made}


def _make_primitive(kind: type[Primitive], arguments: dict[str, Any], added: dict[str, Any]) -> Primitive:
    primitive = kind(**arguments)
    for name, value in added.items():
        primitive.add_prim_attr(name, value)
    return primitive


def _make_multitype(kind: type[MultitypeFuncGraph], entries: Any, default: Any) -> MultitypeFuncGraph:
    graph = kind("sent")
    for names, function in entries:
        graph.register(*names)(function)
    graph.default_func = default
    return graph
