"""Reconstruction of nested inputs from their tensors, also inside a graph.

A graph treats a tuple or a dict as a constant and is compiled again for each new content. So a micro step gets flat
tensors and rebuilds the network's inputs from them.
"""

from collections.abc import Mapping, Sequence
from inspect import Signature
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum._checks import argument_error

# The arguments of a network.
Args = tuple[object, ...]
Kwargs = dict[str, object]
# A batch as one object: the only input, a sequence of all inputs, or inputs by name.
Batch = Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]] | Sequence[object] | Mapping[str, object]


def why_no_graph(structure: Any) -> str:
    """Return the reason why a graph in PYNATIVE mode cannot take inputs of ``structure``, or an empty string."""
    if structure[0] not in ("sequence", "dict"):
        return ""
    if hasattr(structure[1], "_fields"):
        return f"its inputs hold {structure[1].__name__}, a NamedTuple, which loses its gradient in a graph"
    return next(filter(None, map(why_no_graph, structure[2])), "")


def unflatten(structure: Any, leaves: tuple[Tensor, ...]) -> Any:
    """Rebuild the inputs of ``structure`` from these tensors, outside of a graph."""
    kind = structure[0]
    if kind == "leaf":
        return leaves[structure[1]]
    if kind == "value":
        return structure[2].value
    children = [unflatten(child, leaves) for child in structure[2]]
    if kind == "dict":
        return dict(zip(structure[1], children))
    return structure[1](*children) if hasattr(structure[1], "_fields") else structure[1](children)


def is_flat(structure: Any) -> bool:
    """Return whether the inputs of ``structure`` are a plain tuple of tensors, which needs no rebuilding."""
    return bool(structure[:2] == ("sequence", tuple) and all(child[0] == "leaf" for child in structure[2]))


class Unflatten(nn.Cell):
    """The cell that rebuilds one input, or all inputs, of this ``structure`` from tensors."""

    def __init__(self, structure: Any) -> None:
        super().__init__(auto_prefix=False)
        # `container` is the index of a tensor, the type of a sequence, or the keys of a dict.
        self.kind, self.container, content, *_ = structure
        self.named, self.is_list = hasattr(self.container, "_fields"), self.container is list
        self.value = content.value if self.kind == "value" else None
        children = [Unflatten(child) for child in content] if self.kind in ("sequence", "dict") else []
        self.children = nn.CellList(children, auto_prefix=False)

    def construct(self, leaves: tuple[Tensor, ...]) -> Any:
        if self.kind == "leaf":
            return leaves[self.container]
        if self.kind == "value":
            return self.value
        if self.kind == "dict":
            # The compiler would leave dict(zip(...)) to the Python interpreter, and the gradient would be lost.
            named: dict[object, object] = {}
            for key, child in zip(self.container, self.children):
                named[key] = child(leaves)
            return named
        items: tuple[object, ...] = ()
        for child in self.children:
            items += (child(leaves),)
        if self.named:
            return self.container(*items)
        return list(items) if self.is_list else items


def as_call(owner: str, batch: object) -> tuple[Args, Kwargs]:
    """Return a batch as the positional and keyword arguments of a network."""
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, (Tensor, np.ndarray)):
        return (batch,), {}
    got = f"{batch!r} of type {type(batch).__name__}"
    remedy = "Give the inputs of network in a tuple, or by name in a dict."
    raise TypeError(argument_error(owner, "batch", "a tensor, a tuple, a list or a dict", got, remedy))


def how_to_name(signature: Signature, given: int, kwargs: Mapping[str, object]) -> str:
    """Return a remedy for named inputs that a network does not take, after ``given`` positional ones."""
    wrong = [name for name in kwargs if name not in signature.parameters]
    arguments = list(signature.parameters.values())[given:]
    free = [each.name for each in arguments if each.name not in kwargs and each.kind == each.POSITIONAL_OR_KEYWORD]
    if not wrong:
        return "Give them as the network takes them."
    if len(wrong) > len(free):
        return f"Leave out {', '.join(map(repr, wrong[len(free) :]))}."
    names, own = (", ".join(map(repr, each)) for each in (wrong, free))
    return f"Rename {names} to {own}, for example with dataset.rename()."
