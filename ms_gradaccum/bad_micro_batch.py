"""Leave out the micro batch whose gradients are not finite, and its weight with it."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner

from ms_gradaccum._checks import check_choice
from ms_gradaccum.grad_clip import sum_of_squares

CHOICES = ("skip_window", "drop")


def check_bad_micro_batch(owner: str, bad_micro_batch: Any) -> bool:
    """Return whether a micro batch that is not finite is left out; else its window makes no update."""
    remedy = "'skip_window' makes no update in a window with an Inf or a NaN, 'drop' leaves out its micro batch alone."
    return check_choice(owner, "bad_micro_batch", bad_micro_batch, CHOICES, remedy) == "drop"


class KeepFinite(nn.Cell):
    """Put zeros in place of what a micro batch adds, if any of it is Inf or NaN."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.HyperMap()

    def is_finite(self, numbers: tuple[Tensor, ...], grads: Any) -> Tensor:
        """Return whether all of ``grads`` and ``numbers`` are finite. One pass over the gradients.

        As for the norm of a window, a gradient whose square is too large for a float32 is not.
        """
        total = Tensor(0.0, ms.float32)
        for number in numbers:
            total = total + number
        for square in self.map(_squares, grads):
            total = total + square
        return ops.isfinite(total)

    def number(self, finite: Tensor, value: Tensor) -> Tensor:
        """Return ``value``, or 0; a product with 0 would keep NaN."""
        return ops.select(finite, value, ops.zeros_like(value))

    def grads(self, finite: Tensor, grads: Any) -> Any:
        """Return the gradients, or zeros."""
        return self.map(ops.partial(_keep, finite), grads)


_squares = ops.MultitypeFuncGraph("sum_of_squares_of_gradient")


@_squares.register("Tensor")
def _squares_of_dense(grad: Tensor) -> Tensor:
    return sum_of_squares(grad)


@_squares.register("RowTensor")
def _squares_of_rows(grad: Any) -> Tensor:
    return sum_of_squares(grad.values)


_keep = ops.MultitypeFuncGraph("keep_gradient")


@_keep.register("Tensor", "Tensor")
def _keep_dense(finite: Tensor, grad: Tensor) -> Tensor:
    return ops.select(finite, grad, ops.zeros_like(grad))


@_keep.register("Tensor", "RowTensor")
def _keep_rows(finite: Tensor, grad: Any) -> Any:
    values = ops.select(finite, grad.values, ops.zeros_like(grad.values))
    return RowTensorInner(grad.indices, values, grad.dense_shape)
