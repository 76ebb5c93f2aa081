"""The warnings of the first window that makes no update, because its gradient is not finite or too large."""

import math
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import warn
from ms_gradaccum.gradients.buffer import GradientBuffer

# The squares of larger numbers are Inf in float32, added up over a large gradient.
_MAX_WITH_FINITE_SQUARES = 1e12
_MANY_EMPTY = 4


class SkippedWindows:
    """Warn once of a skipped window, unless the search for a loss scale explains it."""

    has_warned = False
    has_warned_of_norm = False

    def __init__(self, owner: str, buffers: Sequence[GradientBuffer]) -> None:
        self.owner = owner
        self.buffers = buffers

    def note(self, weight: Tensor, loss_scale: Tensor, searches: bool) -> None:
        """Look at a window that is skipped, before its sums are cleared."""
        if self.has_warned:
            return
        scale = float(loss_scale.asnumpy())
        is_scaled = scale > 1.0
        if searches and is_scaled:
            return
        self.has_warned = True
        why = self._why_not_finite(float(weight.asnumpy()), scale)
        remedy = (
            "lower the loss scale or the learning rate" if is_scaled else "lower the learning rate"
        )
        warn(
            f"For '{self.owner}', the gradient of a window must have a finite norm, but got {why}: "
            f"this window makes no update, and later windows like it are skipped without a "
            f"warning. Look for NaN in the data and the loss, or {remedy}."
        )

    def note_high_norm(self, norm: Tensor, skip_above: object) -> None:
        """Look at a window whose norm is above the limit."""
        if self.has_warned_of_norm:
            return
        self.has_warned_of_norm = True
        warn(
            f"For '{self.owner}', the norm {float(norm.asnumpy()):.3g} of a window is above "
            f"skip_above={skip_above}: this window makes no update, and later windows like it are "
            f"skipped without a warning. Their number is in `skipped_updates`."
        )

    def note_empty(self, weight: float, in_a_row: int) -> None:
        """Look at a window that makes no update because of its weight."""
        if in_a_row == _MANY_EMPTY:
            warn(
                f"For '{self.owner}', the weight of a window must be positive, but got {weight:g} "
                f"in the last of {_MANY_EMPTY} windows in a row without an update. Look for labels "
                f"that are all ignored, or a network that returns another weight than its number "
                f"of tokens."
            )

    def _why_not_finite(self, weight: float, scale: float) -> str:
        """Return the cause of a non-finite norm. A sum is ``weight`` times ``scale`` times the gradient."""
        if weight == 0.0:
            return "an Inf or a NaN in each micro batch"
        if not math.isfinite(weight):
            return f"the weight {weight}"
        largest = 0.0
        largest_name = ""
        for buffer in self.buffers:
            for name, total in zip(buffer.names, buffer.sums):
                size = float(np.abs(total.asnumpy()).max(initial=0.0))
                if not math.isfinite(size):
                    return f"an Inf or a NaN for the parameter {name!r}"
                if size >= largest:
                    largest = size
                    largest_name = name
        if largest < _MAX_WITH_FINITE_SQUARES:
            return "an Inf or a NaN in another rank's shard"
        size = largest / weight / scale
        return (
            f"up to {size:.3g} for the parameter {largest_name!r}, whose squares are Inf in float32"
        )
