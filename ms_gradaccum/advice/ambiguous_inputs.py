"""Hints in the errors of micro batches: inputs whose shapes do not show whether they are a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn

from ms_gradaccum.batch.arguments import Args
from ms_gradaccum.batch.split import TENSORS, BatchAxis, spread_axes

_OWNER = "GradAccumulation"
# Tensors with more columns are not searched for numbers of rows.
_MANY_COLUMNS = 64
# The beginnings of errors that need no hint about the split.
_SAY_IT_THEMSELVES = (f"For '{_OWNER}'", "For 'TokenMeanLoss'")


def ambiguous_inputs(inputs: Args, batch_axis: BatchAxis, with_integers: bool = False) -> list[int]:
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


def explain_split(accumulation: nn.Cell, error: Exception, inputs: Args) -> bool:
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


def _hint_of_split(accumulation: nn.Cell, error: str, inputs: Args) -> str:
    """Return a hint for an error in a micro batch: the inputs that may be split by mistake. "" if there are none."""
    for i, item in enumerate(inputs):
        column = _column_of_row_numbers(item)
        if column is not None:
            return (
                f"For '{_OWNER}', column {column} of {accumulation.name_of_input(i)} seems to "
                f"number the rows of the batch, but a micro batch has only some of them. Number "
                f"them in the loss cell, or use GradCacheLoss(network, loss, labels=1), whose loss "
                f"sees the whole batch."
            )
    found = ambiguous_inputs(inputs, accumulation.batch_axis, "indices" in error)
    if not found:
        return ""
    return (
        f"For '{_OWNER}', an input may be split by mistake, because its shape does not show "
        f"whether it is a batch: {_described(accumulation, found, inputs)}. Give None in "
        f"batch_axis for an input that is not a batch."
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
    return ", ".join(
        f"{accumulation.name_of_input(i)} of shape {tuple(inputs[i].shape)}" for i in places
    )
