"""Rows of micro batches: some of them, or those of two together."""

from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum.backend.arrays import Array, as_array
from ms_gradaccum.batch.arguments import Args
from ms_gradaccum.batch.split import BatchAxis, Flattened, SplitBatch, count_rows
from ms_gradaccum.batch.structure import SequenceOf


class RowsDiffer(ValueError):
    """Error for micro batches whose tensors differ on another axis than that of the rows."""


class Rows(NamedTuple):
    """The tensors of a micro batch, the structure of its inputs, and the axis of the rows of each tensor."""

    structure: SequenceOf
    tensors: tuple[Tensor, ...]
    axes: tuple[int | None, ...]
    size: int
    weight: float  # The weight of their mean loss: their number, or what the caller gives.
    padded: "Rows | None" = None  # The same rows with all of their padding, where it was cut off.

    @staticmethod
    def of(inputs: Args, batch_axis: BatchAxis) -> "Rows":
        """Return all rows of a batch."""
        batch = Flattened(inputs, batch_axis)
        rows = count_rows(batch.leaves)
        return Rows(batch.structure, batch.tensors, batch.axes, rows, rows)

    @staticmethod
    def parts(
        network: nn.Cell, inputs: Args, split: SplitBatch, weight: float | None = None
    ) -> list["Rows"]:
        """Return the micro batches of a batch, or its only one with a weight of the caller.

        Where padding was cut off, they have as many rows as two can join with all of it.
        """
        whole = Rows.of(inputs, network.batch_axis)
        parts = []
        for rows, tensors in split.micro_batches:
            parts.append(
                Rows(split.structure, tensors, whole.axes, rows, rows if weight is None else weight)
            )
        for i, places in enumerate(split.places):
            few = range(
                min(parts[i].size, network.token_limit.micro_tokens // (2 * split.longest) or 1)
            )
            parts[i] = parts[i].take(few)._replace(padded=whole.take(places[: len(few)]))
        return parts

    def joined(self, other: "Rows") -> "Rows":
        """Return these rows followed by others, both with their padding. What has no rows comes from the other ones."""
        ours = self.padded or self
        theirs = other.padded or other
        if ours.axes != theirs.axes:
            raise RowsDiffer
        tensors = []
        for first, second, axis in zip(ours.tensors, theirs.tensors, ours.axes):
            if axis is None:
                tensors.append(second)
                continue
            try:
                both = np.concatenate([as_array(first), as_array(second)], axis)
            except ValueError:
                raise RowsDiffer(f"{tuple(first.shape)} and {tuple(second.shape)}") from None
            tensors.append(_tensor(both, first.dtype))
        return Rows(
            other.structure,
            tuple(tensors),
            ours.axes,
            self.size + other.size,
            self.weight + other.weight,
        )

    def beside(self, other: "Rows") -> "Rows":
        """Return these rows with the other inputs of ``other``: the weight of a term may change in each batch.

        If these are the same, it is this object.
        """
        tensors = []
        is_same = self.structure == other.structure
        for ours, theirs, axis in zip(self.tensors, other.tensors, self.axes):
            if axis is None:
                is_same = is_same and np.array_equal(as_array(ours), as_array(theirs))
            tensors.append(theirs if axis is None else ours)
        return self if is_same else self._replace(structure=other.structure, tensors=tuple(tensors))

    def take(self, places: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        tensors = []
        for each, axis in zip(self.tensors, self.axes):
            tensors.append(
                each if axis is None else _tensor(as_array(each).take(places, axis), each.dtype)
            )
        weight = self.weight * len(places) / self.size
        padded = self.padded and self.padded.take(places)
        return Rows(self.structure, tuple(tensors), self.axes, len(places), weight, padded)


def _tensor(array: Array, dtype: ms.Type) -> Tensor:
    return Tensor(array, None if dtype == ms.string else dtype)
