"""Some rows of a batch, taken from its tensors when they are needed."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from ms_gradaccum.backend.kept_state import Array, as_array
from ms_gradaccum.batch.split import BatchAxis, Flattened, count_rows

# So many values of a row are looked at to choose rows.
_COLUMNS = 4096


class Rows(NamedTuple):
    """Some rows of a batch. They are copied when their tensors are asked for, so that none lie about."""

    structure: Hashable
    sources: tuple[Tensor, ...]
    axes: tuple[int | None, ...]
    places: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The rows, in the order of their structure."""
        return tuple(_taken(tensor, axis, self.places) for tensor, axis in zip(self.sources, self.axes))

    @staticmethod
    def of(inputs: tuple[Any, ...], batch_axis: BatchAxis) -> "Rows":
        batch = Flattened(inputs, batch_axis)
        return Rows(batch.structure, batch.tensors, batch.axes, tuple(range(count_rows(batch.leaves))))

    def take(self, places: Sequence[int]) -> "Rows":
        return self._replace(places=tuple(self.places[place] for place in places))

    def cuts(self, most: int, number: int) -> "tuple[Cut, Cut, Cut | None]":
        """Return at most so many rows with unlike halves, with mixed ones, and with three parts if there are enough.

        The rows, others for each number, are those that differ most in what fills them up (padding, a mask), which is
        the smallest or the largest value of a tensor. The parts are a mixed half and the rest of each unlike one.
        """
        filled = sum(_filled(*pair, self.size) for pair in zip(self.sources, self.axes))
        order = np.argsort(filled, kind="stable")
        unlike, mixed = self._cut(most, number, order, False), self._cut(most, number, order, True)
        rest = [self._replace(places=tuple(p for p in mixed[2].places if p in half.places)) for half in unlike[1:]]
        return unlike, mixed, (*mixed[:2], *rest) if all(part.size for part in rest) else None

    def _cut(self, most: int, number: int, order: Array, mixed: bool) -> "Cut":
        half = min(most, self.size) // 2
        begin = number % (self.size // (2 * half)) * half
        low, high = order[begin : begin + half], order[self.size - begin - half : self.size - begin]
        if mixed and half == 1:
            low = order[self.size - begin - 2 :][:1]
        both = np.concatenate((low, high)).tolist()
        parts = (both[::2], both[1::2]) if mixed else (both[:half], both[half:])
        return self.take(both), self.take(parts[0]), self.take(parts[1])

    def joined(self, other: "Rows") -> "Rows | None":
        """Return these rows and others after them, or None if they do not fit together."""
        if self.sources is other.sources:
            return self._replace(places=self.places + other.places)
        try:
            sources = tuple(map(_joined, self.tensors, other.tensors, self.axes))
        except ValueError:  # Other axes have other lengths.
            return None
        places = tuple(range(self.size + other.size))
        return self._replace(sources=sources, places=places) if self.structure == other.structure else None


# Rows and their parts.
Cut = tuple[Rows, ...]


def _taken(tensor: Tensor, axis: int | None, places: Sequence[int]) -> Tensor:
    if axis is None or places == tuple(range(tensor.shape[axis])):
        return tensor
    return Tensor(np.take(as_array(tensor), places, axis), tensor.dtype)


def _filled(tensor: Tensor, axis: int | None, size: int) -> Array:
    """Return what part of each row is the smallest value of a tensor, less what is the largest one."""
    if axis is None:
        return np.zeros(size)
    rows = np.moveaxis(as_array(tensor), axis, 0).reshape(size, -1)
    rows = rows[:, :: rows.shape[1] // _COLUMNS + 1]
    found: Array = (rows == rows.min()).mean(1) - (rows == rows.max()).mean(1) if rows.size else np.zeros(size)
    return found


def _joined(a: Tensor, b: Tensor, axis: int | None) -> Tensor:
    return a if axis is None else Tensor(np.concatenate([as_array(a), as_array(b)], axis), a.dtype)
