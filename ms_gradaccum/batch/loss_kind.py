"""Losses of MindSpore that are no means over rows, recognised by how their cells were built."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.network_code import NetworkCode, is_a, unique
from ms_gradaccum.batch.loss_calls import UNKNOWN, LossCall, loss_calls

_INTS = (*mstype.int_type, *mstype.uint_type)
_MODULES = ("mindspore.nn.loss.", "mindspore.mint.nn")
# Functions of means: a root, a ratio.
_WHOLE_BATCH = {"RMSELoss", "DiceLoss", "MultiClassDiceLoss"}
_BEGIN = "For 'GradAccumulation', the loss should be a mean over rows, but"
_BY_ROWS = "but a window counts its micro batches by their rows."
_PAIR = "return (loss_sum, weight) with weighted=True."
_ADDS_UP = f"adds up its rows with reduction='sum', {_BY_ROWS} Give it reduction='mean', or {_PAIR}"
_BY_WEIGHTS = f"divides by the sum of the class weights of its labels, {_BY_ROWS} Rather {_PAIR}"


class LossKind:
    """Whether the loss in a network is a mean over rows, as far as its cells and their code show it.

    Args:
        network: The network with its loss.
        should_be_mean: Whether it should be one. Otherwise nothing is looked for.

    Attributes:
        reason: What to warn of; an empty string if no cell shows that it is none.
        ignoring: What leaves a label out of its mean, by its name, and which one that is; `UNKNOWN` for some.
        is_settled: Whether no batch can show more.
    """

    def __init__(self, network: nn.Cell, should_be_mean: bool = True) -> None:
        self.begin = -1 if type(network) is nn.WithLossCell else 0  # Its last input has the labels.
        self.reason = ""
        self.ignoring: list[tuple[str, Any]] = []
        self.is_settled = not should_be_mean
        if self.is_settled:
            return
        code = NetworkCode(network)
        ignoring: list[tuple[str, Any]] = []
        cells = [*code.cells.values(), *(each for each in code.reached if is_a(each, nn.Cell))]
        for cell in {id(cell): cell for cell in cells}.values():
            kind = next((each.__name__ for each in type(cell).__mro__ if each.__module__.startswith(_MODULES)), "")
            reason = _reason(kind, cell) if kind else ""
            kind = type(cell).__name__ if kind == "LossBase" else kind
            if reason and not self.reason:
                self.reason = f"{_BEGIN} {kind} {reason}"
            if kind and _is_mean(cell) and getattr(cell, "ignore_index", None) is not None:
                ignoring.append((kind, cell.ignore_index))
        for call in loss_calls(code):
            reason = _reason_of_call(call)
            if reason and not self.reason:
                self.reason = f"{_BEGIN} {call.name} {reason}"
            if call.ignored is not None:
                ignoring.append((call.name, call.ignored))
        self.ignoring = unique((kind, ignored if is_a(ignored, int) else UNKNOWN) for kind, ignored in ignoring)
        self.is_settled = not (self.reason or self.ignoring)

    def look_at(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Warn, once, of a loss that is none, or is none with the labels among the tensors of these batches."""
        message = self.reason or self._ignored_in(batches)
        if message:
            self.is_settled = True
            warn(message)

    def _ignored_in(self, batches: Iterable[Sequence[Tensor]]) -> str:
        integers = [[each.asnumpy() for each in batch[self.begin :] if each.dtype in _INTS] for batch in batches]
        for kind, ignored in self.ignoring:
            is_known = ignored is not UNKNOWN
            # Other integers may have a value from 0 on too: the labels come last.
            places = slice(-1, None) if is_known and ignored >= 0 else slice(None)
            labels = (array for arrays in integers for array in arrays[places])
            if any(np.any(array == ignored if is_known else array < 0) for array in labels):
                which = f"of ignore_index={ignored}" if is_known else "below 0"
                begin = f"{_BEGIN} {kind} leaves labels {which} out of its mean"
                return f"{begin}, {_BY_ROWS} Use TokenMeanLoss, or {_PAIR}"
        return ""


def _reason(kind: str, cell: Any) -> str:
    if kind in _WHOLE_BATCH:
        return (
            "is a function of the whole batch, which no sum over micro batches gives. Train it as a GradCacheLoss, or "
            "do not split a batch of it."
        )
    if _adds_up(cell):
        return _ADDS_UP
    if hasattr(cell, "ignore_index") and _is_mean(cell) and getattr(cell, "weight", None) is not None:
        return _BY_WEIGHTS
    return ""


def _reason_of_call(call: LossCall) -> str:
    if call.is_sum:
        return _ADDS_UP
    if call.weight is UNKNOWN:
        return f"may divide by class weights of its labels, {_BY_ROWS} Rather {_PAIR}"
    return "" if call.weight is None else _BY_WEIGHTS


def _is_mean(cell: Any) -> bool:
    return bool(getattr(cell, "reduction", None) == "mean")


def _adds_up(cell: Any) -> bool:
    """Whether a loss was built with reduction='sum', wherever its class keeps that."""
    held = [value for value in vars(cell).values() if issubclass(type(value), (nn.Cell, ops.Primitive))]
    if any(getattr(place, "reduction", None) == "sum" for place in (cell, *held)):
        return True
    # Those of LossBase keep two flags.
    return not hasattr(cell, "reduction") and bool(getattr(cell, "reduce", False) and not cell.average)
