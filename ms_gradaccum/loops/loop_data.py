"""The data of a hand-written loop: its prepared datasets, and the batch that it trains."""

import itertools
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.handed_batches import Handed, HandedBatches, TensorOrArray, arrays_in, rows_of


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
        self._open: list[HandedBatches] = []  # The passes that have handed out a batch, the innermost last.
        # The passes that may still be trained. Strong references, since a loop may keep only the batches.
        self._recent: list[HandedBatches] = []
        self.trained: list[HandedBatches] = []  # The sources of the last trained batches.
        # The prepared batches that the current batch consists of.
        self.batches: list[Handed] = []

    def begin(self, handed: HandedBatches) -> bool:
        """Begin a pass. Return whether it begins during a pass over another dataset that is trained with this one."""
        # If the loop fetches ahead, it still trains the rest of the last pass.
        if handed.depth or not handed.is_ahead:
            handed.waiting.clear()
        handed.is_ahead = handed.is_ahead and not handed.depth
        handed.is_open = True
        handed.is_shuffled = False
        handed.newest = None
        handed.depth = 0
        others = [each for each in self._recent if each is not handed and (each.is_open or each.waiting)]
        self._recent = [*others[-7:], handed]
        is_inside = handed in self.trained and any(each.is_open for each in self.trained if each is not handed)
        handed.restarts = handed.restarts or is_inside
        return is_inside

    def hand_out(self, batch: Handed) -> None:
        """Record a batch that goes to the loop. Passes that have begun after its own, inside it, are then over."""
        self._leave(batch.source)
        self._open.append(batch.source)
        batch.source.newest = batch
        batch.source.waiting.append(batch)

    def end(self, handed: HandedBatches, is_left: bool) -> None:
        """End a pass; ``is_left`` if the loop has left it early."""
        self._leave(handed)
        handed.is_open = False
        if is_left:
            handed.waiting.clear()

    def _leave(self, handed: HandedBatches) -> None:
        if handed in self._open:
            del self._open[self._open.index(handed) :]

    def coming(self) -> list[Handed]:
        """Return the batches that the loop is expected to train next."""
        fetched = [each for each in self._recent if each.are_fetched][-1:]
        sources = [each for each in self.trained if each.waiting] or self._open[-1:] or fetched
        return [each.expected()[0] for each in sources if each.expected()]

    def find(self, arrays: Sequence[TensorOrArray]) -> list[Handed]:
        """Return the batches to which ``arrays`` belong, at most one per dataset."""
        found: list[Handed] = []
        for each in dict.fromkeys([*self.trained, *reversed(self._open), *reversed(self._recent)]):
            batch = each.find(arrays)
            if batch is not None:
                found.append(batch)
                arrays = [array for array in arrays if not batch.arrays_among([array])]
        return found

    def expect(self, batches: list[Handed]) -> DataBatch:
        """Begin a batch, or begin it once more. It is expected to consist of these ``batches``."""
        self.batches = batches
        self.is_known = False
        self.piece_rows = None
        is_last = any(each.ends_with(each.source.piece_rows) for each in batches)
        return DataBatch(is_last, batches[0].epoch if batches else None)

    def recognise(self, inputs: object, weight: float) -> None:
        """Determine the batch that ``inputs`` are, or are a piece of, with this weight."""
        arrays = list(arrays_in(inputs))
        found = self.find(arrays)
        if found:
            if self.is_known:
                found = list(dict.fromkeys([*self.batches, *found]))
            self.batches = found
            self.trained = [each.source for each in found]
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
