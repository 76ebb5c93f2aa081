"""The data of a hand-written loop: the batches that prepared datasets have handed out, and those that the loop trains.

At the end of the data, a window ends when the last batch is trained, not when it is handed out: a loop may fetch
batches ahead, cut them into pieces, skip some, or draw from other prepared datasets as well.
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from mindspore import Tensor

from ms_gradaccum.loops.data_position import DataPosition, Sources

TensorOrArray: TypeAlias = Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(eq=False)
class Handed:
    """One batch that a prepared dataset has handed out."""

    source: "HandedBatches"
    batch: InitVar[object]  # Recognised by its tensors and arrays.
    epoch: int
    place: int  # Number of the batch in its pass, from 1 on.
    is_last: bool  # True if it ends the pass, on all ranks.
    origin: Sources  # The sources of the order of its pass.
    pieces: int = 0  # Number of times that `accumulate()` was entered for it so far.
    rows_trained: float | None = 0.0  # Number of rows trained so far; None if unknown.

    def __post_init__(self, batch: object) -> None:
        arrays = list(arrays_in(batch))
        # Weak references, so that a batch that the loop skips does not stay in memory.
        self._parts = [weakref.ref(each) for each in arrays]
        self.rows = rows_of(arrays)
        lengths = {int(each.shape[0]) for each in arrays if each.shape}
        self.length: int | None = None  # The rows, if all arrays have as many.
        if len(lengths) == 1:
            self.length = lengths.pop()

    def arrays_among(self, arrays: Sequence[TensorOrArray]) -> int:
        """Return the number of ``arrays`` that belong to this batch."""
        # While the parts are held here, no other object has one of their ids.
        parts = [part() for part in self._parts]
        own = set(map(id, parts))
        return sum(id(each) in own for each in arrays)

    def ends_with(self, rows: float | None) -> bool:
        """Return whether the data ends after a piece of ``rows`` rows (None: unknown) is trained.

        The batch before this one shows whether the loop cuts batches, and into how many pieces.
        """
        source = self.source
        before = source.pieces_before_that_of(self)
        others = [each for each in source.waiting if each.epoch == self.epoch and each is not self]
        # A loop over a reordered list of batches may begin with the last one.
        if not source.is_open and (source.is_shuffled or (source.is_first and others)):
            return not others
        if not self.is_last or source.restarts:
            return False
        if before == 1:
            return True
        if rows is None or self.rows_trained is None or self.rows is None or rows > self.rows:
            return self.pieces + 1 >= before
        return self.rows_trained + rows >= self.rows


class HandedBatches:
    """The batches of one prepared dataset that were handed out."""

    is_open = False  # True if a pass is under way.
    is_ahead = False  # True if the loop fetches batches before it has trained the previous ones.
    is_shuffled = False  # True if the loop trains a pass in another order.
    # True if passes begin again during a pass over another dataset that is trained with this one.
    restarts = False
    current: Handed | None = None  # The batch that was trained last.
    newest: Handed | None = None  # The batch that was handed out last in this pass.
    pieces_before = 0  # Number of pieces of the batch before the current one; 0 if there was none.
    # Number of rows of the last piece. The next piece is expected to have as many.
    piece_rows: float | None = None
    # Number of batches waiting when the first batch of the pass was trained, if that batch was not recognised. The loop
    # either fetches ahead or skips batches; its second batch shows which.
    depth = 0
    joins = 0  # Number of batches of other ranks to join after this rank's last one.

    def __init__(self) -> None:
        self.waiting: list[Handed] = []  # Untrained batches, in order.

    @property
    def are_fetched(self) -> bool:
        """True if all batches of the epoch were handed out and some are not trained yet."""
        return bool(self.waiting) and (self.is_ahead or self.depth > 0 or self.is_first)

    def pieces_before_that_of(self, batch: Handed) -> int:
        """Return the number of pieces of the batch that was trained before this one; 0 if there was none."""
        if batch is self.current or self.current is None:
            return self.pieces_before
        return self.current.pieces

    def expected(self) -> list[Handed]:
        """Return the batches that the loop may train next, the most probable one first."""
        expected = list(self.waiting)
        if self.is_open and not (self.is_ahead or self._seems_ahead):
            expected.reverse()
        current = self.current
        if current is not None and (self.is_open or current.pieces < self.pieces_before):
            expected.append(current)
        return expected

    @property
    def is_first(self) -> bool:
        """True if no batch of the newest pass was trained yet."""
        return (
            self.newest is None or self.current is None or self.current.epoch != self.newest.epoch
        )

    @property
    def _seems_ahead(self) -> bool:
        """True unless the loop skips batches: then it gets as many between two trained batches as before the first."""
        if self.is_first:
            return len(self.waiting) > 1
        return 0 < self.depth >= len(self.waiting) - self.depth

    def find(self, arrays: Sequence[TensorOrArray]) -> Handed | None:
        """Return the batch to which most of ``arrays`` belong; in a tie, the expected batch."""
        best = None
        most = 0
        for each in self.expected():
            found = each.arrays_among(arrays)
            if found > most:
                best = each
                most = found
        return best

    def train(self, batch: Handed, rows: float | None, is_known: bool = True) -> None:
        """Record that a piece of ``batch`` with ``rows`` rows was trained; ``is_known`` if it was recognised."""
        is_first = self.is_first
        seems_ahead = self._seems_ahead
        before = self.current
        self.current = batch
        self.piece_rows = rows
        batch.pieces += 1
        if rows is None or batch.rows_trained is None:
            batch.rows_trained = None
        else:
            batch.rows_trained += rows
        if batch is before:
            return
        if before is not None:
            self.pieces_before = before.pieces
            self.is_shuffled |= before.epoch == batch.epoch and batch.place < before.place
        if is_first and not (is_known or self.is_ahead):
            self.depth = len(self.waiting) - 1
        elif self.depth and not self.is_ahead:
            self.is_ahead = seems_ahead
            self.depth *= seems_ahead
        if self.is_open:
            if is_known:
                self.is_ahead = batch is not self.newest
                self.depth = 0
            # The loop has skipped the batches before this one.
            self.waiting = [
                each
                for each in self.waiting
                if (each.epoch, each.place) > (batch.epoch, batch.place)
            ]
        elif batch in self.waiting:
            self.waiting.remove(batch)


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
    # The rows of the current batch if it is a piece of an unrecognised one.
    piece_rows: float | None = None

    def __init__(self) -> None:
        # Weak references, since a program may call prepare() for each pass.
        self.datasets: weakref.WeakValueDictionary[int, Positioned] = weakref.WeakValueDictionary()
        self.numbers = itertools.count()
        # Positions from a loaded state at which the datasets continue, by the number of the dataset.
        self.positions: dict[int, DataPosition] = {}
        # The passes that have handed out a batch, the innermost last.
        self._open: list[HandedBatches] = []
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
        others = [
            each for each in self._recent if each is not handed and (each.is_open or each.waiting)
        ]
        self._recent = [*others[-7:], handed]
        is_inside = handed in self.trained and any(
            each.is_open for each in self.trained if each is not handed
        )
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


def arrays_in(batch: object, depth: int = 8) -> Iterator[TensorOrArray]:
    """Yield the tensors and arrays of a batch. The depth is limited, since a list can contain itself."""
    if isinstance(batch, (Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, (dict, tuple, list)) and depth:
        if isinstance(batch, dict):
            batch = list(batch.values())
        for each in batch:
            yield from arrays_in(each, depth - 1)


def rows_of(arrays: Sequence[TensorOrArray]) -> int | None:
    """Return the number of rows of a batch or a piece of one: the length of its first array."""
    for each in arrays:
        if each.shape:
            return int(each.shape[0])
    return None
