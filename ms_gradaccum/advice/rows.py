"""Rows of micro batches: joined with those of another one, or exchanged between two."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum.backend.snapshot import Array, as_array
from ms_gradaccum.batch.split import BatchAxis, Flattened, count_rows
from ms_gradaccum.batch.structure import SequenceOf

_Combine = Callable[[int, Array, Array], Array]  # The axis of the rows, and the arrays of two micro batches.


class RowsDiffer(ValueError):
    """Error for micro batches whose tensors differ on another axis than that of the rows."""


class Rows(NamedTuple):
    """The tensors of a micro batch, the structure of its inputs, and the axis of the rows of each tensor."""

    structure: SequenceOf
    tensors: tuple[Tensor, ...]
    axes: tuple[int | None, ...]
    size: int
    weight: float  # The weight of their mean loss: their number, or what the caller gives.

    @staticmethod
    def of(inputs: tuple[object, ...], batch_axis: BatchAxis) -> "Rows":
        """Return all rows of a batch."""
        batch = Flattened(inputs, batch_axis)
        rows = count_rows(batch.leaves)
        return Rows(batch.structure, batch.tensors, batch.axes, rows, rows)

    def joined(self, other: "Rows") -> "Rows":
        """Return these rows followed by others. What has no rows comes from the other ones."""
        return self._combined(other, lambda axis, ours, theirs: np.concatenate([ours, theirs], axis))

    def exchanged(self, other: "Rows") -> "Rows":
        """Return the first half of these rows, followed by the second half of as many other ones."""
        half = self.size // 2

        def halves(axis: int, ours: Array, theirs: Array) -> Array:
            places = range(self.size)
            return np.concatenate([ours.take(places[:half], axis), theirs.take(places[half:], axis)], axis)

        return self._combined(other, halves)._replace(size=self.size, weight=self.weight)

    def take(self, places: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        return self._combined(self, lambda axis, ours, _: ours.take(places, axis))._replace(
            size=len(places), weight=self.weight * len(places) / self.size
        )

    def _combined(self, other: "Rows", combine: "_Combine") -> "Rows":
        if len(self.tensors) != len(other.tensors) or self.axes != other.axes:
            raise RowsDiffer
        tensors = []
        for ours, theirs, axis in zip(self.tensors, other.tensors, self.axes):
            if axis is None:
                tensors.append(theirs)
            elif _other_lengths(ours, axis) != _other_lengths(theirs, axis):
                raise RowsDiffer(f"{tuple(ours.shape)} and {tuple(theirs.shape)}")
            else:
                tensors.append(_tensor(combine(axis, as_array(ours), as_array(theirs)), ours.dtype))
        return Rows(other.structure, tuple(tensors), self.axes, self.size + other.size, self.weight + other.weight)


def _other_lengths(tensor: Tensor, axis: int) -> list[int]:
    lengths = list(tensor.shape)
    del lengths[axis]
    return lengths


def _tensor(array: Array, dtype: ms.Type) -> Tensor:
    return Tensor(array) if dtype == ms.string else Tensor(array, dtype)
