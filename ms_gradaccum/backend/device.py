"""All that differs by device: no other file compares names of devices.

With AVX-512, MindSpore's oneDNN uses its slow reference code for convolutions on CPU.
"""

import os
import platform
import re
from ctypes import CDLL
from pathlib import Path

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.mindspore_private import primexpr

DEVICES = ("CPU", "GPU", "Ascend")

_OUT_OF_MEMORY = re.compile(
    r"(?i)out of memory|bad_alloc|memory (is not|isn't|not) enough|unable to allocate"
    r"|alloc\w* [^\n]*memory[^\n]* fail|memory [^\n]*alloc\w* fail"
)

VARIABLE = "ONEDNN_MAX_CPU_ISA"  # This environment variable limits the instruction set of oneDNN.
REMEDY = f"Set the environment variable {VARIABLE}=AVX2 before the program starts."
# oneDNN 2, in earlier versions of MindSpore, is not affected.
_LIBRARY = Path(ms.__file__).parent / "lib" / "libdnnl.so.3"
_AVX512 = 0x20  # The bit of dnnl_cpu_isa_avx512_core, which higher instruction sets include.
_CELLS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Conv1dTranspose,
    nn.Conv2dTranspose,
    nn.Conv3dTranspose,
)


def this_device() -> str:
    """Return the device on which this process runs operators: one of `DEVICES`."""
    return str(ms.get_context("device_target"))


def device_target() -> str:
    """Return the device that cells are built for: one of `DEVICES`. Tests put another one here."""
    return this_device()


def is_out_of_memory(kind: str, text: str) -> bool:
    """Return whether an error means that memory ran out. MindSpore words it differently for each device."""
    return "MemoryError" in kind or (
        kind == "RuntimeError" and _OUT_OF_MEMORY.search(text) is not None
    )


def is_host(device: str | None = None) -> bool:
    """Return whether the device is the host: tensors are in its memory, and kernels run on its cores."""
    return (device or ms.get_context("device_target")) == "CPU"


def can_partition() -> bool:
    """Return whether MindSpore's compiler can partition a graph: semi-auto-parallel."""
    return device_target() != "CPU"


def has_data_sink() -> bool:
    """Return whether `Model` trains a data sink as one graph. On CPU it calls the step for each batch."""
    return device_target() != "CPU"


def graphs_can_raise() -> bool:
    """Return whether an error may be raised inside a graph. It was tried only on CPU."""
    return device_target() == "CPU"


def has_mint_optimizers() -> bool:
    """Return whether optimizers of mindspore.mint update op by op."""
    return device_target() != "CPU"


def keeps_calls() -> bool:
    """Return whether the compiler keeps cells with ``lazy_inline`` as functions. Elsewhere it fails at them."""
    return this_device() == "Ascend"


def can_saturate() -> bool:
    """Return whether an overflow may give the largest finite number in place of an Inf."""
    return this_device() == "Ascend"


def sends_bfloat16() -> bool:
    return this_device() != "CPU"


def has_all_collectives() -> bool:
    """Return whether there is a ReduceScatter, and an AllGather for some of the ranks and not only for all."""
    return device_target() != "CPU"


def reduces_in_order() -> bool:
    """Return whether each AllReduce of a graph waits for the values that it sends."""
    # On GPU, MindSpore 2.10 puts it on a stream of its own, which waits for nothing.
    return device_target() != "GPU"


def product_dtype(device: str) -> ms.Type:
    """Return the dtype to whose precision the device rounds the factors of a float32 matrix product."""
    return ms.float32 if device == "CPU" else ms.float16  # TF32 has as many digits as float16.


def arguments_of_set_device() -> list[str | int]:
    """Return the arguments with which `mindspore.set_device` chooses the device of this process."""
    return [this_device()] if is_host() else [this_device(), ms.get_context("device_id")]


def cores() -> int:
    """Return how many cores the process may use."""
    # macOS and Windows do not have this function.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_is_host_in_graph = primexpr(is_host)


def spread(number: Tensor, like: Parameter) -> Tensor:
    """Return a tensor with the shape of ``like``, filled with ``number``."""
    # On CPU, BroadcastTo needs memory for another result; on Ascend, FillV2 runs on the slow AI CPU.
    # ops.broadcast_to would take much longer to compile.
    return (
        ops.FillV2()(like.shape, number)
        if _is_host_in_graph()
        else ops.BroadcastTo(like.shape)(number)
    )


def warn_of_slow_convolutions(owner: str, network: nn.Cell) -> None:
    """Warn of slow convolutions if the network has any and the user has not set the variable."""
    if VARIABLE in os.environ or not is_host():
        return
    if are_slow() and has_convolutions(network):
        warn(
            f"For '{owner}', MindSpore's convolutions are 10 to 40 times slower than possible on "
            f"this CPU. {REMEDY}"
        )


def has_convolutions(network: nn.Cell) -> bool:
    return any(isinstance(cell, _CELLS) for _, cell in network.cells_and_names())


def are_slow() -> bool:
    """Return whether convolutions are slow because oneDNN may use AVX-512."""
    if platform.machine() != "x86_64" or not _LIBRARY.exists():
        return False
    # Do not time them: on a busy machine, fast convolutions can take as long.
    return bool(CDLL(str(_LIBRARY)).dnnl_get_effective_cpu_isa() & _AVX512)
