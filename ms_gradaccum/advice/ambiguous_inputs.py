"""Inputs whose shapes do not show whether they are a batch: warnings at the first batch, and hints in errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn

from ms_gradaccum._checks import counted, warn
from ms_gradaccum.batch.split import TENSORS, BatchAxis, Flattened, Item, count_rows, spread_axes

_OWNER = "GradAccumulation"
# Tensors with more columns are not searched for numbers of rows.
_MANY_COLUMNS = 64
# Types of per-row values in a list. Tensors in a list are checked separately.
_VALUES = (int, float, str, np.generic, list, tuple, dict)
# The beginnings of errors that need no hint about the split.
_SAY_IT_THEMSELVES = (f"For '{_OWNER}'", "For 'TokenMeanLoss'")


def ambiguous_inputs(inputs: tuple[object, ...], batch_axis: BatchAxis, with_integers: bool = False) -> list[int]:
    """Return the indices of the inputs that are split although they may not be a batch."""
    # These are tensors with the length of the batch on another axis, too (a mask, for example), vectors of
    # floating-point numbers, and, ``with_integers``, integer tensors, which may contain indices of rows.
    num_tensors = 0
    found = []
    for i, (item, axis) in enumerate(zip(inputs, spread_axes(batch_axis, inputs))):
        if not isinstance(item, TENSORS) or not isinstance(axis, int) or not item.shape:
            continue
        num_tensors += 1
        others = list(item.shape)
        rows = others.pop(axis)
        dtype = str(item.dtype).lower()
        is_vector_of_floats = not others and "float" in dtype
        may_be_indices = with_integers and "int" in dtype
        if rows > 1 and (rows in others or is_vector_of_floats or may_be_indices):
            found.append(i)
    if num_tensors == 1:  # A single tensor must be the batch.
        return []
    return found


def explain_split(accumulation: nn.Cell, error: Exception, inputs: tuple[object, ...]) -> bool:
    """Add to an error of a micro batch, after its first line, a hint about the split. Return True if it needs no more.

    The hint says which inputs may be split by mistake.
    """
    text = error.args[0] if error.args else None
    if not accumulation.splits or not isinstance(text, str) or text.startswith(_SAY_IT_THEMSELVES):
        return True
    hint = _hint_of_split(accumulation, f"{text}{error.__cause__}", inputs)
    if hint:
        first, _, rest = text.partition("\n")
        error.args = ("\n".join((first, hint, rest)).rstrip("\n"), *error.args[1:])
    return bool(hint)


def _hint_of_split(accumulation: nn.Cell, error: str, inputs: tuple[object, ...]) -> str:
    """Return a hint for an error in a micro batch: the inputs that may be split by mistake. "" if there are none."""
    for i, item in enumerate(inputs):
        column = _column_of_row_numbers(item)
        if column is not None:
            return (
                f"For '{_OWNER}', column {column} of {accumulation.name_of_input(i)} seems to number the rows of the "
                f"batch, but a micro batch has only some of them. Number them in the loss cell, or use "
                f"GradCacheLoss(network, loss, labels=1), whose loss sees the whole batch."
            )
    found = ambiguous_inputs(inputs, accumulation.batch_axis, "indices" in error)
    if not found:
        return ""
    return (
        f"For '{_OWNER}', an input may be split by mistake, because its shape does not show whether it is a batch: "
        f"{_described(accumulation, found, inputs)}. Give None in batch_axis for an input that is not a batch."
    )


def _column_of_row_numbers(item: Any) -> int | None:
    """Return the index on the last axis at which each row has its own number, or padding; None if there is none."""
    if not isinstance(item, TENSORS) or len(item.shape) < 2:
        return None
    if item.shape[0] <= 1 or item.shape[-1] > _MANY_COLUMNS:
        return None
    array = item if isinstance(item, np.ndarray) else item.asnumpy()
    rows = len(array)
    numbers = np.arange(rows).reshape(-1, *[1] * (array.ndim - 2))
    for column in range(array.shape[-1]):
        values = array[..., column]
        is_own = values == numbers
        is_own_or_padding = is_own | np.isin(values, (0, -1))
        has_own = is_own.reshape(rows, -1).any(1)
        if is_own_or_padding.all() and has_own.all():
            return column
    return None


def _described(accumulation: nn.Cell, places: Sequence[int], inputs: tuple[Any, ...]) -> str:
    return ", ".join(f"{accumulation.name_of_input(i)} of shape {tuple(inputs[i].shape)}" for i in places)


def warn_of_split(accumulation: nn.Cell, inputs: tuple[Any, ...], parts: int, is_first: bool) -> bool:
    """Warn of inputs that may be split or not split by mistake. Return True if later batches need no check."""
    if not accumulation.splits:
        return False
    batch_axis = accumulation.batch_axis
    batch = Flattened(inputs, batch_axis)
    rows = count_rows(batch.leaves)
    if is_first and rows < (accumulation.micro_size or 1):
        warn(
            f"For '{_OWNER}', micro_size={accumulation.micro_size} exceeds the {counted(rows, 'row')} of the batch, "
            f"which is split into single rows. It is the number of micro batches, not of rows: for an update of "
            f"several small batches give accumulation_steps."
        )
    if parts == 1:
        return False
    for item in batch.others[1:]:
        got = _each_row(item, rows, isinstance(batch_axis, int))
        if got:
            is_whole = item.place.count("[") == 1
            name = accumulation.name_of_input(int(item.place[6:-1])) if is_whole else item.place
            warn(
                f"For '{_OWNER}', the input {name} seems to have an item per row, but got {got}. Make it a tensor, "
                f"or give batch_axis an entry per input, None for this one."
            )
            return True
    if isinstance(batch_axis, int):
        _warn_of_equal_lengths(accumulation, inputs, parts, rows)
    return True


def _each_row(item: Item, rows: int, is_default: bool) -> str:
    """Describe the treatment of an input whose items may belong to one row each; "" for all others."""
    values = item.value
    if item.axis is None or not isinstance(values, (list, tuple)) or len(values) != rows:
        return ""
    have_rows = [_has_rows(each) for each in values]
    # A tuple of Python values mostly belongs to the whole batch.
    is_list = isinstance(values, list)
    kinds = (*TENSORS, *_VALUES) if is_list else TENSORS
    if not any(have_rows) and all(isinstance(each, kinds) for each in values):
        return f"a {type(values).__name__} of {rows}, which goes whole into each micro batch"
    if is_list and is_default and all(have_rows):
        return f"a list of {rows}, each of which is cut along its axis {item.axis}"
    return ""


def _has_rows(value: object) -> bool:
    """Return whether a part of an input contains a tensor with axes."""
    return any(axis is not None for axis in Flattened((value,), 0).axes)


def _warn_of_equal_lengths(accumulation: nn.Cell, inputs: tuple[Any, ...], parts: int, rows: int) -> None:
    """Warn of a tensor that is as long as the batch on two axes, so that the wrong one may be split."""
    batch_axis = accumulation.batch_axis
    square = []
    for i, each in enumerate(inputs):
        if isinstance(each, TENSORS) and each.shape[:2] == (rows, rows):
            square.append(i)
    time_major = _time_major_cell(accumulation.network)
    if time_major and batch_axis == 0 and square:
        warn(
            f"For '{_OWNER}', the rows must be on axis 1 for {time_major} with batch_first=False, but got "
            f"{_described(accumulation, square, inputs)} cut along axis 0. Give batch_axis an entry per input, or "
            f"build it with batch_first=True."
        )
        return
    # Single rows of a square matrix fit any shape.
    doubtful = [i for i in ambiguous_inputs(inputs, batch_axis) if inputs[i].shape == (rows, rows)]
    if parts == rows and doubtful:
        warn(
            f"For '{_OWNER}', inputs that are cut into single rows must be batches, but got perhaps a mask in "
            f"{_described(accumulation, doubtful, inputs)}. Give batch_axis an entry per input, None for a mask."
        )


def _time_major_cell(network: nn.Cell) -> str:
    """Return the name of a cell that has its rows on axis 1, or an empty string."""
    for _, cell in network.cells_and_names():
        if getattr(cell, "batch_first", None) is False:
            return str(cell.cls_name)
    return ""
