"""Who runs a graph on CPU: the thread that calls it, or MindSpore's threads."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor

from ms_gradaccum.kernels import MOST_CORES, cores

# On machines of few cores MindSpore has the calling thread run graphs of at most so many kernels.
_MOST_KERNELS = 100
# The condition takes 0.3 to 1 ms: multiplications per core that take as long as it saves, 3 ms of all cores.
_LEAST_WORK = 16e6
# To add the gradient of a weight takes as long as to compute it for so many rows.
_ROWS_OF_ADDING = 16


def is_faster(weights: Sequence[Parameter], positions: int, jit_config: Mapping[str, Any]) -> bool:
    """Return whether MindSpore's threads are faster for a micro step, measured in docs/speed.md.

    The calling thread has no part in a kernel of several threads, but looks all the time whether it has ended: one
    thread more than there are cores. The results are the same, bit for bit.

    Args:
        weights: What is trained.
        positions: How often a weight is used: for each row, or for each pixel if there are convolutions.
        jit_config: How the graph is compiled.
    """
    if _openmp_spins(jit_config):
        return False
    # Each parameter has a kernel for its gradient and one for its sum.
    is_small = 2 * len(weights) <= _MOST_KERNELS
    if not is_small or ms.get_context("device_target") != "CPU" or not 1 < cores() <= MOST_CORES:
        return False
    elements = sum(int(weight.size) for weight in weights)
    return elements * (positions + _ROWS_OF_ADDING) >= _LEAST_WORK * cores()


def _openmp_spins(jit_config: Mapping[str, Any]) -> bool:
    """Return whether a third kind of threads, those of fused kernels, look for work between these."""
    fuses = ms.get_context("enable_graph_kernel") or jit_config.get("jit_level") == "O1"
    return fuses and os.getenv("OMP_WAIT_POLICY", "").lower() != "passive"


def with_condition(number: Tensor) -> Tensor:
    """Return a number that is not negative, after a condition, whose graph MindSpore's threads run."""
    if number < 0.0:
        number = number + 0.0
    return number
