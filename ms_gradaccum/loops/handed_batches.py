"""The batches that prepared datasets have handed out, and which of them a loop trains.

A window ends with the data, and that is where the last batch is trained, not where it is handed out: a loop may fetch
batches ahead, cut them, skip some, or draw from other prepared datasets as well.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor


class Handed:
    """One batch that a prepared dataset has handed out.

    Args:
        source: The batches of its dataset.
        batch: The batch itself, which is known again by its tensors and arrays.
        epoch: Number of its pass.
        place: Number of the batch in its pass, from 1 on.
        is_last: Whether it ends the pass, on all ranks.
        origin: What the order of the samples of its pass depends on.

    Attributes:
        pieces: How many times `accumulate()` was entered for it so far.
        rows_trained: Rows of the pieces that were trained; None if nobody knows.
    """

    def __init__(self, source: "HandedBatches", batch: Any, epoch: int, place: int, is_last: bool, origin: Any) -> None:
        self.source, self.epoch, self.place, self.is_last, self.origin = source, epoch, place, is_last, origin
        arrays = list(arrays_in(batch))
        # Weakly: a loop that skips a batch shall not keep it in memory.
        self._parts = [weakref.ref(each) for each in arrays]
        self.rows = rows_of(arrays)
        self.pieces = 0
        self.rows_trained: float | None = 0.0

    def arrays_among(self, arrays: list[Any]) -> int:
        """Return how many of ``arrays`` are of this batch."""
        parts = [part() for part in self._parts]
        return sum(any(part is each for part in parts) for each in arrays)

    def ends_with(self, rows: float | None) -> bool:
        """Return whether the data ends once a piece of so many rows (None: not known) is trained.

        The batch before this one shows whether the loop cuts batches, and into how many pieces.
        """
        source = self.source
        before = source.pieces_before_that_of(self)
        if source.is_shuffled and not source.is_open:
            return not any(each is not self for each in source.waiting)
        if not self.is_last or source.restarts or before == 1:
            return self.is_last and not source.restarts
        if rows is None or self.rows_trained is None or self.rows is None or rows > self.rows:
            return self.pieces + 1 >= before
        return self.rows_trained + rows >= self.rows


class HandedBatches:
    """The batches of one prepared dataset that were handed out.

    Attributes:
        waiting: Those of which nothing was trained yet, in order.
        current: The one that was trained last.
        is_open: Whether a pass is under way.
        is_ahead: Whether the loop fetches batches before it trains the ones before them.
        depth: Batches that were waiting when the first batch of the pass was trained, if it was not recognised: the
            loop fetches ahead or skips batches, and its second batch tells which.
        is_shuffled: Whether the loop trains a pass in another order.
        restarts: Whether passes begin anew inside one over another dataset that is trained with it.
        pieces_before: Pieces of the batch before the current one; 0 if there was none.
        piece_rows: Rows of the last piece, which the coming one is expected to have.
        joins: Batches of other ranks in which this one takes part once it has trained its last.
    """

    is_open = is_ahead = is_shuffled = restarts = False
    current: Handed | None = None
    newest: Handed | None = None
    pieces_before = joins = depth = 0
    piece_rows: float | None = None

    def __init__(self) -> None:
        self.waiting: list[Handed] = []

    def begin(self) -> None:
        """Begin a pass. What is left of the last one is still to come where the loop fetches ahead."""
        if self.depth or not self.is_ahead:
            self.waiting.clear()
        self.is_ahead = self.is_ahead and not self.depth
        self.is_open, self.is_shuffled, self.newest, self.depth = True, False, None, 0

    def hand_out(self, batch: Handed) -> None:
        """Note a batch that goes to the loop now."""
        self.newest = batch
        self.waiting.append(batch)

    def end(self, is_left: bool) -> None:
        """End a pass; ``is_left`` if the loop wants no more of it."""
        self.is_open = False
        if is_left:
            self.waiting.clear()

    @property
    def are_fetched(self) -> bool:
        """True if all batches of the epoch were handed out and some are not trained yet."""
        seen = self.current is not None and self.newest is not None and self.current.epoch == self.newest.epoch
        return bool(self.waiting) and (self.is_ahead or self.depth > 0 or not seen)

    def pieces_before_that_of(self, batch: Handed) -> int:
        """Return the pieces of the batch that was trained before this one; 0 if there was none."""
        if batch is self.current or self.current is None:
            return self.pieces_before
        return self.current.pieces

    def coming(self) -> Handed | None:
        """Return the batch that is trained next, as far as it is known before."""
        if self.waiting:
            return self.waiting[0 if self.is_ahead or self._seems_ahead or not self.is_open else -1]
        return self._current_if_open()

    @property
    def _is_first(self) -> bool:
        """True if no batch of the newest pass was trained yet."""
        return self.newest is None or self.current is None or self.current.epoch != self.newest.epoch

    @property
    def _seems_ahead(self) -> bool:
        """True unless the loop skips batches: between two batches it is handed as many as before the first."""
        return len(self.waiting) > 1 if self._is_first else 0 < self.depth >= len(self.waiting) - self.depth

    def _current_if_open(self) -> Handed | None:
        """Return the batch that was trained last if more of it is to come."""
        goes_on = self.is_open or (self.current is not None and self.current.pieces < self.pieces_before)
        return self.current if goes_on else None

    def find(self, arrays: list[Any]) -> Handed | None:
        """Return the batch that most of ``arrays`` are of; in doubt the one that is expected."""
        best, most = None, 0
        known = self.waiting if self.is_ahead or not self.is_open else self.waiting[::-1]
        for each in (*known, self._current_if_open()):
            count = 0 if each is None else each.arrays_among(arrays)
            if count > most:
                best, most = each, count
            if most == len(arrays):
                break
        return best

    def train(self, batch: Handed, rows: float | None, is_known: bool = True) -> None:
        """Note that a piece of ``batch`` with so many rows was trained; ``is_known`` if it was recognised."""
        is_first, seems_ahead = self._is_first, self._seems_ahead
        before, self.current, self.piece_rows = self.current, batch, rows
        batch.pieces += 1
        batch.rows_trained = None if rows is None or batch.rows_trained is None else batch.rows_trained + rows
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
                self.is_ahead, self.depth = batch is not self.newest, 0
            # Those before it were passed over.
            self.waiting = [each for each in self.waiting if (each.epoch, each.place) > (batch.epoch, batch.place)]
        elif batch in self.waiting:
            self.waiting.remove(batch)


class ActivePasses:
    """The passes over prepared datasets that are under way, the innermost one last, and those that are trained.

    Attributes:
        trained: Whose batches the loop was seen to train last.
    """

    def __init__(self) -> None:
        self._open: list[Any] = []
        # Whatever may still be trained: strongly, since a loop may have the batches without the dataset.
        self._recent: list[HandedBatches] = []
        self.trained: list[HandedBatches] = []

    def begin(self, handed: HandedBatches) -> bool:
        """Begin a pass. Return whether it begins inside one over another dataset that is trained with it."""
        handed.begin()
        self._recent = [each for each in self._recent if each is not handed and (each.is_open or each.waiting)]
        self._recent = [*self._recent[-7:], handed]
        is_inside = handed in self.trained and any(each.is_open for each in self.trained if each is not handed)
        handed.restarts |= is_inside
        return is_inside

    def enter(self, dataset: Any) -> None:
        """Note that ``dataset`` gives a batch: what was begun inside its last one has been left."""
        if dataset in self._open:
            del self._open[self._open.index(dataset) + 1 :]
        else:
            self._open.append(dataset)

    def leave(self, dataset: Any) -> None:
        """Note that a pass over ``dataset`` is over."""
        if dataset in self._open:
            del self._open[self._open.index(dataset) :]

    def innermost(self) -> Any:
        """Return the dataset that the current batch is from, if nothing else is known."""
        return self._open[-1] if self._open else None

    def coming(self) -> list[Handed]:
        """Return the batches that are trained next, as far as it is known before."""
        found = [each.coming() for each in self.trained if each.waiting]
        if not found and self._open:
            found = [self._open[-1].handed.coming()]
        if not found:
            found = [each.coming() for each in self._recent if each.are_fetched][-1:]
        return [batch for batch in found if batch is not None]

    def find(self, arrays: list[Any]) -> list[Handed]:
        """Return the batches that ``arrays`` are of: one of each dataset that has some of them."""
        inner = [each.handed for each in reversed(self._open)]
        found: list[Handed] = []
        for each in dict.fromkeys([*self.trained, *inner, *reversed(self._recent)]):
            batch = each.find(arrays) if arrays else None
            if batch is not None:
                found.append(batch)
                arrays = [array for array in arrays if not batch.arrays_among([array])]
        return found


def arrays_in(batch: Any, depth: int = 8) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch. A list can be in itself: what is nested deeper is left out."""
    if isinstance(batch, (Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, (dict, tuple, list)) and depth:
        for each in batch.values() if isinstance(batch, dict) else batch:
            yield from arrays_in(each, depth - 1)


def rows_of(arrays: list[Any]) -> int | None:
    """Return the rows of a batch or a piece of one: the length of its first array."""
    return next((int(each.shape[0]) for each in arrays if each.shape), None)
