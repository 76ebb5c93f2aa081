"""Losses and gradients as vectors: what two runs differ by, next to the rounding that is to be expected."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Of the norm of the whole gradient: what a parameter's own norm counts as, if it is less. The gradient of a bias in
# front of a normalisation, say, is 0 but for rounding that comes from larger numbers.
_SMALLEST_SHARE = 0.01


class Run(NamedTuple):
    """The results of one window or one batch."""

    loss: float
    weight: float  # What the loss is the mean over: rows, or what the network counts.
    grads: list[Any]  # The mean gradient, one array per trainable parameter.
    state: dict[int, Any]  # The parameters that the run itself has changed, by their place in the network.


def combine(factors: Sequence[float], runs: Sequence[Run]) -> Run:
    """Return the sum of the runs, each times its factor, in float64."""
    loss = math.fsum(factor * run.loss for factor, run in zip(factors, runs))
    grads = []
    for parts in zip(*(run.grads for run in runs)):
        total = np.zeros(parts[0].shape)
        for factor, part in zip(factors, parts):
            total += factor * part.astype(np.float64)
        grads.append(total)
    return Run(loss, math.fsum(run.weight for run in runs), grads, {})


def mean(runs: Sequence[Run]) -> Run:
    """Return the mean of the runs, each by its weight."""
    total = math.fsum(run.weight for run in runs)
    return combine([run.weight / total for run in runs], runs)


def norm(run: Run) -> float:
    """Return the L2 norm of the gradient as one vector."""
    return math.hypot(*(norm_of(grad) for grad in run.grads))


def norm_of(array: Any) -> float:
    """Return the L2 norm of an array."""
    return float(np.linalg.norm(array.astype(np.float64).reshape(-1)))


def is_finite(run: Run) -> bool:
    """True if the loss and the gradient have no Inf or NaN."""
    return math.isfinite(run.loss) and all(np.isfinite(grad).all() for grad in run.grads)


def scales(*runs: Run) -> list[float]:
    """Return, per parameter, what a difference of these runs is to be compared with.

    That is the largest norm that its gradient has in any of the runs, but at least 1% of the norm of the largest
    whole gradient.
    """
    floor = _SMALLEST_SHARE * max(norm(run) for run in runs)
    return [max(floor, *(norm_of(grad) for grad in grads)) for grads in zip(*(run.grads for run in runs))]


def misfits(a: Run, b: Run, *others: Run) -> list[float]:
    """Return, per parameter, the norm of the difference of two gradients next to its scale.

    ``others`` are runs that ``a`` or ``b`` was computed from.
    """
    pairs = zip(a.grads, b.grads, scales(a, b, *others))
    with np.errstate(invalid="ignore"):  # The difference of two Infs is a NaN, which differs.
        return [relative(norm_of(grad - other_grad), scale) for grad, other_grad, scale in pairs]


def misfit(a: Run, b: Run, *others: Run) -> float:
    """Return the largest difference of two runs next to its scale, over all parameters and the loss."""
    loss_scale = max(abs(run.loss) for run in (a, b, *others))
    return max(*misfits(a, b, *others), relative(abs(a.loss - b.loss), loss_scale))


def relative(difference: float, scale: float) -> float:
    """Return ``difference / scale``, where nothing of nothing is nothing."""
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf
