"""The data of a hand-written loop: its prepared datasets, and the batch that it trains."""

import itertools
import weakref
from typing import NamedTuple, Protocol

from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.handed_batches import ActivePasses, Handed, arrays_in, rows_of


class Positioned(Protocol):
    """A dataset that knows where a loop stands in it."""

    def position(self) -> DataPosition: ...


class DataBatch(NamedTuple):
    """A batch of the data, before it is trained."""

    is_last: bool  # True if it is the last one of the data.
    epoch: int | None  # None outside prepared datasets.


class LoopData:
    """The prepared datasets of a loop, and the batch that it trains: expected first, then recognised by its tensors."""

    is_known = False  # True once the current batch was recognised.
    piece_rows: float | None = None  # The rows of the current batch if it is a piece of an unrecognised one.

    def __init__(self) -> None:
        # Weak references, since a program may call prepare() for each pass.
        self.datasets: weakref.WeakValueDictionary[int, Positioned] = weakref.WeakValueDictionary()
        self.numbers = itertools.count()
        # Positions from a loaded state at which the datasets continue, by the number of the dataset.
        self.positions: dict[int, DataPosition] = {}
        self.passes = ActivePasses()
        # The prepared batches that the current batch consists of.
        self.batches: list[Handed] = []

    def expect(self) -> DataBatch:
        """Begin a batch. It is expected to be the one that the datasets hand out next."""
        self.batches = self.passes.coming()
        return self.expect_again()

    def expect_again(self) -> DataBatch:
        """Begin the current batch once more."""
        self.is_known = False
        self.piece_rows = None
        is_last = any(each.ends_with(each.source.piece_rows) for each in self.batches)
        return DataBatch(is_last, self.batches[0].epoch if self.batches else None)

    def expect_none(self) -> None:
        """Begin a batch that no dataset has handed out."""
        self.batches = []
        self.is_known = False
        self.piece_rows = None

    def recognise(self, inputs: object, weight: float) -> None:
        """Determine the batch that ``inputs`` are, or are a piece of, with this weight."""
        arrays = list(arrays_in(inputs))
        found = self.passes.find(arrays)
        if found:
            if self.is_known:
                found = list(dict.fromkeys([*self.batches, *found]))
            self.batches = found
            self.passes.trained = [each.source for each in found]
            self.is_known = True
            self.piece_rows = None
        elif not self.is_known:
            # Use the weight as rows only if there were pieces before: it may count tokens, and 1 is the default.
            is_cut = any(each.source.pieces_before_that_of(each) > 1 for each in self.batches)
            self.piece_rows = weight if is_cut and weight != 1.0 else rows_of(arrays)

    def is_last(self) -> bool:
        """Return whether the data ends after the current batch."""
        return any(each.ends_with(self.piece_rows) for each in self.batches)

    def note_trained(self) -> None:
        """Record the current batch as trained."""
        for each in self.batches:
            each.source.train(each, self.piece_rows, self.is_known)

    def batches_to_join(self) -> list[Handed]:
        """Return the trained batches after which other ranks have more."""
        return [each for each in self.batches if each.source.joins and not each.source.waiting]
