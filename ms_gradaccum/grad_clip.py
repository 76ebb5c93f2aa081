"""Gradient clipping: once per window, on the reduced and unscaled mean gradient."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_positive_float, sentence

Grads = tuple[Tensor, ...]


def sum_of_squares(grad: Tensor) -> Tensor:
    """Return the sum of the squares of ``grad``, a float32 scalar."""
    squares = ops.square(ops.cast(grad, ms.float32))
    if squares.ndim > 1:
        # Row by row first: on CPU a reduction over all axes at once takes 7 times as long.
        squares = ops.sum(squares.reshape(squares.shape[0], -1), -1)
    return ops.sum(squares)


def global_norm(tensors: Grads) -> Tensor:
    """Return the L2 norm of ``tensors`` taken as one vector, a float32 scalar."""
    total = sum_of_squares(tensors[0])
    for tensor in tensors[1:]:
        total = total + sum_of_squares(tensor)
    return ops.sqrt(total)


class NoClip(nn.Cell):
    """Stand-in used when gradients are not clipped."""

    def construct(self, grads: Grads, norm: Tensor) -> Grads:
        return grads

    def norm_after(self, norm: Tensor) -> Tensor:
        """Return the norm after clipping."""
        return norm


class ClipByGlobalNorm(nn.Cell):
    r"""Scale the window's mean gradient down so that its global L2 norm is at most `max_norm`.

    All gradients are multiplied by :math:`\min(1, max\_norm / norm)`, so the direction stays.
    See "On the difficulty of training Recurrent Neural Networks" (Pascanu et al., 2013).

    Args:
        max_norm (Union[int, float]): The largest norm that is let through. Positive and finite.

    Inputs:
        - **grads** (tuple[Tensor]) - Mean gradients of any shape and floating-point dtype.
        - **norm** (Tensor) - Their global norm, a float32 scalar.
        - **max_norm** (Tensor, optional) - A float32 scalar in place of the argument. Default: ``None``.

    Outputs:
        Tuple of Tensors, the clipped gradients, with the same shapes and dtypes.

    Raises:
        TypeError: If `max_norm` is not an int or a float.
        ValueError: If `max_norm` is not positive and finite.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_gradaccum import ClipByGlobalNorm
        >>> grads = ClipByGlobalNorm(1.0)((Tensor([3.0, 4.0]),), Tensor(5.0))
        >>> print(grads[0])
        [0.6 0.8]
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        remedy = "Typical norms are 0.5 to 5."
        self.max_norm = check_positive_float("ClipByGlobalNorm", "max_norm", max_norm, remedy)

    def as_tensor(self) -> Tensor:
        """Return the limit as an input of `construct`."""
        return Tensor(self.max_norm, ms.float32)

    def extend_repr(self) -> str:
        """Return the argument, for ``repr``."""
        return f"max_norm={self.max_norm}"

    def construct(self, grads: Grads, norm: Tensor, max_norm: Tensor | None = None) -> Grads:
        limit = self.limit_or(max_norm)
        factor = limit / ops.maximum(norm, limit)
        # In float32: a small factor is no float16 number.
        return tuple([ops.cast(ops.cast(grad, ms.float32) * factor, grad.dtype) for grad in grads])

    def limit_or(self, max_norm: Tensor | None) -> Tensor:
        """Return the limit of this call: ``max_norm`` if given, else that of the cell."""
        return Tensor(self.max_norm, ms.float32) if max_norm is None else max_norm

    def norm_after(self, norm: Tensor, max_norm: Tensor | None = None) -> Tensor:
        """Return the norm after clipping."""
        return ops.minimum(norm, self.limit_or(max_norm))


class ClipByValue(nn.Cell):
    r"""Limit each element of the window's mean gradient to :math:`[-limit, limit]`.

    Args:
        limit (Union[int, float]): The largest absolute value that is let through. Positive and finite.

    Inputs:
        - **grads** (tuple[Tensor]) - Mean gradients of any shape and floating-point dtype.
        - **norm** (Tensor) - Their global norm, a float32 scalar.
        - **limit** (Tensor, optional) - A float32 scalar in place of the argument. Default: ``None``.

    Outputs:
        Tuple of Tensors, the clipped gradients, with the same shapes and dtypes.

    Raises:
        TypeError: If `limit` is not an int or a float.
        ValueError: If `limit` is not positive and finite.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_gradaccum import ClipByValue
        >>> grads = ClipByValue(3.0)((Tensor([-3.0, 9.0, 4.0]),), Tensor(10.3))
        >>> print(grads[0])
        [-3.  3.  3.]
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = check_positive_float("ClipByValue", "limit", limit, "Typical limits are 0.1 to 10.")

    def as_tensor(self) -> Tensor:
        """Return the limit as an input of `construct`."""
        return Tensor(self.limit, ms.float32)

    def extend_repr(self) -> str:
        """Return the argument, for ``repr``."""
        return f"limit={self.limit}"

    def construct(self, grads: Grads, norm: Tensor, limit: Tensor | None = None) -> Grads:
        limit = Tensor(self.limit, ms.float32) if limit is None else limit
        return tuple([ops.minimum(ops.maximum(grad, -limit), limit) for grad in grads])

    def norm_after(self, norm: Tensor, limit: Tensor | None = None) -> None:
        """Return None: the norm after clipping takes a pass of its own."""
        return None


def check_clip(owner: str, clip: Any) -> nn.Cell:
    """Return ``clip``, or for None what clips nothing."""
    if clip is None:
        return NoClip()
    if not isinstance(clip, (ClipByGlobalNorm, ClipByValue)):
        rule = "a ClipByGlobalNorm, a ClipByValue or None"
        raise TypeError(sentence(owner, "clip", rule, f"{clip!r}", "For example clip=ClipByGlobalNorm(1.0)."))
    return clip
