"""Split a batch of inputs into micro batches."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import COOTensor, CSRTensor, Tensor

from ms_gradaccum._checks import argument_error, typed
from ms_gradaccum.batch.nested_inputs import flatten, has_tensors

# One axis for all inputs, or a nest with one entry per input (None: the input is not split).
BatchAxis = int | None | Sequence["BatchAxis"] | Mapping[str, "BatchAxis"]

# The shape of an input; None for one that is not a tensor.
Shape = tuple[int, ...] | None

_OWNER = "GradAccumulation"
_PAD = "Pad a list that has an item for each row to one tensor. "
TENSORS = (Tensor, np.ndarray)
_AXIS_REMEDY = "Give batch_axis one axis for all inputs, or one entry per input, None for one that is not split."


class MicroBatch(NamedTuple):
    """The tensors of one forward and backward pass, and their number of rows."""

    rows: int
    tensors: tuple[Tensor, ...]


class SplitBatch(NamedTuple):
    """The micro batches of a batch, and the structure in which the network expects their tensors."""

    structure: Hashable
    micro_batches: list[MicroBatch]


class _Item(NamedTuple):
    place: str
    value: Any
    axis: BatchAxis
    in_list: bool


class _Leaf(NamedTuple):
    place: str
    shape: tuple[int, ...]
    axis: Any
    in_list: bool = False


def check_batch_axis(axis: object) -> BatchAxis:
    """Return ``axis`` if it is an int, None, or a nest of tuples, lists and dicts of these."""
    try:
        return _checked_axis(axis)
    except RecursionError:
        rule = "an int, None or one of these per input"
        raise ValueError(argument_error(_OWNER, "batch_axis", rule, "a nest without an end", _AXIS_REMEDY)) from None


def _checked_axis(axis: object) -> BatchAxis:
    if isinstance(axis, (tuple, list)):
        return tuple(_checked_axis(item) for item in axis)
    if isinstance(axis, dict):
        return {key: _checked_axis(item) for key, item in axis.items()}
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        got = typed(axis)
        raise TypeError(
            argument_error(_OWNER, "batch_axis", "an int, None or one of these per input", got, _AXIS_REMEDY)
        )
    return axis


def split_batch(inputs: tuple[object, ...], micro_size: int, batch_axis: BatchAxis) -> SplitBatch:
    """Split ``inputs`` into at most ``micro_size`` micro batches whose numbers of rows differ by at most one.

    Tensors and NumPy arrays inside tuples, lists and dicts are split, too. Tensors without axes and all other values
    go whole into each micro batch.
    """
    tensors: list[Tensor] = []
    try:
        structure = flatten(inputs, tensors)
    except RecursionError:
        raise ValueError(
            f"For '{_OWNER}', the inputs must be tensors, or tuples, lists and dicts of them, but got a nest without "
            f"an end. Take out what holds itself."
        ) from None
    if not tensors:
        got = ", ".join(type(item).__name__ for item in inputs) or "nothing"
        remedy = "Give tensors, or tuples, lists and dicts of them; dict(batch) makes a dict of what is like one."
        raise ValueError(f"For '{_OWNER}', at least one input must be a tensor, but got {got}. {remedy}")
    items = list(walk(inputs, batch_axis))
    leaves = leaves_of(items)
    bounds = split_rows(leaves, micro_size)
    if len(bounds) == 1:
        return SplitBatch(structure, [MicroBatch(bounds[0][1], tuple(tensors))])
    _refuse_mappings(items)
    columns = [cut(tensor, leaf.axis, bounds) for tensor, leaf in zip(tensors, leaves)]
    parts = [MicroBatch(end - begin, part) for (begin, end), part in zip(bounds, zip(*columns))]
    return SplitBatch(structure, parts)


def leaf_axes(inputs: tuple[object, ...], batch_axis: BatchAxis) -> list[int | None]:
    """Return the batch axis of each tensor in ``inputs``, in the order of `flatten`."""
    return [leaf.axis for leaf in leaves_of(walk(inputs, batch_axis))]


def split_rows(leaves: Iterable[_Leaf], micro_size: int) -> list[tuple[int, int]]:
    """Return the begin and end row of each micro batch; larger micro batches come first."""
    rows = count_rows(leaves)
    count = min(micro_size, rows)
    size, larger = divmod(rows, count)
    ends = [i * size + min(i, larger) for i in range(1, count + 1)]
    return list(zip([0, *ends[:-1]], ends))


def split_shapes(
    shapes: tuple[Shape, ...], batch_axis: BatchAxis, micro_size: int
) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...]]:
    """Return the axis of each input (None: not split) and the rows of each micro batch, for inputs of these shapes."""
    axes = spread_axes(batch_axis, shapes)
    axes = tuple(axis if shape else None for axis, shape in zip(axes, shapes))
    leaves = [_Leaf(f"input[{i}]", shape, axis) for i, (shape, axis) in enumerate(zip(shapes, axes)) if shape]
    return axes, tuple(split_rows(leaves, micro_size))


def count_rows(leaves: Iterable[_Leaf]) -> int:
    place, rows = "", -1
    for leaf in leaves:
        if leaf.axis is None:
            continue
        if not -len(leaf.shape) <= leaf.axis < len(leaf.shape):
            got = f"{leaf.axis} for {leaf.place} of shape {leaf.shape}"
            raise ValueError(
                argument_error(_OWNER, "batch_axis", "an axis of each input that is split", got, _AXIS_REMEDY)
            )
        length = leaf.shape[leaf.axis]
        if rows not in (-1, length):
            raise ValueError(
                f"For '{_OWNER}', the inputs must have the same number of rows on their batch axis, but got "
                f"{rows} in {place} and {length} in {leaf.place}. {_PAD if leaf.in_list else ''}{_AXIS_REMEDY}"
            )
        place, rows = leaf.place, length
    if rows == -1:
        raise ValueError(
            f"For '{_OWNER}', at least one input must be a tensor with a batch axis, but got none. {_AXIS_REMEDY}"
        )
    if rows == 0:
        raise ValueError(
            f"For '{_OWNER}', a batch must have at least one row, but got 0 in {place}. Skip empty batches."
        )
    return rows


def walk(item: object, axis: BatchAxis, place: str = "input", in_list: bool = False) -> Iterator[_Item]:
    """Yield the inputs and all items inside them, containers before their items, in the order of `flatten`."""
    yield _Item(place, item, axis, in_list)
    in_list = in_list or isinstance(item, list)
    if isinstance(item, (tuple, list)):
        for i, child_axis in enumerate(spread_axes(axis, item)):
            yield from walk(item[i], child_axis, f"{place}[{i}]", in_list)
    elif isinstance(item, dict):
        axes = _named_axes(axis, item)
        for key, child in item.items():
            yield from walk(child, axes[key], f"{place}[{key!r}]", in_list)


def leaves_of(items: Iterable[_Item]) -> list[_Leaf]:
    """Return the place, shape and batch axis of each tensor in the inputs."""
    leaves = []
    for place, item, axis, in_list in items:
        if isinstance(item, (CSRTensor, COOTensor)):
            remedy = (
                "Give it dense, as of to_dense(), with None in batch_axis if it is not split, or its parts one by one."
            )
            raise TypeError(
                f"For '{_OWNER}', the inputs must be dense tensors, but got a {type(item).__name__} in {place}. "
                f"{remedy}"
            )
        if isinstance(item, TENSORS):
            if isinstance(axis, (tuple, dict)):
                raise ValueError(
                    argument_error(_OWNER, "batch_axis", f"an int or None for {place}", axis, _AXIS_REMEDY)
                )
            leaves.append(_Leaf(place, tuple(item.shape), axis if item.shape else None, in_list))
    return leaves


def _refuse_mappings(items: Iterable[_Item]) -> None:
    """Raise for a mapping that is not a dict: its tensors would go whole into each micro batch."""
    for _, item, *_ in items:
        if isinstance(item, Mapping) and not isinstance(item, dict) and has_tensors(item):
            got, remedy = f"a {type(item).__name__}, whose tensors nobody would split", "Give dict(batch)."
            raise TypeError(
                f"For '{_OWNER}', the inputs must be tensors, tuples, lists and dicts, but got {got}. {remedy}"
            )


def spread_axes(axis: BatchAxis, items: Sequence[object]) -> tuple[BatchAxis, ...]:
    """Return one entry of ``batch_axis`` per item of a tuple or list."""
    if not isinstance(axis, tuple):
        return (axis,) * len(items)
    # Default values of the network's arguments may follow the caller's inputs; they contain nothing to split.
    missing = len(items) - len(axis)
    if missing < 0 or any(isinstance(item, (Tensor, np.ndarray, tuple, list, dict)) for item in items[len(axis) :]):
        rule = f"as long as the {len(items)} inputs"
        raise ValueError(
            argument_error(
                _OWNER, "batch_axis", rule, f"{len(axis)} {'entry' if len(axis) == 1 else 'entries'}", _AXIS_REMEDY
            )
        )
    return axis + (None,) * missing


def _named_axes(axis: BatchAxis, items: dict[str, object]) -> Mapping[str, BatchAxis]:
    if not isinstance(axis, dict):
        return dict.fromkeys(items, axis)
    if axis.keys() != items.keys():
        rule = f"a dict with the names {list(items)}"
        raise ValueError(argument_error(_OWNER, "batch_axis", rule, list(axis), _AXIS_REMEDY))
    return axis


def cut(tensor: Tensor, axis: int | None, bounds: list[tuple[int, int]]) -> list[Tensor]:
    """Return the slices of a tensor between these rows, or the whole tensor for each if it is not split."""
    if axis is None:
        return [tensor] * len(bounds)
    before = (slice(None),) * (axis % tensor.ndim)
    parts = [(*before, slice(begin, end)) for begin, end in bounds]
    if ms.get_context("device_target") != "CPU":
        return [tensor[part] for part in parts]
    # The data is in host memory already: a NumPy view is cheap, and on axis 0 nothing is copied.
    array = tensor.asnumpy()
    return [Tensor.from_numpy(np.ascontiguousarray(array[part])) for part in parts]
