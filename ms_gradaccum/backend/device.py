"""The device that cells are built for, and what differs by device.

With AVX-512, MindSpore's oneDNN uses its slow reference code for convolutions on CPU.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.mindspore_private import primexpr

_stand_in_for: str | None = None  # The device to build for, in a simulation.
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


def cores() -> int:
    """Return how many cores the process may use."""
    # macOS and Windows do not have this function.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@primexpr
def _runs_on_cpu() -> bool:
    return bool(ms.get_context("device_target") == "CPU")


def spread(number: Tensor, like: Parameter) -> Tensor:
    """Return a tensor with the shape of ``like``, filled with ``number``."""
    # On CPU, BroadcastTo needs memory for another result; on Ascend, FillV2 runs on the slow AI CPU.
    # ops.broadcast_to would take much longer to compile.
    return ops.FillV2()(like.shape, number) if _runs_on_cpu() else ops.BroadcastTo(like.shape)(number)


def warn_of_slow_convolutions(owner: str, network: nn.Cell) -> None:
    """Warn of slow convolutions if the network has any and the user has not set the variable."""
    if VARIABLE in os.environ or ms.get_context("device_target") != "CPU":
        return
    if are_slow() and has_convolutions(network):
        warn(f"For '{owner}', MindSpore's convolutions take 10 to 40 times as long as they could on this CPU. {REMEDY}")


def has_convolutions(network: nn.Cell) -> bool:
    return any(isinstance(cell, _CELLS) for _, cell in network.cells_and_names())


def are_slow() -> bool:
    """Return whether convolutions are slow because oneDNN may use AVX-512."""
    if platform.machine() != "x86_64" or not _LIBRARY.exists():
        return False
    # Do not time them: on a busy machine, fast convolutions can take as long.
    return bool(CDLL(str(_LIBRARY)).dnnl_get_effective_cpu_isa() & _AVX512)
