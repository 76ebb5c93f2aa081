"""Which graphs MindSpore's thread pool runs on CPU. Left to itself, MindSpore runs small graphs in the calling thread.

A calling thread that runs a graph does not help multi-threaded kernels: it spins until they end, as one thread more
than there are cores. The results are equal bit for bit. docs/performance.md has the measurements.
"""

import os
from collections.abc import Mapping, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_gradaccum.backend.device import cores, has_convolutions, is_host

_MOST_CORES = 4  # With more, the kernels have threads enough beside the one that spins.
_MOST_KERNELS = 100  # MindSpore itself runs larger graphs in the thread pool.
# The condition costs 0.3 to 1 ms. It is worth that from this many multiplications per core on (about 3 ms).
_LEAST_WORK = 16e6
_ROWS_OF_ADDING = 16  # Adding a weight's gradient takes as long as computing it for this many rows.


def thread_pool_is_faster(
    network: nn.Cell,
    parameters: Sequence[Parameter],
    rows: int,
    tensors: Sequence[object],
    jit_config: Mapping[str, object],
) -> bool:
    """Return whether MindSpore's thread pool runs a micro step with these inputs faster."""
    if not is_host() or not 1 < cores() <= _MOST_CORES:
        return False
    fuses = ms.get_context("enable_graph_kernel") or jit_config.get("jit_level") == "O1"
    if fuses and os.getenv("OMP_WAIT_POLICY", "").lower() != "passive":
        return False  # The OpenMP threads of fused kernels spin beside the thread pool.
    if 2 * len(parameters) > _MOST_KERNELS:  # One kernel for a gradient, one for its sum.
        return False
    uses_of_weight = _pixels(tensors) if has_convolutions(network) else rows
    elements = sum(int(parameter.size) for parameter in parameters)
    return elements * (uses_of_weight + _ROWS_OF_ADDING) >= _LEAST_WORK * cores()


def _pixels(tensors: Sequence[object]) -> int:
    """Return the number of pixels, over all rows, of the largest tensor of shape `(rows, channels, ...)`."""
    images = [each for each in tensors if isinstance(each, Tensor) and each.ndim > 2]
    return max((image.size // max(image.shape[1], 1) for image in images), default=0)


def in_thread_pool(number: Tensor) -> Tensor:
    """Return a non-negative number through a condition, because MindSpore's thread pool runs graphs with conditions."""
    if number < 0.0:
        number = number + 0.0
    return number
