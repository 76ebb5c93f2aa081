"""Micro batches of a limited number of tokens: rows of similar lengths together, their common padding cut off."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_gradaccum._checks import check_int, typed
from ms_gradaccum.batch.split import (
    BatchAxis,
    Flattened,
    Item,
    MicroBatch,
    SplitBatch,
    check_axes,
    cuts_on_host,
    flattened,
    refuse_mappings,
    spread_axes,
)

_OWNER = "GradAccumulation"
_LEAST_LENGTH = 8
_LEAST_SHARE = 16  # No row is cut to less than this part of the padded length.
# The number of shapes with a graph of their own, before one graph for all further shapes takes over.
MOST_GRAPHS = 32
# What tells the lengths of the rows: the place of an input, or a function of all inputs.
Lengths: TypeAlias = int | str | Callable[..., object]
_LENGTHS_REMEDY = (
    "Give the name or the place of a mask or of the numbers of tokens among the inputs, or a "
    "function of all inputs that returns them."
)
_Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


class RowGroup(NamedTuple):
    """The places of the rows of a micro batch in their batch, and the length that they are cut to."""

    places: list[int]
    length: int


class TokenLimit(NamedTuple):
    """The most tokens of a micro batch, padding included, and where the lengths of its rows are."""

    micro_tokens: int
    lengths: int | Callable[..., Any] | None
    length_axis: BatchAxis

    @staticmethod
    def checked(
        micro_tokens: object, lengths: Any, length_axis: object, names: Sequence[str]
    ) -> "TokenLimit":
        """Return the limit for a network with arguments of these names."""
        limit = check_int(
            _OWNER, "micro_tokens", micro_tokens, "It is the most tokens of a micro batch."
        )
        if isinstance(lengths, str):
            if lengths not in names:
                raise ValueError(
                    f"For '{_OWNER}', the argument 'lengths' must be the name of an input, one of "
                    f"{', '.join(names)}, but got {lengths!r}. {_LENGTHS_REMEDY}"
                )
            lengths = names.index(lengths)
        is_place = isinstance(lengths, int) and not isinstance(lengths, bool)
        if not (lengths is None or is_place or callable(lengths)):
            raise TypeError(
                f"For '{_OWNER}', the argument 'lengths' must be a str, an int, a function or "
                f"None, but got {typed(lengths)}. {_LENGTHS_REMEDY}"
            )
        return TokenLimit(limit, lengths, check_axes("length_axis", length_axis))

    def split(self, inputs: tuple[object, ...], batch_axis: BatchAxis) -> SplitBatch:
        """Split ``inputs`` into micro batches of at most so many tokens, those of the longest rows first."""
        batch, rows = flattened(inputs, batch_axis)
        axes, longest = self._axes_of(inputs, batch)
        groups = group_rows(
            self._lengths_of(inputs, batch_axis, rows, longest), longest, self.micro_tokens
        )
        if len(groups) == 1 and groups[0].length == longest:
            return SplitBatch(
                batch.structure, [MicroBatch(rows, batch.tensors)], [range(rows)], longest
            )
        refuse_mappings(batch.others)
        columns = [
            cut_groups(leaf.value, leaf.axis, axis, groups)
            for leaf, axis in zip(batch.leaves, axes)
        ]
        micro_batches = []
        for group, tensors in zip(groups, zip(*columns)):
            micro_batches.append(MicroBatch(len(group.places), tensors))
        return SplitBatch(
            batch.structure, micro_batches, [group.places for group in groups], longest
        )

    def _axes_of(
        self, inputs: tuple[object, ...], batch: Flattened
    ) -> tuple[list[int | None], int]:
        """Return the axis of the tokens of each tensor, None for one without, and their common length."""
        longest = -1
        first = ""
        axes: list[int | None] = []
        for leaf, row in zip(self._leaves_of(inputs), batch.leaves):
            shape = leaf.shape or ()
            axis = leaf.axis
            if axis is None or not -len(shape) <= axis < len(shape):
                axes.append(None)
                continue
            axis %= len(shape)
            if row.axis is not None and axis == row.axis % len(shape):
                raise ValueError(
                    f"For '{_OWNER}', the argument 'length_axis' must be another axis than that of "
                    f"the rows, but got {axis} for {leaf.place} of shape {shape}. It is the axis "
                    f"of the tokens of a row."
                )
            if longest not in (-1, shape[axis]):
                raise ValueError(
                    f"For '{_OWNER}', the inputs must have the same length on their length axis, "
                    f"but got {longest} in {first} and {shape[axis]} in {leaf.place}. Give "
                    f"length_axis one entry per input, None for what has no tokens."
                )
            longest = shape[axis]
            first = leaf.place
            axes.append(axis)
        if longest < 1:
            raise ValueError(
                f"For '{_OWNER}', at least one input must have an axis of tokens for micro_tokens, "
                f"but got none. Give length_axis, or micro_size in place of micro_tokens."
            )
        return axes, longest

    def _leaves_of(self, inputs: tuple[object, ...]) -> list[Item]:
        """Return the tensors of a batch with their entries of `length_axis`."""
        try:
            return Flattened(inputs, self.length_axis).leaves
        except ValueError as error:
            error.args = (str(error).replace("batch_axis", "length_axis"),)
            raise

    def _lengths_of(
        self, inputs: tuple[Any, ...], batch_axis: BatchAxis, rows: int, longest: int
    ) -> _Array:
        """Return the number of tokens of each row, from its first to its last one, and at least 1."""
        if self.lengths is None:
            return np.full(rows, longest)
        if callable(self.lengths):
            found = self.lengths(*inputs)
            row_axis: BatchAxis = 0
        else:
            if not -len(inputs) <= self.lengths < len(inputs):
                raise ValueError(
                    f"For '{_OWNER}', the argument 'lengths' must be the place of one of the "
                    f"{len(inputs)} inputs, but got {self.lengths}. {_LENGTHS_REMEDY}"
                )
            found = inputs[self.lengths]
            row_axis = spread_axes(batch_axis, inputs)[self.lengths]
        array = np.asarray(found.asnumpy() if isinstance(found, Tensor) else found)
        if row_axis in (1, -1):
            array = array.T
        if array.shape == (rows, longest):
            array = ((array != 0) * np.arange(1, longest + 1)).max(1)
        is_valid = (
            array.shape == (rows,)
            and array.dtype.kind in "iu"
            and 0 <= array.min()
            and array.max() <= longest
        )
        if not is_valid:
            got = f"{array.dtype} of shape {array.shape}"
            if array.shape == (rows,):
                got = f"{array.dtype} from {array.min()} to {array.max()}"
            raise ValueError(
                f"For '{_OWNER}', 'lengths' must give a mask of shape {(rows, longest)} or one "
                f"number from 0 to {longest} for each of the {rows} rows, but got {got}. "
                f"{_LENGTHS_REMEDY}"
            )
        return np.maximum(array, 1)


def group_rows(lengths: _Array, longest: int, limit: int) -> list[RowGroup]:
    """Return groups of rows, the longest first, whose number times the length that they are cut to is in the limit.

    Groups have few shapes, whatever the lengths, because each is a graph of its own: lengths are powers of two, and so
    are the numbers of the rows that fill no group. The shortest rows have one length.
    """
    least = max(_LEAST_LENGTH, longest // _LEAST_SHARE)
    order = np.argsort(-lengths, kind="stable").tolist()
    if lengths[order[0]] > limit:
        raise ValueError(
            f"For '{_OWNER}', the argument 'micro_tokens' must be at least the length of each row, "
            f"but got {limit} for a row of {lengths[order[0]]} tokens. Give a larger number, or "
            f"truncate the rows of the dataset."
        )
    groups = []
    while order:
        power_of_two = 1 << (int(lengths[order[0]]) - 1).bit_length()
        length = min(max(power_of_two, least), longest, limit)
        size = limit // length
        if len(order) < size:
            size = 1 << (len(order).bit_length() - 1)
        groups.append(RowGroup(order[:size], length))
        order = order[size:]
    return groups


def cut_groups(
    tensor: Tensor, row_axis: int | None, length_axis: int | None, groups: list[RowGroup]
) -> list[Tensor]:
    """Return the part of a tensor for each group. What has neither rows nor tokens goes whole into each."""
    if row_axis is None and length_axis is None:
        return [tensor] * len(groups)
    is_on_host = cuts_on_host()
    source = tensor.asnumpy() if is_on_host else tensor
    before = (slice(None),) * (length_axis or 0)
    parts = []
    for places, length in groups:
        part = source
        if length_axis is not None:
            part = part[(*before, slice(length))]
        if is_on_host:
            if row_axis is not None:
                part = part.take(places, row_axis)
            part = Tensor.from_numpy(np.ascontiguousarray(part))
        elif row_axis is not None:
            part = ops.gather(part, Tensor(places, ms.int32), row_axis)
        parts.append(part)
    return parts
