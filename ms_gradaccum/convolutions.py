"""Convolutions on CPU, for which MindSpore's oneDNN takes its reference code where the processor has AVX-512."""

import os
import platform
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn

from ms_gradaccum._checks import warn

VARIABLE = "ONEDNN_MAX_CPU_ISA"
REMEDY = f"Set the environment variable {VARIABLE}=AVX2 before the program starts."
# oneDNN 2, of earlier versions of MindSpore, has code for them.
_LIBRARY = Path(ms.__file__).parent / "lib" / "libdnnl.so.3"
# The bit of dnnl_cpu_isa_avx512_core, which those above it have, too.
_AVX512 = 0x20
_CELLS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose)


def warn_if_slow(owner: str, network: nn.Cell) -> None:
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
