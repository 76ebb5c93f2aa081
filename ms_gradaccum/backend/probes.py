"""Trials of what the device of this process computes: they run an operator."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.device import can_saturate


def multiply(dtype: ms.Type) -> None:
    """Multiply two matrices. Raise if the device has no MatMul for this dtype."""
    # A failed operator may raise its error in the next one, unless the records are cleared (`op_by_op` does so).
    with op_by_op():
        ones = Tensor(np.ones((2, 2)), dtype)
        ops.matmul(ones, ones).asnumpy()


def clamps_overflow() -> bool:
    """Return whether an overflow gives the largest finite number, as in Ascend's saturation mode, instead of an Inf."""
    if not can_saturate():
        # The compiler for GPUs runs on machines without one, where an operator would crash the process.
        return False
    with op_by_op():
        largest = Tensor(np.float16(65504.0))
        return bool(np.isfinite((largest + largest).asnumpy()))
