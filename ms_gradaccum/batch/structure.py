"""Structure of nested inputs, without their tensors, and their reconstruction from tensors, also inside a graph.

A graph treats a tuple or a dict as a constant and is compiled again for each new content. So a micro step gets flat
tensors and rebuilds the network's inputs from them. Inputs of equal structures share a graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from mindspore import Tensor, nn

Structure: TypeAlias = "TensorPlace | PythonValue | SequenceOf | DictOf"
Tensors = Sequence[Tensor]


class TensorPlace(NamedTuple):
    """A tensor, by its position among all tensors of the inputs."""

    position: int
    ndim: int
    dtype: str

    def rebuild(self, tensors: Tensors) -> Tensor:
        return tensors[self.position]

    def as_cell(self) -> nn.Cell:
        return _TakeTensor(self.position)


class PythonValue:
    """Any Python value, which is equal to another one of the same type and text: a NaN is not equal to itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def rebuild(self, tensors: Tensors) -> object:
        return self.value

    def as_cell(self) -> nn.Cell:
        return _GiveValue(self.value)

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonValue) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class SequenceOf(NamedTuple):
    """A tuple, a list or a NamedTuple."""

    kind: type
    children: tuple[Structure, ...]

    @property
    def is_named(self) -> bool:
        return hasattr(self.kind, "_fields")

    @property
    def is_flat(self) -> bool:
        """True for a plain tuple of tensors, which needs no rebuilding."""
        return self.kind is tuple and all(isinstance(child, TensorPlace) for child in self.children)

    def rebuild(self, tensors: Tensors) -> Any:
        """Return the inputs with these tensors, outside of a graph."""
        items = [child.rebuild(tensors) for child in self.children]
        if self.is_named:
            return self.kind(*items)
        return self.kind(items)

    def as_cell(self) -> nn.Cell:
        """Return a cell that rebuilds the inputs in a graph."""
        return _BuildSequence(self)


class DictOf(NamedTuple):
    """A dict with these keys."""

    keys: tuple[object, ...]
    children: tuple[Structure, ...]

    def rebuild(self, tensors: Tensors) -> dict[object, Any]:
        items = [child.rebuild(tensors) for child in self.children]
        return dict(zip(self.keys, items))

    def as_cell(self) -> nn.Cell:
        return _BuildDict(self)


def named_tuple_in(structure: Structure) -> str:
    """Return the name of a NamedTuple among the inputs, or an empty string."""
    if isinstance(structure, (TensorPlace, PythonValue)):
        return ""
    if isinstance(structure, SequenceOf) and structure.is_named:
        return structure.kind.__name__
    return next(filter(None, map(named_tuple_in, structure.children)), "")


class _TakeTensor(nn.Cell):
    def __init__(self, position: int) -> None:
        super().__init__(auto_prefix=False)
        self.position = position

    def construct(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[self.position]


class _GiveValue(nn.Cell):
    def __init__(self, value: object) -> None:
        super().__init__(auto_prefix=False)
        self.value = value

    def construct(self, tensors: tuple[Tensor, ...]) -> object:
        return self.value


class _BuildSequence(nn.Cell):
    def __init__(self, structure: SequenceOf) -> None:
        super().__init__(auto_prefix=False)
        self.kind = structure.kind
        self.is_named = structure.is_named
        self.is_list = structure.kind is list
        self.children = _cells(structure)

    def construct(self, tensors: tuple[Tensor, ...]) -> Any:
        items: tuple[object, ...] = ()
        for child in self.children:
            items += (child(tensors),)
        if self.is_named:
            return self.kind(*items)
        if self.is_list:
            return list(items)
        return items


class _BuildDict(nn.Cell):
    def __init__(self, structure: DictOf) -> None:
        super().__init__(auto_prefix=False)
        self.keys = structure.keys
        self.children = _cells(structure)

    def construct(self, tensors: tuple[Tensor, ...]) -> dict[object, object]:
        # The compiler would leave dict(zip(...)) to the Python interpreter, and the gradient would be lost.
        items: dict[object, object] = {}
        for key, child in zip(self.keys, self.children):
            items[key] = child(tensors)
        return items


def _cells(structure: SequenceOf | DictOf) -> nn.CellList:
    return nn.CellList([child.as_cell() for child in structure.children], auto_prefix=False)
