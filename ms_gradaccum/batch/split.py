"""Split a batch of inputs into micro batches."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import COOTensor, CSRTensor, Tensor

from ms_gradaccum._checks import argument_error, typed
from ms_gradaccum.backend.device import is_host
from ms_gradaccum.batch.structure import DictOf, PythonValue, SequenceOf, Structure, TensorPlace

# One axis for all inputs, or a nest with one entry per input (None: the input is not split).
BatchAxis = int | None | Sequence["BatchAxis"] | Mapping[str, "BatchAxis"]

# The shape of an input; None for one that is not a tensor.
Shape = tuple[int, ...] | None
# The begin and end row of each micro batch.
Bounds = tuple[tuple[int, int], ...]

_OWNER = "GradAccumulation"
_PAD = "Pad a list that has an item for each row to one tensor. "
TENSORS = (Tensor, np.ndarray)
cuts_on_host = functools.cache(is_host)  # It is asked for each tensor of each batch.
_AXIS_RULE = "an int, None or one of these per input"
_AXIS_REMEDY = (
    "Give {} one axis for all inputs, or one entry per input, None for one that is not split."
)


class MicroBatch(NamedTuple):
    """The tensors of one forward and backward pass, and their number of rows."""

    rows: int
    tensors: tuple[Tensor, ...]


class SplitBatch(NamedTuple):
    """The micro batches of a batch, and the structure in which the network expects their tensors."""

    structure: SequenceOf
    micro_batches: list[MicroBatch]
    # With `micro_tokens`: the places of the rows of each micro batch, and the length of a row with its padding.
    places: Sequence[Sequence[int]] = ()
    longest: int = 0


class Item(NamedTuple):
    """An input or a part of one, with its entry of ``batch_axis``: for a tensor the axis of its rows, or None."""

    place: str
    value: Any
    axis: Any
    in_list: bool = False
    shape: Shape = None


class Flattened:
    """A tuple of nested inputs as tensors and a structure."""

    def __init__(self, inputs: tuple[object, ...], batch_axis: BatchAxis = None) -> None:
        # All tensors, and then all containers, before their items, and Python values.
        self.leaves: list[Item] = []
        self.others: list[Item] = []
        self.structure = self._sequence(Item("input", inputs, batch_axis))
        self.tensors: tuple[Tensor, ...] = tuple(map(attrgetter("value"), self.leaves))
        self.axes: tuple[int | None, ...] = tuple(map(attrgetter("axis"), self.leaves))

    def _add(self, item: Item) -> Structure:
        value = item.value
        if isinstance(value, TENSORS):
            return self._tensor(item)
        _refuse(value, item.place)
        if isinstance(value, (tuple, list)):
            return self._sequence(item)
        self.others.append(item)
        if isinstance(value, dict):
            axes = _named_axes(item.axis, value)
            items = [
                Item(f"{item.place}[{key!r}]", value[key], axes[key], item.in_list) for key in value
            ]
            return DictOf(tuple(value), tuple(map(self._add, items)))
        return PythonValue(value)

    def _tensor(self, item: Item) -> TensorPlace:
        if isinstance(item.axis, (tuple, dict)):
            raise ValueError(_axis_error(f"an int or None for {item.place}", item.axis))
        tensor = item.value
        if isinstance(tensor, np.ndarray):
            tensor = _as_tensor(tensor)
        shape = tuple(tensor.shape)
        axis = item.axis if shape else None
        self.leaves.append(Item(item.place, tensor, axis, item.in_list, shape))
        return TensorPlace(len(self.leaves) - 1, len(shape), str(tensor.dtype))

    def _sequence(self, item: Item) -> SequenceOf:
        self.others.append(item)
        axes = spread_axes(item.axis, item.value)
        in_list = item.in_list or isinstance(item.value, list)
        items = [
            Item(f"{item.place}[{i}]", each, axes[i], in_list) for i, each in enumerate(item.value)
        ]
        return SequenceOf(type(item.value), tuple(map(self._add, items)))


def _refuse(value: object, place: str) -> None:
    if isinstance(value, (CSRTensor, COOTensor)):
        raise TypeError(
            f"For '{_OWNER}', the inputs must be dense tensors, but got a {type(value).__name__} "
            f"in {place}. Convert it with to_dense(), and give batch_axis None for it if it is not "
            f"split; or give its parts one by one."
        )
    if hasattr(value, "_fields") and ms.get_context("mode") == ms.GRAPH_MODE:
        raise TypeError(
            f"For '{_OWNER}', the inputs in GRAPH mode must be tensors, tuples, lists and dicts, "
            f"but got {type(value).__name__}, a NamedTuple, which loses its gradient there. Give a "
            f"tuple or a dict."
        )


def _as_tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    try:
        return Tensor(array)
    except TypeError:
        raise TypeError(
            f"For '{_OWNER}', the inputs must be tensors or numeric arrays, but got an array of "
            f"{array.dtype}. Convert it, for example with astype(np.float32)."
        ) from None


def check_axes(name: str, axis: object) -> BatchAxis:
    """Return the argument ``name`` if it is an int, None, or a nest of tuples, lists and dicts of these."""
    try:
        return _checked_axis(name, axis)
    except RecursionError:
        raise ValueError(_axis_error(_AXIS_RULE, "a list that contains itself", name)) from None


def check_batch_axis(axis: object) -> BatchAxis:
    return check_axes("batch_axis", axis)


def _checked_axis(name: str, axis: object) -> BatchAxis:
    if isinstance(axis, (tuple, list)):
        return tuple(_checked_axis(name, item) for item in axis)
    if isinstance(axis, dict):
        return {key: _checked_axis(name, item) for key, item in axis.items()}
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise TypeError(_axis_error(_AXIS_RULE, typed(axis), name))
    return axis


def _axis_error(rule: str, got: object, name: str = "batch_axis") -> str:
    return argument_error(_OWNER, name, rule, got, _AXIS_REMEDY.format(name))


def flattened(inputs: tuple[object, ...], batch_axis: BatchAxis) -> tuple[Flattened, int]:
    """Return the inputs of a batch as tensors and a structure, and its number of rows."""
    try:
        batch = Flattened(inputs, batch_axis)
    except RecursionError:
        raise ValueError(
            f"For '{_OWNER}', the inputs must be tensors, or tuples, lists and dicts of them, but "
            f"got a container that contains itself. Remove that item."
        ) from None
    if not batch.leaves:
        got = ", ".join(type(item).__name__ for item in inputs) or "nothing"
        remedy = (
            "Give tensors, or tuples, lists and dicts of them; dict(batch) converts an object like "
            "a dict."
        )
        raise ValueError(
            f"For '{_OWNER}', at least one input must be a tensor, but got {got}. {remedy}"
        )
    return batch, count_rows(batch.leaves)


def split_batch(inputs: tuple[object, ...], micro_size: int, batch_axis: BatchAxis) -> SplitBatch:
    """Split ``inputs`` into at most ``micro_size`` micro batches whose numbers of rows differ by at most one."""
    batch, rows = flattened(inputs, batch_axis)
    bounds = split_rows(rows, micro_size)
    if len(bounds) == 1:
        return SplitBatch(batch.structure, [MicroBatch(rows, batch.tensors)])
    refuse_mappings(batch.others)
    columns = []
    for leaf in batch.leaves:
        columns.append(cut(leaf.value, leaf.axis, bounds))
    micro_batches = []
    for (begin, end), tensors in zip(bounds, zip(*columns)):
        micro_batches.append(MicroBatch(end - begin, tensors))
    return SplitBatch(batch.structure, micro_batches)


def split_rows(rows: int, micro_size: int) -> list[tuple[int, int]]:
    """Return the begin and end row of each micro batch; larger micro batches come first."""
    count = min(micro_size, rows)
    size, larger = divmod(rows, count)
    bounds = []
    begin = 0
    for i in range(count):
        end = begin + size + (i < larger)
        bounds.append((begin, end))
        begin = end
    return bounds


def split_shapes(
    shapes: tuple[Shape, ...], batch_axis: BatchAxis, micro_size: int
) -> tuple[tuple[Any, ...], Bounds]:
    """Return the axis of each input (None: not split) and the rows of each micro batch, for inputs of these shapes."""
    items = []
    for i, axis in enumerate(spread_axes(batch_axis, shapes)):
        shape = shapes[i]
        items.append(Item(f"input[{i}]", None, axis if shape else None, False, shape))
    axes = tuple(item.axis for item in items)
    return axes, tuple(split_rows(count_rows(items), micro_size))


def count_rows(items: Iterable[Item]) -> int:
    """Return the number of rows that all tensors among the items have on their batch axes."""
    rows = -1
    place = ""
    for item in items:
        if item.shape is None or item.axis is None:
            continue
        if not -len(item.shape) <= item.axis < len(item.shape):
            got = f"{item.axis} for {item.place} of shape {item.shape}"
            raise ValueError(_axis_error("an axis that each split input has", got))
        length = item.shape[item.axis]
        if rows not in (-1, length):
            remedy = _AXIS_REMEDY.format("batch_axis")
            if item.in_list:
                remedy = _PAD + remedy
            raise ValueError(
                f"For '{_OWNER}', the inputs must have the same number of rows on their batch "
                f"axis, but got {rows} in {place} and {length} in {item.place}. {remedy}"
            )
        rows = length
        place = item.place
    if rows == -1:
        raise ValueError(
            f"For '{_OWNER}', at least one input must be a tensor with a batch axis, but got none. "
            f"{_AXIS_REMEDY.format('batch_axis')}"
        )
    if rows == 0:
        raise ValueError(
            f"For '{_OWNER}', a batch must have at least one row, but got 0 in {place}. Skip it "
            f"or, if other processes have rows, call join() in its place."
        )
    return rows


def refuse_mappings(items: Iterable[Item]) -> None:
    """Raise for a mapping that is not a dict: its tensors would go whole into each micro batch."""
    for item in items:
        if not isinstance(item.value, Mapping) or isinstance(item.value, dict):
            continue
        inside = Flattened((dict(item.value),))
        refuse_mappings(inside.others)
        if inside.leaves:
            raise TypeError(
                f"For '{_OWNER}', the inputs must be tensors, tuples, lists and dicts, but got a "
                f"{type(item.value).__name__}, which would not be split. Give dict(batch)."
            )


def spread_axes(axis: BatchAxis, items: Sequence[object]) -> tuple[BatchAxis, ...]:
    """Return one entry of ``batch_axis`` per item of a tuple or list."""
    if not isinstance(axis, tuple):
        return (axis,) * len(items)
    # Default values of the network's arguments may follow the caller's inputs; they have nothing to split.
    missing = len(items) - len(axis)
    if missing < 0 or any(
        isinstance(item, (*TENSORS, tuple, list, dict)) for item in items[len(axis) :]
    ):
        got = f"{len(axis)} {'entry' if len(axis) == 1 else 'entries'}"
        raise ValueError(
            _axis_error(f"a sequence with an entry for each of the {len(items)} inputs", got)
        )
    return axis + (None,) * missing


def _named_axes(axis: BatchAxis, items: dict[str, object]) -> Mapping[str, BatchAxis]:
    if not isinstance(axis, dict):
        return dict.fromkeys(items, axis)
    if axis.keys() != items.keys():
        raise ValueError(_axis_error(f"a dict with the names {list(items)}", list(axis)))
    return axis


def cut(tensor: Tensor, axis: int | None, bounds: list[tuple[int, int]]) -> list[Tensor]:
    """Return the slices of a tensor between these rows, or the whole tensor for each if it is not split."""
    if axis is None:
        return [tensor] * len(bounds)
    before = (slice(None),) * (axis % tensor.ndim)
    # On CPU the data is in host memory already: a NumPy view is cheap, and on axis 0 nothing is copied.
    is_on_host = cuts_on_host()
    if is_on_host:
        tensor = tensor.asnumpy()
    parts = []
    for begin, end in bounds:
        part = tensor[(*before, slice(begin, end))]
        if is_on_host:
            part = Tensor.from_numpy(np.ascontiguousarray(part))
        parts.append(part)
    return parts
