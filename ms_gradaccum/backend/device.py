"""The device that cells are built for, and settings of MindSpore's CPU kernels: threads and instruction set.

With AVX-512, MindSpore's oneDNN uses its slow reference code for convolutions.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.kernels import MOST_CORES, cores

_stand_in_for: str | None = None  # The device to build for, in a simulation.
# On machines with few cores, MindSpore runs graphs of at most this many kernels in the calling thread.
_MOST_KERNELS = 100
# The condition costs 0.3 to 1 ms. It is worth that from this many multiplications per core on (about 3 ms).
_LEAST_WORK = 16e6
_ROWS_OF_ADDING = 16  # Adding a weight's gradient takes as long as computing it for this many rows.
VARIABLE = "ONEDNN_MAX_CPU_ISA"  # This environment variable limits the instruction set of oneDNN.
REMEDY = f"Set the environment variable {VARIABLE}=AVX2 before the program starts."
# oneDNN 2, in earlier versions of MindSpore, is not affected.
_LIBRARY = Path(ms.__file__).parent / "lib" / "libdnnl.so.3"
_AVX512 = 0x20  # The bit of dnnl_cpu_isa_avx512_core, which higher instruction sets include.
_CELLS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose)


def device_target() -> str:
    """Return ``"CPU"``, ``"GPU"`` or ``"Ascend"``."""
    return _stand_in_for or ms.get_context("device_target")


@contextmanager
def built_for(target: str) -> Iterator[None]:
    """Build cells for ``target``, while operators still run on the device of this process."""
    global _stand_in_for
    before, _stand_in_for = _stand_in_for, target
    try:
        yield
    finally:
        _stand_in_for = before


def multiply(dtype: ms.Type) -> None:
    """Multiply two matrices on the device of this process. Raise if it has no MatMul for this dtype."""
    # A failed operator may raise its error in the next one, unless the records are cleared (`op_by_op` does so).
    with op_by_op():
        ones = Tensor(np.ones((2, 2)), dtype)
        ops.matmul(ones, ones).asnumpy()


def clamps_overflow() -> bool:
    """Return whether an overflow gives the largest finite number, as in Ascend's saturation mode, instead of an Inf."""
    if ms.get_context("device_target") != "Ascend":
        return False  # The compiler for GPUs runs on machines without one, where an operator would crash the process.
    with op_by_op():
        largest = Tensor(np.float16(65504.0))
        return bool(np.isfinite((largest + largest).asnumpy()))


def thread_pool_is_faster(parameters: Sequence[Parameter], positions: int, jit_config: Mapping[str, object]) -> bool:
    """Return whether MindSpore's thread pool runs a micro step faster; docs/performance.md has the measurements."""
    # A calling thread that runs the graph does not help multi-threaded kernels: it spins until they end, as one thread
    # more than there are cores. The results are equal bit for bit. `positions` is the number of uses of each weight:
    # rows, or pixels for convolutions.
    fuses = ms.get_context("enable_graph_kernel") or jit_config.get("jit_level") == "O1"
    if fuses and os.getenv("OMP_WAIT_POLICY", "").lower() != "passive":
        return False  # The OpenMP threads of fused kernels spin beside the thread pool.
    is_small = 2 * len(parameters) <= _MOST_KERNELS  # One kernel for a gradient, one for its sum.
    if not is_small or ms.get_context("device_target") != "CPU" or not 1 < cores() <= MOST_CORES:
        return False
    elements = sum(int(parameter.size) for parameter in parameters)
    return elements * (positions + _ROWS_OF_ADDING) >= _LEAST_WORK * cores()


def with_condition(number: Tensor) -> Tensor:
    """Return a non-negative number through a condition, because MindSpore's thread pool runs graphs with conditions."""
    if number < 0.0:
        number = number + 0.0
    return number


def warn_of_slow_convolutions(owner: str, network: nn.Cell) -> None:
    """Warn of slow convolutions if the network has any and the user has not set the variable."""
    if VARIABLE in os.environ or ms.get_context("device_target") != "CPU":
        return
    if are_slow() and has_convolutions(network):
        warn(f"For '{owner}', MindSpore's convolutions take 10 to 40 times as long as they could on this CPU. {REMEDY}")


def has_convolutions(network: nn.Cell) -> bool:
    return any(isinstance(cell, _CELLS) for _, cell in network.cells_and_names())


def pixels(tensors: Sequence[Tensor]) -> int:
    """Return the number of pixels, over all rows, of the largest tensor of shape `(rows, channels, ...)`."""
    return max((tensor.size // max(tensor.shape[1], 1) for tensor in tensors if tensor.ndim > 2), default=0)


def are_slow() -> bool:
    """Return whether convolutions are slow because oneDNN may use AVX-512."""
    if platform.machine() != "x86_64" or not _LIBRARY.exists():
        return False
    # Do not time them: on a busy machine, fast convolutions can take as long.
    return bool(CDLL(str(_LIBRARY)).dnnl_get_effective_cpu_isa() & _AVX512)
