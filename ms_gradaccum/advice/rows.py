"""Rows of micro batches: some of them, or those of two together."""

from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum.backend.snapshot import Array, as_array
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
    padded: "Padded | None" = None  # Where their padding was cut off.

    @staticmethod
    def of(inputs: tuple[object, ...], batch_axis: BatchAxis) -> "Rows":
        """Return all rows of a batch."""
        batch = Flattened(inputs, batch_axis)
        rows = count_rows(batch.leaves)
        return Rows(batch.structure, batch.tensors, batch.axes, rows, rows)

    @staticmethod
    def parts(
        network: nn.Cell, inputs: tuple[object, ...], split: SplitBatch, weight: float | None = None
    ) -> list["Rows"]:
        """Return the micro batches of a batch, or its only one with a weight of the caller."""
        axes = Flattened(inputs, network.batch_axis).axes
        parts = []
        for rows, tensors in split.micro_batches:
            parts.append(Rows(split.structure, tensors, axes, rows, rows if weight is None else weight))
        if not split.places:
            return parts
        whole = Rows.of(inputs, network.batch_axis)
        most = max(1, network.token_limit.micro_tokens // (2 * split.longest))
        for i, places in enumerate(split.places):
            parts[i] = parts[i]._replace(padded=Padded(whole, places, most))
        return parts

    def joined(self, other: "Rows") -> "Rows":
        """Return these rows followed by others, both with their padding. What has no rows comes from the other ones."""
        if self.padded is not None and other.padded is not None:
            return self.padded.rows().joined(other.padded.rows())
        if self.axes != other.axes:
            raise RowsDiffer
        tensors = []
        for ours, theirs, axis in zip(self.tensors, other.tensors, self.axes):
            if axis is None:
                tensors.append(theirs)
                continue
            try:
                both = np.concatenate([as_array(ours), as_array(theirs)], axis)
            except ValueError:
                raise RowsDiffer(f"{tuple(ours.shape)} and {tuple(theirs.shape)}") from None
            tensors.append(_tensor(both, ours.dtype))
        return Rows(other.structure, tuple(tensors), self.axes, self.size + other.size, self.weight + other.weight)

    def take(self, places: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        tensors = []
        for each, axis in zip(self.tensors, self.axes):
            tensors.append(each if axis is None else _tensor(as_array(each).take(places, axis), each.dtype))
        share = len(places) / self.size
        padded = self.padded
        if padded is not None:
            padded = padded._replace(places=[padded.places[i] for i in places])
        return self._replace(tensors=tuple(tensors), size=len(places), weight=self.weight * share, padded=padded)

    def few(self) -> "Rows":
        """Return as many of these rows as two micro batches can join with their padding."""
        if self.padded is None or self.size <= self.padded.most:
            return self
        return self.take(range(self.padded.most))

    def exchanged(self, other: "Rows") -> "Rows":
        """Return the first half of these rows, followed by the second half of as many other ones."""
        places = range(self.size)
        half = self.size // 2
        return self.take(places[:half]).joined(other.take(places[half:]))


class Padded(NamedTuple):
    """The rows of a micro batch as they are in their batch, with all of their padding."""

    batch: Rows
    places: Sequence[int]
    most: int  # The number of such rows that half a micro batch has the tokens for.

    def rows(self) -> Rows:
        return self.batch.take(self.places)


def _tensor(array: Array, dtype: ms.Type) -> Tensor:
    return Tensor(array) if dtype == ms.string else Tensor(array, dtype)
