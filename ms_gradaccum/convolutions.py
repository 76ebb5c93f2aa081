"""Convolutions on CPU, for which MindSpore's oneDNN takes its reference code where the processor has AVX-512."""

import os
import time
from collections.abc import Callable
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import warn

VARIABLE = "ONEDNN_MAX_CPU_ISA"
REMEDY = f"Set the environment variable {VARIABLE}=AVX2 before the program starts."
# A convolution takes 1 to 15 times as long as a matrix product of as much arithmetic, by the reference code 50 to 350.
SLOW = 30
_CELLS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose)


def warn_if_slow(owner: str, network: nn.Cell) -> None:
    """Warn of slow convolutions if the network has any, the user has set nothing, and they are measured to be slow."""
    if VARIABLE in os.environ or ms.get_context("device_target") != "CPU":
        return
    if any(isinstance(cell, _CELLS) for _, cell in network.cells_and_names()) and times_a_product() > SLOW:
        warn(f"For '{owner}', MindSpore's convolutions take 10 to 40 times as long as they could on this CPU. {REMEDY}")


@cache
def times_a_product() -> float:
    """Return how many times as long as a matrix product of as many multiplications a convolution takes."""
    images, filters = _ones(32, 16, 16, 16), _ones(16, 16, 3, 3)
    left, right = _ones(512, 16 * 9), _ones(16 * 9, 512)
    convolution = ops.Conv2D(16, 3, pad_mode="same")
    return _least_time(5, lambda: convolution(images, filters)) / _least_time(30, lambda: ops.matmul(left, right))


def _ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


def _least_time(runs: int, run: Callable[[], Tensor]) -> float:
    """Return the least of the seconds of some runs."""
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        run().asnumpy()
        times.append(time.perf_counter() - begun)
    return min(times)
