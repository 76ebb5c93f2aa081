"""What no operator of MindSpore does well on all devices."""

import ctypes
import os
import sysconfig
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.primitive import _primexpr

# Built of add_in_place.cc where there was a C++ compiler. A library of functions, not a module.
LIBRARY = Path(__file__).with_name(f"_add_in_place{sysconfig.get_config_var('EXT_SUFFIX')}")
# It has one thread. MindSpore's own has one on 2 cores, takes 3 times as long then, and one more with each core.
MOST_CORES = 4


def cores() -> int:
    """Return how many cores the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows


def _make_kernel() -> Any:
    """Return the operator of the library, or AssignAdd where that is as good or the library cannot be used."""
    if ms.get_context("device_target") != "CPU" or cores() > MOST_CORES:
        return ops.AssignAdd()
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.add_in_place, library.add_in_placeInferShape  # noqa: B018
        kernel = ops.Custom(f"{LIBRARY}:add_in_place", None, ms.float32, "aot")
    # It is not there, or of an older version, or $MS_CUSTOM_AOT_WHITE_LIST forbids it, or its path has a colon.
    except (OSError, AttributeError, TypeError):
        return ops.AssignAdd()
    # As AssignAdd has it: what reads the total later in a program waits until it is added.
    kernel.add_prim_attr("side_effect_mem", True)
    # Without a name MindSpore fails where shapes change.
    kernel.add_prim_attr("reg_op_name", "add_in_place")
    return kernel


_kernel = _make_kernel()


def add_in_place(total: Parameter, part: Tensor) -> Tensor:
    """Add a tensor to a parameter and return the parameter after it."""
    if _fits(total.dtype, part.dtype):
        return ops.depend(total, _kernel(total, part))
    return ops.assign_add(total, part)


@_primexpr
def _fits(of_total: Any, of_part: Any) -> bool:
    return bool(of_total == of_part == ms.float32) and has_kernel() and _on_cpu()


def has_kernel() -> bool:
    """Return whether sums on CPU are added by the kernel of this package."""
    return isinstance(_kernel, ops.Custom)


def spread(number: Tensor, like: Parameter) -> Tensor:
    """Return a tensor of the shape of ``like`` that is ``number`` everywhere."""
    # On CPU BroadcastTo needs memory for another result; on Ascend FillV2 runs on the slow AI CPU. Not
    # ops.broadcast_to, which takes the compiler 6 times as long.
    return ops.FillV2()(like.shape, number) if _on_cpu() else ops.BroadcastTo(like.shape)(number)


@_primexpr
def _on_cpu() -> bool:
    return bool(ms.get_context("device_target") == "CPU")
