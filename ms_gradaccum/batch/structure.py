"""Structure of nested inputs, without their tensors, and their reconstruction from tensors, also inside a graph.

A graph treats a tuple or a dict as a constant and is compiled again for each new content. So a micro step gets flat
tensors and rebuilds the network's inputs from them. Inputs of equal structures share a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mindspore import Tensor, jit_class

Structure: TypeAlias = "TensorPlace | PythonValue | SequenceOf | DictOf"
Tensors = Sequence[Tensor]


@jit_class
@dataclass(frozen=True)
class TensorPlace:
    """A tensor, by its position among all tensors of the inputs."""

    position: int
    ndim: int
    dtype: str

    def rebuild(self, tensors: Tensors) -> Tensor:
        return tensors[self.position]


@jit_class
class PythonValue:
    """Any Python value, which is equal to another one of the same type and text: a NaN is not equal to itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def rebuild(self, tensors: Tensors) -> object:
        return self.value

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonValue) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@jit_class
@dataclass(frozen=True)
class SequenceOf:
    """A tuple, a list or a NamedTuple."""

    kind: type
    children: tuple[Structure, ...]

    @property
    def is_named(self) -> bool:
        return hasattr(self.kind, "_fields")

    def rebuild(self, tensors: Tensors) -> Any:
        """Return the inputs with these tensors."""
        items: tuple[object, ...] = ()
        for child in self.children:
            items += (child.rebuild(tensors),)
        if self.is_named:
            return self.kind(*items)
        return self.kind(items)


@jit_class
@dataclass(frozen=True)
class DictOf:
    """A dict with these keys."""

    keys: tuple[object, ...]
    children: tuple[Structure, ...]

    def rebuild(self, tensors: Tensors) -> dict[object, Any]:
        # The compiler would leave dict(zip(...)) to the Python interpreter, and the gradient would be lost.
        items: dict[object, Any] = {}
        for key, child in zip(self.keys, self.children):
            items[key] = child.rebuild(tensors)
        return items


def named_tuple_in(structure: Structure) -> str:
    """Return the name of a NamedTuple among the inputs, or an empty string."""
    if isinstance(structure, (TensorPlace, PythonValue)):
        return ""
    if isinstance(structure, SequenceOf) and structure.is_named:
        return structure.kind.__name__
    return next(filter(None, map(named_tuple_in, structure.children)), "")
