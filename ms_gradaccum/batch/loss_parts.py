"""Compare the loss of some rows of a batch with the losses of their parts: can it be split into micro batches?

A mean over rows is the mean of its parts, weighted by their rows. Sums and weights of a loss with weights add up.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from ms_gradaccum.backend.kept_state import Array, as_array
from ms_gradaccum.batch.split import BatchAxis, Flattened, count_rows

# The number of values of a row that are read to choose rows.
_COLUMNS = 4096
_BEGIN = "For 'GradAccumulation', the loss should be a mean over rows, but"
_PAIR_BEGIN = "For 'GradAccumulation', sums and weights of a loss with weighted=True should add up, but"
_PAIR = "return (loss_sum, weight) with weighted=True"
_SUM = "it adds up its rows, so that {share}. Give it reduction='mean', or {pair}."
_EMPTY = "some rows alone give {value}, as a mean over a mask without entries does. Use TokenMeanLoss, or {pair}."
_WEIGHTS = (
    "it is a mean over something else (tokens, a mask, class weights, boxes), so that parts of a batch miss it by up "
    "to {miss}. Use TokenMeanLoss, or {pair}."
)
_ROWS = (
    "its rows meet (negatives, statistics of the batch, a root of a mean) or some of it is a sum, so that parts of a "
    "batch miss it by up to {miss}. Train it as a GradCacheLoss, give all of it reduction='mean', or split no batch."
)
_GRADIENT = (
    "the gradients of parts of a batch miss it by up to {miss}, although their losses fit: a part of it is no mean "
    "over rows, but does not change the loss (subtracted again with stop_gradient, or added in a custom backward "
    "pass). Split no batch."
)
_PAIR_GRADIENT = (
    "the gradients of parts of a batch miss it by up to {miss}: the weight depends on parameters, or a part of the sum "
    "does not change its value. Give the weight ops.stop_gradient if it is a number, else train a GradCacheLoss."
)
_CONSTANT = "parts of a batch miss the weight by up to {miss}. Return the number that the loss sum is over."
_MEAN = "it returns a mean where its sum is expected, missed by up to {miss}. Return (loss_sum, weight)."
_OTHER = (
    "parts of a batch miss the loss sum by up to {miss}. Return the sum over what the weight counts; where rows meet, "
    "train the loss as a GradCacheLoss."
)
_ATTRIBUTES = (
    "the first one sets {names}, with which later ones miss the loss by up to {miss}. Set it outside of the loss cell."
)
_ATTRIBUTES_BEGIN = "For 'GradAccumulation', the loss of a micro batch should not depend on those before it, but"


_NOT_MEASURED = (
    "For 'GradAccumulation', the loss should be a mean over rows, but that could not be measured: {reason}. "
    "verify(network, batch, micro_size) compares a window with its batch; check_loss=False leaves this out."
)


class Rows(NamedTuple):
    """Some rows of a batch. They are copied only when `tensors` is read, which saves memory."""

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
        """Return at most ``most`` rows, cut into unlike halves, into mixed halves and, if possible, into three parts.

        The rows depend on ``number``. They differ most in padding or masks, recognised as the smallest or largest value
        of a tensor. The three parts are a mixed half and the rest of each unlike half.
        """
        order = np.argsort(self._filled(), kind="stable")
        unlike, mixed = self._cut(most, number, order, False), self._cut(most, number, order, True)
        rest = [self._replace(places=tuple(p for p in mixed[2].places if p in half.places)) for half in unlike[1:]]
        return unlike, mixed, (*mixed[:2], *rest) if all(part.size for part in rest) else None

    def micro_batches(self, parts: int) -> "Cut":
        """Return those of so many equal micro batches that differ most, up to four; none if there are no equal ones."""
        size = self.size // parts
        if parts == 1 or size == 1 or self.size % parts:
            return ()
        order = np.argsort(self._filled().reshape(parts, size).mean(1), kind="stable").tolist()
        return tuple(self.take(range(i * size, (i + 1) * size)) for i in (*order[:2], *order[2:][-2:]))

    def _filled(self) -> Array:
        return sum((_filled(*pair, self.size) for pair in zip(self.sources, self.axes)), np.zeros(self.size))

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
        """Return these rows followed by others, or None if their shapes do not match."""
        if self.sources is other.sources:
            return self._replace(places=self.places + other.places)
        try:
            sources = tuple(map(_joined, self.tensors, other.tensors, self.axes))
        except ValueError:  # Lengths on other axes differ.
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
    """Return, per row, the share of the tensor's smallest value minus the share of its largest value."""
    if axis is None:
        return np.zeros(size)
    rows = np.moveaxis(as_array(tensor), axis, 0).reshape(size, -1)
    rows = rows[:, :: rows.shape[1] // _COLUMNS + 1]
    found: Array = (rows == rows.min()).mean(1) - (rows == rows.max()).mean(1) if rows.size else np.zeros(size)
    return found


def _joined(a: Tensor, b: Tensor, axis: int | None) -> Tensor:
    return a if axis is None else Tensor(np.concatenate([as_array(a), as_array(b)], axis), a.dtype)


class Loss(NamedTuple):
    """The loss of some rows: a mean and its number of rows, or a sum and the weight that the network returns."""

    value: float
    weight: float


class Split(NamedTuple):
    """The losses of some rows and of their parts. If ``weighted``, the loss returns its own weight."""

    whole: Loss
    parts: tuple[Loss, ...]
    weighted: bool
    tolerance: float  # The relative difference that rounding explains.

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self.whole, *self.parts

    def larger_first(self) -> tuple[int, int]:
        """Return the indices of two parts, the larger loss first, since an empty part may have a loss of 0."""
        return (0, 1) if abs(self.parts[0].value) >= abs(self.parts[1].value) else (1, 0)

    def relative(self, difference: float) -> float:
        """Return a difference relative to the largest of the losses."""
        return _relative(difference, [loss.value for loss in self.losses])

    def misses_mean(self) -> float:
        """Return the relative difference of the whole from the mean of the parts, weighted by their rows."""
        mean = sum(part.value * part.weight for part in self.parts) / sum(part.weight for part in self.parts)
        return self.relative(self.whole.value - mean)

    def misses_sum(self) -> float:
        return self.relative(self.whole.value - sum(part.value for part in self.parts))

    def misses_weight(self) -> float:
        """Return the relative difference of the whole's weight from the sum of the parts' weights."""
        difference = self.whole.weight - sum(part.weight for part in self.parts)
        return _relative(difference, [loss.weight for loss in self.losses])

    def shows(self, times: float = 1.0) -> bool:
        """Return whether the means of the parts differ by the tolerance. Equal means may hide a wrong weight."""
        means = [each.value / each.weight if self.weighted and each.weight else each.value for each in self.parts]
        return _relative(max(means) - min(means), means) > times * self.tolerance


def _relative(difference: float, numbers: Sequence[float]) -> float:
    scale = max(map(abs, numbers))
    return abs(difference) / scale if scale else 0.0


class Finding(NamedTuple):
    """The reason why a loss cannot be split into micro batches, and the size of the error."""

    miss: float
    text: str
    of_loss: bool = True

    @staticmethod
    def not_measured(reason: str) -> "Finding":
        """Return the finding for a loss of which nothing is known."""
        return Finding(math.nan, _NOT_MEASURED.format(reason=reason.rstrip(".")))


def judge(split: Split, parts: int, twice: tuple[float, float, float] | None = None) -> Finding | None:
    """Return the reason why the parts do not add up to the loss of all rows; None if they do.

    ``parts`` is the number of micro batches of a batch. If known, ``twice`` has the losses of the larger part with each
    row twice, alone and followed by the other part, and the difference of halves of the other part from it.
    """
    if not math.isfinite(split.whole.value):
        return None
    empty = [part.value for part in split.parts if not math.isfinite(part.value)]
    if empty:
        return _finding(math.inf, _EMPTY, value=empty[0])
    return _judge_pairs(split) if split.weighted else _judge_mean(split, parts, twice)


def _judge_mean(split: Split, parts: int, twice: tuple[float, float, float] | None) -> Finding | None:
    tolerance = split.tolerance
    miss = split.misses_mean()
    if miss <= tolerance:
        return None
    larger, other = (split.parts[place].value for place in split.larger_first())
    rounding = tolerance * abs(larger)
    # An empty part hides the difference between a sum and a mean.
    doubles = min(abs(loss.value) for loss in split.losses) > rounding
    if twice is not None:
        doubles = abs(twice[0] - 2 * larger) <= tolerance * abs(twice[0])
    if doubles and split.misses_sum() <= tolerance:
        gives = f"{parts} micro batches give {1 / parts:.3g}" if parts > 1 else "a window of 4 batches gives 0.25"
        return _finding(miss, _SUM, share=f"{gives} of the gradient")
    # The whole can be a weighted mean of its parts if it lies between them.
    whole, low, high = split.whole.value, *sorted((larger, other))
    is_mean = low - rounding <= whole <= high + rounding
    if twice is not None and is_mean:
        # The share of the larger part in a weighted mean, and the loss that the mean would have with this part twice.
        share = (whole - other) / (larger - other)
        predicted = (2 * share * larger + (1 - share) * other) / (1 + share)
        # A part that does not count is empty, unless its halves differ: then the loss is a maximum and not a mean.
        is_largest = abs(whole - larger) <= rounding < twice[2]
        is_mean = max(abs(twice[0] - larger), abs(twice[1] - predicted)) <= 4 * rounding and not is_largest
    return _finding(miss, _WEIGHTS if is_mean else _ROWS)


def _judge_pairs(split: Split) -> Finding | None:
    weight, miss = split.misses_weight(), split.misses_sum()
    if weight > split.tolerance:
        return _finding(weight, _CONSTANT, _PAIR_BEGIN)
    if miss <= split.tolerance:
        return None
    is_mean = split.whole.weight > 0 and split.misses_mean() <= split.tolerance
    return _finding(miss, _MEAN if is_mean else _OTHER, _PAIR_BEGIN)


def other_gradient(miss: float, shows: bool, weighted: bool) -> Finding:
    """Return the finding for a loss whose parts add up, but not their gradients. Equal parts hide their weights."""
    reason, begin = (_PAIR_GRADIENT, _PAIR_BEGIN) if weighted else (_GRADIENT if shows else _WEIGHTS, _BEGIN)
    return _finding(miss, reason, begin)._replace(of_loss=False)


def other_attributes(miss: float, names: str) -> Finding:
    """Return the finding for a loss that changes with the attributes ``names``, which the first micro batch sets."""
    return _finding(miss, _ATTRIBUTES, _ATTRIBUTES_BEGIN, names=names)._replace(of_loss=False)


def _finding(miss: float, reason: str, begin: str = _BEGIN, **values: object) -> Finding:
    percent = f"{100 * miss:.2g} %" if miss < 0.1 else f"{100 * miss:.0f} %"
    return Finding(miss, f"{begin} {reason.format(miss=percent, pair=_PAIR, **values)}")
