"""Relative differences that rounding explains, by the lowest dtype of a computation."""

from typing import NamedTuple

import mindspore as ms


class Tolerance(NamedTuple):
    """Relative differences that are rounding."""

    rounding: float  # Of one number that is rounded once.
    loss: float  # Between the loss of some rows and the mean of the losses of their parts.
    # Between gradients, or outputs of a network, that were computed twice, in another order.
    tensors: float


TOLERANCES = {
    ms.float32: Tolerance(rounding=2.0**-24, loss=2.0**-14, tensors=1e-4),
    ms.float16: Tolerance(rounding=2.0**-11, loss=2.0**-6, tensors=2e-2),
    ms.bfloat16: Tolerance(rounding=2.0**-8, loss=2.0**-4, tensors=2e-2),
}
