"""Losses and gradients as vectors: their differences, relative to the rounding that is to be expected."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ms_gradaccum.backend.tensors import Array

# The least scale of a parameter's gradient, relative to the whole gradient. The gradient of a bias before a
# normalisation, for example, is 0 except for the rounding of larger numbers.
_SMALLEST_SHARE = 0.01


class Run(NamedTuple):
    """The results of one window or one batch."""

    loss: float
    weight: float  # The number that the loss is a mean over: rows, or what the network counts.
    grads: list[Array]  # The mean gradient, one array per trainable parameter.
    state: dict[int, Array]  # The parameters that the run itself has changed, by their indices in the network.


def combine(factors: Sequence[float], runs: Sequence[Run]) -> Run:
    """Return the sum of the runs, each times its factor, in float64."""
    loss = math.fsum(factor * run.loss for factor, run in zip(factors, runs))
    parts = zip(*(run.grads for run in runs))
    grads = [sum(factor * grad.astype(np.float64) for factor, grad in zip(factors, each)) for each in parts]
    return Run(loss, math.fsum(run.weight for run in runs), grads, {})


def norm(run: Run) -> float:
    """Return the L2 norm of the gradient as one vector."""
    return math.hypot(*map(norm_of, run.grads))


def norm_of(array: Array) -> float:
    """Return the L2 norm of an array."""
    return float(np.linalg.norm(array.astype(np.float64).reshape(-1)))


def is_finite(run: Run) -> bool:
    """Return whether the loss and the gradient have no Inf or NaN."""
    return math.isfinite(run.loss) and all(np.isfinite(grad).all() for grad in run.grads)


def misfits(a: Run, b: Run, *others: Run) -> list[float]:
    """Return, per parameter, the norm of the difference of two gradients, divided by its scale.

    The scale is the largest norm of the gradient in any of the runs, but at least 1% of the norm of the largest whole
    gradient. ``others`` are runs that ``a`` or ``b`` was computed from.
    """
    runs = (a, b, *others)
    floor = _SMALLEST_SHARE * max(map(norm, runs))
    with np.errstate(invalid="ignore"):  # The difference of two Infs is a NaN, which differs.
        return [
            relative(norm_of(grads[0] - grads[1]), max(floor, *map(norm_of, grads)))
            for grads in zip(*(run.grads for run in runs))
        ]


def misfit(a: Run, b: Run, *others: Run) -> float:
    """Return the largest difference of two runs relative to its scale, over all parameters and the loss."""
    loss_scale = max(abs(run.loss) for run in (a, b, *others))
    return max(*misfits(a, b, *others), relative(abs(a.loss - b.loss), loss_scale))


def relative(difference: float, scale: float) -> float:
    """Return ``difference / scale``, and 0 for 0 / 0."""
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf
