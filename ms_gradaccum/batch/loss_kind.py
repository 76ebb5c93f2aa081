"""Losses of MindSpore that are no means over rows, recognised by how their cells were built."""

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.network_code import NetworkCode, codes_of, names_in

_INTS = (*mstype.int_type, *mstype.uint_type)
_MODULES = ("mindspore.nn.loss.", "mindspore.mint.nn")
# Functions of means: a root, a ratio.
_WHOLE_BATCH = {"RMSELoss", "DiceLoss", "MultiClassDiceLoss"}
_BEGIN = "For 'GradAccumulation', the loss should be a mean over rows, but"
# Functions whose mean is one over labels, and the label that they ignore.
_OF_LABELS = {"cross_entropy", "nll_loss"}
_IGNORED = -100
_BY_ROWS = "but a window counts its micro batches by their rows."
_PAIR = "return (loss_sum, weight) with weighted=True."
# The rows of the first micro batch of this process whose loss `divides_by_first_rows`.
_first_rows: list[int] = []


class LossKind:
    """Whether the loss in a network is a mean over rows, as far as its cells and their code show it.

    Args:
        network: The network with its loss.
        should_be_mean: Whether it should be one. Otherwise nothing is looked for.

    Attributes:
        reason: What to warn of; an empty string if no cell shows that it is none.
        ignoring: What divides by the labels other than one that is ignored, by its name, and which one that is.
        is_settled: Whether no batch can show more.
    """

    def __init__(self, network: nn.Cell, should_be_mean: bool = True) -> None:
        self.begin = -1 if type(network) is nn.WithLossCell else 0  # Its last input has the labels.
        self.reason = ""
        self.ignoring: list[tuple[str, int]] = []
        self.is_settled = not should_be_mean
        if self.is_settled:
            return
        for _, cell in network.cells_and_names():
            kind = next((each.__name__ for each in type(cell).__mro__ if each.__module__.startswith(_MODULES)), "")
            kind = type(cell).__name__ if kind == "LossBase" else kind
            reason = _reason(kind, cell) if kind else ""
            if reason and not self.reason:
                self.reason = f"{_BEGIN} {kind} {reason}"
            if kind and _is_mean(cell) and getattr(cell, "ignore_index", None) is not None:
                self.ignoring.append((kind, cell.ignore_index))
        self.ignoring += [(function, _IGNORED) for function in _functions_of_labels(network)]
        self.is_settled = not (self.reason or self.ignoring)

    def look_at(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Warn, once, of a loss that is none, or is none with the labels among the tensors of these batches."""
        message = self.reason or self._ignored_in(batches)
        if message:
            self.is_settled = True
            warn(message)

    def _ignored_in(self, batches: Iterable[Sequence[Tensor]]) -> str:
        tensors = [tensor for batch in batches for tensor in batch[self.begin :] if tensor.dtype in _INTS]
        for kind, ignored in self.ignoring:
            if any(np.any(tensor.asnumpy() == ignored) for tensor in tensors):
                got = f"divides by the number of labels other than ignore_index={ignored}"
                return f"{_BEGIN} {kind} {got}, {_BY_ROWS} Use TokenMeanLoss, or {_PAIR}"
        return ""


def _reason(kind: str, cell: Any) -> str:
    if kind in _WHOLE_BATCH:
        return (
            "is a function of the whole batch, which no sum over micro batches gives. Train it as a GradCacheLoss, or "
            "do not split a batch of it."
        )
    if _adds_up(cell):
        return f"adds up its rows with reduction='sum', {_BY_ROWS} Give it reduction='mean', or {_PAIR}"
    takes_labels = hasattr(cell, "ignore_index") or bool(names_in(codes_of(type(cell))) & _OF_LABELS)
    if takes_labels and _is_mean(cell) and getattr(cell, "weight", None) is not None:
        return f"divides by the sum of the class weights of its labels, {_BY_ROWS} Rather {_PAIR}"
    return ""


def _is_mean(cell: Any) -> bool:
    return bool(getattr(cell, "reduction", None) == "mean")


def _functions_of_labels(network: nn.Cell) -> list[str]:
    """Return the functions of MindSpore that the code of ``network`` calls and that are means over labels.

    With reduction='none' it takes the mean itself, mostly that of all rows.
    """
    names = NetworkCode(network).names
    return [] if "none" in names else sorted(names & _OF_LABELS)


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
    if ms.get_context("device_target") != "CPU":
        return False
    names = NetworkCode(network).names
    by_function = "binary_cross_entropy_with_logits" in names and "none" not in names
    return by_function or any(map(_is_mean_of_logits, (cell for _, cell in network.cells_and_names())))


def _is_mean_of_logits(cell: Any) -> bool:
    names = [kind.__name__ for kind in type(cell).__mro__ if kind.__module__.startswith(_MODULES)]
    # The one of mint keeps it in its operator, as a number.
    operator = getattr(cell, "bce_with_logits", None)
    return "BCEWithLogitsLoss" in names and (cell if operator is None else operator).reduction in ("mean", 1)


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
