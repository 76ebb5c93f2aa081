"""Tensors as arrays of NumPy."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum.backend.device import is_host

Array = np.ndarray[Any, np.dtype[Any]]


def as_array(tensor: Tensor | Array) -> Array:
    """Return a tensor as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    if isinstance(tensor, np.ndarray):
        return tensor
    array: Array = tensor.float().asnumpy() if tensor.dtype == ms.bfloat16 else tensor.asnumpy()
    return array


def few_elements(tensor: Tensor) -> Array:
    """Return up to 127 elements of a tensor. On CPU the array is a view; other devices copy only these elements."""
    step = tensor.size // 64 or 1
    if tensor.ndim == 0 or is_host():
        return as_array(tensor).reshape(-1)[::step]
    return as_array(tensor.reshape(-1)[::step])
