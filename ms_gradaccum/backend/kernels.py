"""Custom kernels, with MindSpore operators as fallback."""

import ctypes
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.primitive import Primitive, _primexpr

from ms_gradaccum.backend.compiled import wait

# Built from kernels.cc if a C++ compiler was available. It is a shared library, not a Python module.
LIBRARY = Path(__file__).with_name(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
# These kernels are single-threaded. With more cores, MindSpore's own kernels use more threads and catch up.
MOST_CORES = 4


def cores() -> int:
    """Return how many cores the process may use."""
    # macOS and Windows do not have this function.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Tensors = tuple[Tensor, ...]

_squeeze = ops.Squeeze()
ONE = Tensor(1.0, ms.float32)  # The neutral factor. Without a custom kernel, the compiler removes the multiplication.


def on_cpu() -> bool:
    return bool(ms.get_context("device_target") == "CPU")


_on_cpu = _primexpr(on_cpu)


def _make_kernels() -> tuple[ops.Primitive, ...]:
    """Return the operators of the library, or None for each if MindSpore's operators are as fast or it is missing."""
    kernels = []
    try:
        library = ctypes.CDLL(str(LIBRARY)) if on_cpu() and cores() <= MOST_CORES else None
        for name in _NAMES:
            getattr(library, name), getattr(library, f"{name}InferShape"), getattr(library, f"{name}InferType")
            kernels.append(ops.Custom(f"{LIBRARY}:{name}", None, None, "aot"))
    # The library is missing or outdated, $MS_CUSTOM_AOT_WHITE_LIST forbids it, or its path has a colon.
    except (AttributeError, OSError, TypeError):
        return (None,) * len(_NAMES)
    for name, kernel in zip(_NAMES, kernels):
        # As for AssignAdd, later reads of the total wait for this kernel.
        kernel.add_prim_attr("side_effect_mem", name.endswith("in_place"))
        kernel.add_prim_attr("reg_op_name", name)  # MindSpore needs a name for dynamic shapes.
    return tuple(kernels)


_NAMES = "scaled_add_in_place scaled_in_place filled_in_place sum_of_squares replay_mask add_all_in_place".split()
_scaled_add_in_place, _scaled_in_place, _filled_in_place, _sum_of_squares, _replay_mask, _add_all_in_place = (
    _make_kernels()
)


def has_kernels() -> bool:
    return _scaled_add_in_place is not None


@_primexpr
def fits_kernels(*dtypes: ms.Type) -> bool:
    """Return whether the custom kernels take tensors of these dtypes on this device."""
    return all(dtype == ms.float32 for dtype in dtypes) and has_kernels() and on_cpu()


def as_dtype(value: Tensor, dtype: ms.Type) -> Tensor:
    """Return ``value`` in this dtype, without a redundant cast, which the compiler would turn into a copy."""
    return value if value.dtype == dtype else ops.cast(value, dtype)


def add_in_place(total: Parameter, part: Tensor, factor: Tensor = ONE) -> Tensor:
    """Add ``part * factor`` to a parameter and return the updated parameter."""
    part = as_dtype(part, total.dtype)
    if fits_kernels(total.dtype, factor.dtype):
        return ops.depend(total, _scaled_add_in_place(factor, total, part))
    return ops.assign_add(total, part * factor)


def scale_in_place(factor: Tensor, total: Parameter) -> Tensor:
    """Multiply a parameter by a number and return the updated parameter."""
    if fits_kernels(total.dtype, factor.dtype):
        return ops.depend(total, _scaled_in_place(factor, total))
    return ops.assign(total, as_dtype(total * factor, total.dtype))


def fill_in_place(number: Tensor, total: Parameter) -> Tensor:
    """Fill a parameter with a number and return the updated parameter."""
    if fits_kernels(total.dtype, number.dtype):
        return ops.depend(total, _filled_in_place(number, total))
    return ops.assign(total, spread(number, total))


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of a float32 tensor, a scalar."""
    if fits_kernels(values.dtype):
        return _squeeze(_sum_of_squares(values))  # Squeeze instead of reshape, which takes the compiler 20 ms longer.
    squares = ops.square(values)
    if squares.ndim > 1:
        # Reduce the rows first: on CPU, a reduction over all axes at once is much slower.
        squares = ops.sum(ops.Flatten()(squares), (1,))
    return ops.sum(squares)


def replay_mask(like: Tensor, seed: Tensor, bound: Tensor, factor: Tensor) -> Tensor:
    """Return a mask of `ReplayDropout` for a tensor that `fits_kernels` accepts."""
    return _replay_mask(like, seed, bound, factor)


def spread(number: Tensor, like: Parameter) -> Tensor:
    """Return a tensor with the shape of ``like``, filled with ``number``."""
    # On CPU, BroadcastTo needs memory for another result; on Ascend, FillV2 runs on the slow AI CPU.
    # ops.broadcast_to would take much longer to compile.
    return ops.FillV2()(like.shape, number) if _on_cpu() else ops.BroadcastTo(like.shape)(number)


def at_once(kernel: str, *tensors: Tensor) -> Tensor:
    """Run one of these kernels op by op on many float32 tensors. This takes hardly longer than one tensor."""
    wait()  # Otherwise the kernel waits for its inputs in a busy loop, on a core that should compute them.
    result: Tensor = globals()[f"_{kernel}"](*tensors)
    return result


# The functions below do the same for many tensors. The compiler specializes a mapped function for each shape, which
# takes far longer than for an operator. So the kernel itself is mapped if it fits.


class _TypeOf(Primitive):
    """The compiler's operator for the type of a value. It is evaluated only once for a tuple of any length."""

    def __init__(self) -> None:
        super().__init__("typeof")

    def __call__(self, value: object) -> str:
        return ""  # Op by op, a kernel per tensor is not faster; `at_once` processes all together.


_type_of = _TypeOf()
_map: Callable[..., Tensors] = ops.HyperMap()
_map_backwards: Callable[..., Tensors] = ops.HyperMap(reverse=True)
_WORDS_OF_FLOAT32 = {"Tuple", "Ref", "Tensor", "Float32"}


@_primexpr
def _all_float32(*types: object) -> bool:
    """Return whether all these types are dense float32 tensors or tuples of them."""
    words = {word for each in types for word in re.findall(r"[A-Za-z]\w*", str(each))}
    return "Float32" in words and words <= _WORDS_OF_FLOAT32


@_primexpr
def _all_fit(*types: object) -> bool:
    """Return whether the custom kernels take tensors of these types."""
    return bool(_all_float32(*types) and fits_kernels())


def add_each_in_place(otherwise: object, factor: Tensor, totals: Tensors, parts: Tensors) -> Tensors:
    """Add ``parts`` times ``factor`` to parameters, the last one first, and return the updated parameters."""
    # Without a kernel, `otherwise` is called for each parameter with the factor, the parameter and the part.
    if _all_fit(_type_of(factor), _type_of(totals), _type_of(parts)):
        return _map(ops.depend, totals, _map_backwards(ops.partial(_scaled_add_in_place, factor), totals, parts))
    return _map_backwards(ops.partial(otherwise, factor), totals, parts)


def scale_each_in_place(factor: Tensor, totals: Tensors) -> Tensors:
    """Multiply parameters by a number and return the updated parameters."""
    if _all_fit(_type_of(factor), _type_of(totals)):
        return _map(ops.depend, totals, _map(ops.partial(_scaled_in_place, factor), totals))
    return _map(ops.partial(scale_in_place, factor), totals)


def fill_each_in_place(number: Tensor, totals: Tensors) -> Tensors:
    """Fill parameters with a number and return their new values."""
    if _all_fit(_type_of(number), _type_of(totals)):
        return _map(ops.partial(_filled_in_place, number), totals)
    return _map(ops.partial(fill_in_place, number), totals)


def _squares_each(value: Tensor) -> Tensor:
    return sum_of_squares(as_dtype(value, ms.float32)).reshape(1)


def squares_of_each(values: Tensors) -> Tensors:
    """Return for each tensor the sum of its squares, a float32 tensor of one element."""
    return _map(_sum_of_squares, values) if _all_fit(_type_of(values)) else _map(_squares_each, values)


def _cast_each(value: Tensor, like: Tensor) -> Tensor:
    return as_dtype(value, like.dtype)


def cast_each_like(values: Tensors, likes: Tensors) -> Tensors:
    """Cast each tensor to the dtype of its counterpart in ``likes``."""
    return values if _all_float32(_type_of(values), _type_of(likes)) else _map(_cast_each, values, tuple(likes))


# Functions of one tensor, for maps over chunks.


def scale(factor: Tensor, grad: Tensor) -> Tensor:
    return as_dtype(scale_wide(factor, grad), grad.dtype)


def scale_wide(factor: Tensor, grad: Tensor) -> Tensor:
    # In 16 bits a small factor could underflow.
    return (grad if grad.dtype == ms.float64 else as_dtype(grad, ms.float32)) * factor
