"""Conversion of ``scale_sense``, the loss scale of MindSpore's training steps, to `mixed_precision`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from mindspore import Tensor, amp, nn

from ms_gradaccum._checks import check_float
from ms_gradaccum.gradients.mixed_precision import PrecisionChoice

ScaleSense: TypeAlias = float | Tensor | nn.Cell | amp.LossScaler | amp.LossScaleManager
_REMEDY = "For example 1024, or nn.DynamicLossScaleUpdateCell(65536, 2, 1000)."


@contextmanager
def scale_taken_out() -> Iterator[None]:
    """Suppress the warning about an optimizer that does not divide by the scale: these projects' steps divide."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*the optimizer's loss_scale is 1.0 beside FixedLossScaleManager"
        )
        yield


def precision_of(
    owner: str, scale_sense: ScaleSense, drop_overflow_update: bool = True
) -> PrecisionChoice:
    """Return a `mixed_precision` with the loss scale of ``scale_sense`` and no conversion."""
    number: Any = scale_sense
    # The type must match exactly: a subclass may have another rule.
    if (
        isinstance(number, (amp.LossScaler, amp.LossScaleManager))
        or type(number) is nn.DynamicLossScaleUpdateCell
    ):
        return number
    if type(number) is nn.FixedLossScaleUpdateCell:
        number = number.get_loss_scale()
    number = check_float(owner, "scale_sense", number, _REMEDY)
    return amp.FixedLossScaleManager(number, drop_overflow_update)
