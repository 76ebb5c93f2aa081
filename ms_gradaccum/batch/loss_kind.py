"""Losses of MindSpore that are no means over rows, recognised by how their cells were built."""

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

_INTS = (*mstype.int_type, *mstype.uint_type)
_MODULES = ("mindspore.nn.loss.", "mindspore.mint.nn")
# Functions of means: a root, a ratio.
_WHOLE_BATCH = {"RMSELoss", "DiceLoss", "MultiClassDiceLoss"}
_BY_ROWS = "but a window counts its micro batches by their rows."
_PAIR = "return (loss_sum, weight) with weighted=True."
# The rows of the first micro batch of this process whose loss `divides_by_first_rows`.
_first_rows: list[int] = []


def loss_warning(network: nn.Cell, batches: Iterable[Sequence[Tensor]]) -> str:
    """Return what to warn of where the loss in ``network`` is no mean over rows; an empty string if nothing shows it.

    In ``batches``, the tensors of some batches or micro batches, labels that are ignored are looked for.
    """
    begin = -1 if type(network) is nn.WithLossCell else 0  # Its last input has the labels.
    tensors = [tensor for batch in batches for tensor in batch[begin:]]
    for _, cell in network.cells_and_names():
        kind = next((each.__name__ for each in type(cell).__mro__ if each.__module__.startswith(_MODULES)), "")
        reason = _reason(kind, cell, tensors) if kind else ""
        if reason:
            return f"For 'GradAccumulation', the loss should be a mean over rows, but {kind} {reason}"
    return ""


def _reason(kind: str, cell: Any, tensors: list[Tensor]) -> str:
    if kind in _WHOLE_BATCH:
        return (
            "is a function of the whole batch, which no sum over micro batches gives. Train it as a GradCacheLoss, or "
            "do not split a batch of it."
        )
    if _adds_up(cell):
        return f"adds up its rows with reduction='sum', {_BY_ROWS} Give it reduction='mean', or {_PAIR}"
    ignored = getattr(cell, "ignore_index", None)
    if ignored is None or getattr(cell, "reduction", None) != "mean":
        return ""
    if getattr(cell, "weight", None) is not None:
        return f"divides by the sum of the class weights of its labels, {_BY_ROWS} Rather {_PAIR}"
    if any(tensor.dtype in _INTS and np.any(tensor.asnumpy() == ignored) for tensor in tensors):
        got = f"divides by the number of labels other than ignore_index={ignored}"
        return f"{got}, {_BY_ROWS} Use TokenMeanLoss, or {_PAIR}"
    return ""


def _adds_up(cell: Any) -> bool:
    """Whether a loss was built with reduction='sum', wherever its class keeps that."""
    if any(getattr(place, "reduction", None) == "sum" for place in (cell, *vars(cell).values())):
        return True
    # Those of LossBase keep two flags.
    return not hasattr(cell, "reduction") and bool(getattr(cell, "reduce", False) and not cell.average)


def divides_by_first_rows(network: nn.Cell) -> bool:
    """Return whether ``network``, run op by op, has a gradient that MindSpore divides by the rows of another batch.

    That of the mean of binary cross-entropies of logits it divides on CPU by the elements that its first batch had in
    this process, whichever network that was of. The loss itself is right.
    """
    return ms.get_context("device_target") == "CPU" and any(
        any(
            kind.__name__ == "BCEWithLogitsLoss" and kind.__module__.startswith(_MODULES) for kind in type(cell).__mro__
        )
        and _is_mean(cell)
        for _, cell in network.cells_and_names()
    )


def _is_mean(cell: Any) -> bool:
    # The one of mint keeps it in its operator, as a number.
    operator = getattr(cell, "bce_with_logits", None)
    return (cell if operator is None else operator).reduction in ("mean", 1)


def rows_warning(rows: Iterable[int]) -> str:
    """Return what to warn of if such a network has micro batches of these rows; an empty string if all are alike."""
    for number in rows:
        if not _first_rows:
            _first_rows.append(number)
        if number != _first_rows[0]:
            return (
                f"For 'GradAccumulation', BCEWithLogitsLoss must have as many rows in each micro batch in PYNATIVE "
                f"mode on CPU, where MindSpore divides its gradient by those of its first one in the process, but got "
                f"{number} after {_first_rows[0]}. Give it reduction='none' and take the mean of what it returns, or "
                f"compile=True."
            )
    return ""
