"""The warning of a loop that clips each batch, where an update should clip the mean of its window."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.arrays import Array, as_array

# The norms of so many first gradients are compared, which are copied from the device for that.
_NUM_NORMS = 4
# Gradients of fewer or of more elements are not looked at: a few signs have one norm, too.
_MIN_SIZE = 8
_MAX_SIZE = 2**24
# Norms that differ by less, as a share, are the same.
_SAME = 1e-6
# Gradients whose sums differ by more, as a share of the norm, are different ones.
_OTHER = 1e-3


class GradientWatch:
    """Warn if three of the first gradients differ but have one norm, which means that each batch was clipped."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        # The norm and the sum of each gradient so far.
        self.seen: list[tuple[float, float]] = []

    def note(self, grads: Sequence[Tensor]) -> None:
        """Look at the gradients of a batch."""
        size = sum(each.size for each in grads)
        if len(self.seen) == _NUM_NORMS or not _MIN_SIZE <= size <= _MAX_SIZE:
            return
        arrays = [as_array(each) for each in grads]
        norm = math.sqrt(sum(_sum_of_squares(each) for each in arrays))
        total = float(sum(each.sum(dtype=np.float64) for each in arrays))
        totals = [total]
        for other_norm, other_total in self.seen:
            if abs(norm - other_norm) <= _SAME * norm:
                totals.append(other_total)
        self.seen.append((norm, total))
        are_different = all(
            abs(a - b) > _OTHER * norm for a, b in itertools.combinations(totals, 2)
        )
        if len(totals) == 3 and are_different and not _are_signs(arrays):
            warn(
                f"For '{self.owner}', the gradients of a batch must not be clipped, but got "
                f"different ones of the same norm {norm:.3g}. Give the Accumulator "
                f"clip=ClipByGlobalNorm({norm:.3g}) in place of your own clip: it clips their mean."
            )


def _sum_of_squares(array: Array) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _are_signs(arrays: Sequence[Array]) -> bool:
    """Return whether all elements but zeros have one size: such gradients have one norm, too."""
    sizes = np.abs(np.concatenate([each[each != 0.0] for each in arrays]))
    return bool(sizes.max() == sizes.min())
