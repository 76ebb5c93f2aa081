"""Windows whose gradient has too large a norm, which make no update."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_float, check_int, typed
from ms_gradaccum.backend.arithmetic import as_dtype
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.gradients.buffer import zeros

_OWNER = "NormSpike"
NORMS = ("skip_above.norms", "skip_above.seen")  # The names of what a `NormSpike` remembers.


@dataclass(frozen=True)
class NormSpike:
    r"""A norm that is several standard deviations above the mean of the last norms, for the argument `skip_above`.

    A window is skipped if its norm is above :math:`mean + std \cdot deviation` of the last norms (the deviation with
    :math:`n - 1`). Its own norm is not among them, but becomes one of them afterwards, also if it was skipped: a level
    that lasts is soon the normal one. Nothing is skipped until there are half as many norms. Norms with an Inf or a NaN
    do not count. The rule and its numbers are those of OLMo-core's ``SkipStepOptimizer``, as in levanter and maxtext.

    Args:
        std (float): Number of standard deviations. Default: ``6.0``.
        windows (int): Number of windows whose norms count, at least 4. Default: ``128``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `std` is not positive and finite, or `windows` is less than 4.

    Examples:
        >>> from ms_gradaccum import NormSpike
        >>> print(NormSpike(std=4.0))
        NormSpike(std=4.0, windows=128)
    """

    std: float = 6.0
    windows: int = 128

    def __post_init__(self) -> None:
        std = check_float(_OWNER, "std", self.std, "The default is 6.0.")
        object.__setattr__(self, "std", std)
        check_int(_OWNER, "windows", self.windows, "The default is 128.", least=4)


SkipAbove = float | NormSpike | None  # The type of the argument `skip_above`.


class NoNormLimit(nn.Cell):
    """Placeholder used when windows of any norm make their update, and the interface of the other classes."""

    # The argument `skip_above`, which all ranks have in common.
    given: SkipAbove = None

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        # Runs `construct` from the host.
        self.run = Compiled(lambda: self, "skip_above", "the limit of the norm")

    def construct(self, norm: Tensor, updated: Tensor) -> Tensor:
        """Return whether a window makes its update, as part of a graph. Without this limit it is ``updated``."""
        return updated


class NormLimit(NoNormLimit):
    """Skip windows whose norm is above a fixed number."""

    def __init__(self, given: float | NormSpike) -> None:
        super().__init__()
        self.given = given

    def construct(self, norm: Tensor, updated: Tensor) -> Tensor:
        return _unless(norm > Tensor(self.given, ms.float32), norm, updated)


class NormSpikeLimit(NormLimit):
    """Skip windows whose norm is a `NormSpike`."""

    def __init__(self, given: NormSpike) -> None:
        super().__init__(given)
        self.std = given.std
        self.windows = given.windows
        # The last norms, each at the place of its number modulo their count, and the number of all so far.
        self.norms = zeros(NORMS[0], (given.windows,))
        self.seen = zeros(NORMS[1], (), ms.int32)
        self.places = Tensor(np.arange(given.windows), ms.int32)

    def construct(self, norm: Tensor, updated: Tensor) -> Tensor:
        norm = as_dtype(norm, ms.float32)
        norms = self.norms + 0.0
        seen = self.seen + 0
        count = ops.cast(ops.minimum(seen, self.windows), ms.float32)
        # Relative to the largest, since the squares of large norms are Inf.
        largest = ops.maximum(norms.max(), _TINY)
        relative = norms / largest
        mean = ops.sum(relative) / ops.maximum(count, 1.0)
        distances = ops.select(self.places < seen, relative - mean, ops.zeros_like(norms))
        deviation = ops.sqrt(ops.sum(distances * distances) / ops.maximum(count - 1.0, 1.0))
        # Equal norms differ by rounding.
        limit = mean + self.std * ops.maximum(deviation, _ROUNDING * mean)
        has_enough = count >= self.windows // 2
        decided = _unless(ops.logical_and(has_enough, norm / largest > limit), norm, updated)
        # A window with an overflow or without weight has no norm.
        counts = ops.logical_and(updated, ops.isfinite(norm))
        is_here = ops.logical_and(self.places == seen % self.windows, counts)
        done = ops.assign(
            self.norms, ops.select(is_here, ops.broadcast_to(norm, norms.shape), norms)
        )
        return ops.depend(decided, (done, ops.assign(self.seen, seen + ops.cast(counts, ms.int32))))


_TINY = Tensor(np.finfo(np.float32).tiny)
_ROUNDING = 1e-6


def _unless(is_above: Tensor, norm: Tensor, updated: Tensor) -> Tensor:
    """Return ``updated``, but False if a finite norm is above the limit. Others are not the limit's concern."""
    return ops.logical_and(updated, ops.logical_not(ops.logical_and(is_above, ops.isfinite(norm))))


def check_skip_above(owner: str, skip_above: SkipAbove) -> NoNormLimit:
    """Return the limit of the norm for an argument `skip_above`. It belongs to one network."""
    if skip_above is None:
        return NoNormLimit()
    if isinstance(skip_above, NormSpike):
        return NormSpikeLimit(skip_above)
    if isinstance(skip_above, bool) or not isinstance(skip_above, (int, float)):
        raise TypeError(
            f"For '{owner}', the argument 'skip_above' must be a norm, a NormSpike or None, but "
            f"got {typed(skip_above)}. For example skip_above=NormSpike()."
        )
    return NormLimit(check_float(owner, "skip_above", skip_above, "Typical norms are 1 to 100."))
