"""What MindSpore's kernels on CPU need: the threads that run a graph, and the instructions of convolutions.

With AVX-512 MindSpore's oneDNN takes its reference code for convolutions.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.kernels import MOST_CORES, cores

# On machines of few cores MindSpore has the calling thread run graphs of at most so many kernels.
_MOST_KERNELS = 100
# The condition takes 0.3 to 1 ms: multiplications per core that take as long as it saves, 3 ms of all cores.
_LEAST_WORK = 16e6
# To add the gradient of a weight takes as long as to compute it for so many rows.
_ROWS_OF_ADDING = 16


def thread_pool_is_faster(parameters: Sequence[Parameter], positions: int, jit_config: Mapping[str, Any]) -> bool:
    """Return whether MindSpore's threads are faster for a micro step, measured in docs/performance.md.

    The calling thread has no part in a kernel of several threads, but looks all the time whether it has ended: one
    thread more than there are cores. The results are the same, bit for bit.

    Args:
        parameters: What is trained.
        positions: How often a weight is used: for each row, or for each pixel if there are convolutions.
        jit_config: How the graph is compiled.
    """
    if _openmp_spins(jit_config):
        return False
    # Each parameter has a kernel for its gradient and one for its sum.
    is_small = 2 * len(parameters) <= _MOST_KERNELS
    if not is_small or ms.get_context("device_target") != "CPU" or not 1 < cores() <= MOST_CORES:
        return False
    elements = sum(int(parameter.size) for parameter in parameters)
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


# It limits the instructions that oneDNN uses.
VARIABLE = "ONEDNN_MAX_CPU_ISA"
REMEDY = f"Set the environment variable {VARIABLE}=AVX2 before the program starts."
# oneDNN 2, of earlier versions of MindSpore, has code for them.
_LIBRARY = Path(ms.__file__).parent / "lib" / "libdnnl.so.3"
# The bit of dnnl_cpu_isa_avx512_core, which those above it have, too.
_AVX512 = 0x20
_CELLS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose)


def warn_of_slow_convolutions(owner: str, network: nn.Cell) -> None:
    """Warn of slow convolutions if the network has any and the user has set nothing."""
    if VARIABLE in os.environ or ms.get_context("device_target") != "CPU":
        return
    if are_slow() and has_convolutions(network):
        warn(f"For '{owner}', MindSpore's convolutions take 10 to 40 times as long as they could on this CPU. {REMEDY}")


def has_convolutions(network: nn.Cell) -> bool:
    """Return whether there are any."""
    return any(isinstance(cell, _CELLS) for _, cell in network.cells_and_names())


def pixels(tensors: Sequence[Tensor]) -> int:
    """Return how many there are in the largest of some images of shape `(rows, channels, ...)`."""
    return max((tensor.size // max(tensor.shape[1], 1) for tensor in tensors if tensor.ndim > 2), default=0)


def are_slow() -> bool:
    """Return whether oneDNN may use AVX-512."""
    if platform.machine() != "x86_64" or not _LIBRARY.exists():
        return False
    # Measuring would be no answer: on a busy machine convolutions by the reference code are within what others take.
    return bool(CDLL(str(_LIBRARY)).dnnl_get_effective_cpu_isa() & _AVX512)
