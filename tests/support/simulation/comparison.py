"""The difference of a partitioned training from that of the whole batch."""

from typing import NamedTuple

import numpy as np

from ms_gradaccum.backend.tensors import Array

Values = dict[str, Array]


class Difference(NamedTuple):
    """The largest difference of a parameter's element, the largest change by training, and the parameter's name."""

    difference: float
    moved: float
    farthest: str


def compare(values: Values, whole: Values, start: Values) -> Difference:
    """Compare the parameters after a training with those of the whole batch."""
    apart = {name: largest(values[name] - value) for name, value in whole.items()}
    farthest = max(apart, key=lambda name: np.inf if np.isnan(apart[name]) else apart[name])
    return Difference(apart[farthest], max(largest(value - start[name]) for name, value in whole.items()), farthest)


def largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))
