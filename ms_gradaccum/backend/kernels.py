"""What no operator of MindSpore does well on all devices."""

import ctypes
import os
import sysconfig
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.primitive import _primexpr

# Built of kernels.cc where there was a C++ compiler. A library of functions, not a module.
LIBRARY = Path(__file__).with_name(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
# They have one thread. MindSpore's own have one on 2 cores, take 3 times as long then, and one more with each core.
MOST_CORES = 4


def cores() -> int:
    """Return how many cores the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows


_squeeze = ops.Squeeze()
# A factor that changes nothing; where no kernel of this package is used, the compiler leaves it out.
ONE = Tensor(1.0, ms.float32)


def _load() -> Any:
    """Return the library, or None where MindSpore's operators are as good or it cannot be used."""
    if ms.get_context("device_target") != "CPU" or cores() > MOST_CORES:
        return None
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None


def _make_kernels() -> tuple[Any, ...]:
    """Return the operators of the library, or None for each."""
    library, kernels = _load(), []
    for name in _NAMES:
        try:
            getattr(library, name), getattr(library, f"{name}InferShape"), getattr(library, f"{name}InferType")
            kernel = ops.Custom(f"{LIBRARY}:{name}", None, None, "aot")
        # There is none, or one of an older version, or $MS_CUSTOM_AOT_WHITE_LIST forbids it, or its path has a colon.
        except (AttributeError, TypeError):
            return (None,) * len(_NAMES)
        # As AssignAdd has it: what reads the total later in a program waits until it is changed.
        kernel.add_prim_attr("side_effect_mem", name.endswith("in_place"))
        # Without a name MindSpore fails where shapes change.
        kernel.add_prim_attr("reg_op_name", name)
        kernels.append(kernel)
    return tuple(kernels)


_NAMES = "add_scaled_in_place add_noted_in_place scale_in_place fill_in_place sum_of_squares replay_mask".split()
(
    _add_scaled_in_place,
    _add_noted_in_place,
    _scale_in_place,
    _fill_in_place,
    _sum_of_squares,
    _replay_mask,
) = _make_kernels()


def has_kernels() -> bool:
    """Return whether the kernels of this package are used."""
    return _add_scaled_in_place is not None


@_primexpr
def _fit(*dtypes: Any) -> bool:
    return all(dtype == ms.float32 for dtype in dtypes) and has_kernels() and _on_cpu()


def as_dtype(value: Tensor, dtype: Any) -> Tensor:
    """Return ``value`` in this dtype. No cast that changes nothing: the compiler would copy for it."""
    return value if value.dtype == dtype else ops.cast(value, dtype)


def add_in_place(total: Parameter, part: Tensor, factor: Tensor = ONE) -> Tensor:
    """Add ``part * factor`` to a parameter and return the parameter after it."""
    part = as_dtype(part, total.dtype)
    if _fit(total.dtype, factor.dtype):
        return ops.depend(total, _add_scaled_in_place(total, part, factor))
    return ops.assign_add(total, part * factor)


def add_noted_in_place(total: Parameter, part: Tensor, factor: Tensor, share: Tensor, noise: Parameter) -> Tensor:
    """Do the same, and add ``share`` times the squares of ``part`` to the first number of ``noise``."""
    part = as_dtype(part, total.dtype)
    if _fit(total.dtype, factor.dtype, share.dtype, noise.dtype):
        return ops.depend(total, _add_noted_in_place(total, part, factor, share, noise))
    squares = as_dtype(sum_of_squares(part), noise.dtype) * share
    noted = ops.assign_add(noise, ops.stack((squares, ops.zeros_like(squares))))
    return ops.depend(add_in_place(total, part, factor), noted)


def scale_in_place(total: Parameter, factor: Tensor) -> Tensor:
    """Multiply a parameter by a number and return the parameter after it."""
    if _fit(total.dtype, factor.dtype):
        return ops.depend(total, _scale_in_place(total, factor))
    return ops.assign(total, as_dtype(total * factor, total.dtype))


def fill_in_place(total: Parameter, number: Tensor) -> Tensor:
    """Make a parameter a number everywhere and return the parameter after it."""
    if _fit(total.dtype, number.dtype):
        return ops.depend(total, _fill_in_place(total, number))
    return ops.assign(total, spread(number, total))


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of a float32 tensor, a scalar."""
    if _fit(values.dtype):
        # The compiler takes 20 ms to learn what a reshape is.
        return _squeeze(_sum_of_squares(values))
    squares = ops.square(values)
    if squares.ndim > 1:
        # Row by row first: on CPU a reduction over all axes at once takes 7 times as long.
        squares = ops.sum(ops.Flatten()(squares), (1,))
    return ops.sum(squares)


def replay_mask(like: Tensor, seed: Tensor, bound: Tensor, factor: Tensor) -> Tensor:
    """Return a mask of `ReplayDropout` for a tensor that `fits_kernels`."""
    return _replay_mask(like, seed, bound, factor)


@_primexpr
def fits_kernels(dtype: Any) -> bool:
    """Return whether the kernels of this package take tensors of a dtype here."""
    return bool(dtype == ms.float32 and has_kernels() and on_cpu())


def spread(number: Tensor, like: Parameter) -> Tensor:
    """Return a tensor of the shape of ``like`` that is ``number`` everywhere."""
    # On CPU BroadcastTo needs memory for another result; on Ascend FillV2 runs on the slow AI CPU. Not
    # ops.broadcast_to, which takes the compiler 6 times as long.
    return ops.FillV2()(like.shape, number) if _on_cpu() else ops.BroadcastTo(like.shape)(number)


def on_cpu() -> bool:
    """Return whether MindSpore computes on CPU."""
    return bool(ms.get_context("device_target") == "CPU")


_on_cpu = _primexpr(on_cpu)
