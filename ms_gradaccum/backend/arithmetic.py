"""Arithmetic of gradients and of their sums: in place, on one tensor or on each of many."""

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ms_gradaccum.backend.device import spread
from ms_gradaccum.backend.tensors import map_tensors

Tensors = tuple[Tensor, ...]

# The neutral factor. In a graph, the compiler removes the multiplication.
ONE = Tensor(1.0, ms.float32)


def as_dtype(value: Tensor, dtype: ms.Type) -> Tensor:
    """Return ``value`` in this dtype, without a redundant cast, which the compiler would turn into a copy."""
    return value if value.dtype == dtype else ops.cast(value, dtype)


def as_flat(values: Tensor) -> Tensor:
    """Return all elements in one row of float32, which every backend sends and which represents 16 bits exactly."""
    return ops.cast(values, ms.float32).reshape(-1)


def scale_wide(factor: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad * factor`` in at least 32 bits: in 16 bits a small factor could underflow."""
    return (grad if grad.dtype == ms.float64 else as_dtype(grad, ms.float32)) * factor


def scale(factor: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad * factor`` in the dtype of ``grad``."""
    return as_dtype(scale_wide(factor, grad), grad.dtype)


def add_in_place(total: Parameter, part: Tensor, factor: Tensor = ONE) -> Tensor:
    """Add ``part * factor`` to a parameter and return the updated parameter."""
    return ops.assign_add(total, as_dtype(part, total.dtype) * factor)


def set_in_place(total: Parameter, value: Tensor) -> Tensor:
    """Assign a value of any dtype to a parameter and return the updated parameter."""
    return ops.assign(total, as_dtype(value, total.dtype))


def scale_in_place(factor: Tensor, total: Parameter) -> Tensor:
    """Multiply a parameter by a number and return the updated parameter."""
    return set_in_place(total, total * factor)


def fill_in_place(number: Tensor, total: Parameter) -> Tensor:
    """Fill a parameter with a number and return the updated parameter."""
    return ops.assign(total, spread(number, total))


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor, a float32 scalar."""
    squares = ops.square(as_dtype(values, ms.float32))
    if squares.ndim > 1:
        # Reduce the rows first: on CPU, a reduction over all axes at once is much slower.
        squares = ops.sum(ops.Flatten()(squares), (1,))
    return ops.sum(squares)


def scale_each_in_place(factor: Tensor, totals: Tensors) -> Tensors:
    """Multiply parameters by a number and return the updated parameters."""
    return map_tensors(ops.partial(scale_in_place, factor), totals)


def _cast_like(value: Tensor, like: Tensor) -> Tensor:
    return as_dtype(value, like.dtype)


def cast_each_like(values: Tensors, likes: Tensors) -> Tensors:
    """Cast each tensor to the dtype of its counterpart in ``likes``."""
    return map_tensors(_cast_like, values, tuple(likes))
