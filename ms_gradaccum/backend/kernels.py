"""What no operator of MindSpore does well on all devices."""

import ctypes
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.primitive import Primitive, _primexpr

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


_NAMES = "scaled_add_in_place scaled_in_place filled_in_place sum_of_squares replay_mask".split()
(
    _scaled_add_in_place,
    _scaled_in_place,
    _filled_in_place,
    _sum_of_squares,
    _replay_mask,
) = _make_kernels()


def has_kernels() -> bool:
    """Return whether the kernels of this package are used."""
    return _scaled_add_in_place is not None


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
        return ops.depend(total, _scaled_add_in_place(factor, total, part))
    return ops.assign_add(total, part * factor)


def scale_in_place(total: Parameter, factor: Tensor) -> Tensor:
    """Multiply a parameter by a number and return the parameter after it."""
    if _fit(total.dtype, factor.dtype):
        return ops.depend(total, _scaled_in_place(factor, total))
    return ops.assign(total, as_dtype(total * factor, total.dtype))


def fill_in_place(total: Parameter, number: Tensor) -> Tensor:
    """Make a parameter a number everywhere and return the parameter after it."""
    if _fit(total.dtype, number.dtype):
        return ops.depend(total, _filled_in_place(number, total))
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


# The same for many tensors at a time. A function that is mapped over tensors the compiler reads anew for each of their
# shapes, which takes it 10 times as long as an operator. So what fits a kernel is mapped with that itself.


class _TypeOf(Primitive):
    """The compiler's operator that returns the type of a value. It looks at a tuple once, however long that is."""

    def __init__(self) -> None:
        super().__init__("typeof")

    def __call__(self, value: Any) -> str:
        return ""  # Op by op there is nothing to be gained.


_type_of = _TypeOf()
_map, _map_backwards = ops.HyperMap(), ops.HyperMap(reverse=True)
_WORDS_OF_FLOAT32 = {"Tuple", "Ref", "Tensor", "Float32"}


@_primexpr
def _all_float32(*types: Any) -> bool:
    """Return whether these are types of float32 tensors or tuples of them, none of them sparse."""
    words = {word for each in types for word in re.findall(r"[A-Za-z]\w*", str(each))}
    return "Float32" in words and words <= _WORDS_OF_FLOAT32


@_primexpr
def _all_fit(*types: Any) -> bool:
    """Return whether the kernels take tensors of these types."""
    return bool(_all_float32(*types) and has_kernels() and on_cpu())


def add_each_in_place(otherwise: Any, factor: Tensor, totals: Any, parts: Any) -> Any:
    """Add ``parts`` times ``factor`` to parameters and return these after it, the last one first.

    Where no kernel fits, ``otherwise`` does so for each parameter, given the factor, the parameter and the part.
    """
    if _all_fit(_type_of(factor), _type_of(totals), _type_of(parts)):
        return _map(ops.depend, totals, _map_backwards(ops.partial(_scaled_add_in_place, factor), totals, parts))
    return _map_backwards(ops.partial(otherwise, factor), totals, parts)


_scale_each = ops.MultitypeFuncGraph("scale_in_place")


@_scale_each.register("Tensor", "Tensor")
def _scale_one(factor: Tensor, total: Parameter) -> Tensor:
    return scale_in_place(total, factor)


def scale_each_in_place(factor: Tensor, totals: Any) -> Any:
    """Multiply parameters by a number and return them after it."""
    if _all_fit(_type_of(factor), _type_of(totals)):
        return _map(ops.depend, totals, _map(ops.partial(_scaled_in_place, factor), totals))
    return _map(ops.partial(_scale_each, factor), totals)


_fill_each = ops.MultitypeFuncGraph("fill_in_place")


@_fill_each.register("Tensor", "Tensor")
def _fill_one(number: Tensor, total: Parameter) -> Tensor:
    return fill_in_place(total, number)


def fill_each_in_place(number: Tensor, totals: Any) -> Any:
    """Make parameters a number everywhere and return what is there after it."""
    if _all_fit(_type_of(number), _type_of(totals)):
        return _map(ops.partial(_filled_in_place, number), totals)
    return _map(ops.partial(_fill_each, number), totals)


_squares_each = ops.MultitypeFuncGraph("sum_of_squares")


@_squares_each.register("Tensor")
def _squares_of_one(value: Tensor) -> Tensor:
    return sum_of_squares(as_dtype(value, ms.float32)).reshape(1)


def squares_of_each(values: Any) -> Any:
    """Return the sum of the squares of each tensor, a float32 tensor of one element."""
    return _map(_sum_of_squares, values) if _all_fit(_type_of(values)) else _map(_squares_each, values)


_cast_each = ops.MultitypeFuncGraph("cast_like")


@_cast_each.register("Tensor", "Tensor")
def _cast_one(value: Tensor, like: Tensor) -> Tensor:
    return as_dtype(value, like.dtype)


def cast_each_like(values: Any, likes: Any) -> Any:
    """Return tensors in the dtypes of others."""
    return values if _all_float32(_type_of(values), _type_of(likes)) else _map(_cast_each, values, tuple(likes))


# Functions of one tensor, for maps over a chunk of them.

scale = ops.MultitypeFuncGraph("scale")


@scale.register("Tensor", "Tensor")
def _scaled(factor: Tensor, grad: Tensor) -> Tensor:
    # Not in 16 bits, where a small factor may be no number.
    return as_dtype(_wide(grad) * factor, grad.dtype)


scale_wide = ops.MultitypeFuncGraph("scale_wide")


@scale_wide.register("Tensor", "Tensor")
def _scaled_wide(factor: Tensor, grad: Tensor) -> Tensor:
    return _wide(grad) * factor


def _wide(grad: Tensor) -> Tensor:
    return grad if grad.dtype == ms.float64 else as_dtype(grad, ms.float32)
