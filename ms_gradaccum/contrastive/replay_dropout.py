"""Dropout with reproducible masks."""

import math
from collections.abc import Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import MIN_INT, FrozenAfterInit, check_float, check_int
from ms_gradaccum.backend.mindspore_private import primexpr

_OWNER = "ReplayDropout"
# Odd constants of a hash by C. Wellons, "Prospecting for Hash Functions", 2018.
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
_LAST_SHIFT = 16
_BITS = 24


class ReplayDropout(FrozenAfterInit, nn.Cell):
    r"""Dropout whose mask depends only on a seed and on the positions of elements, so that it can be reproduced.

    In training each element is zero with probability `p`, and the others are divided by :math:`1 - p`, as in
    ``nn.Dropout``. The seed is a parameter, part of checkpoints, that each forward pass increments. A
    :class:`GradCacheLoss` resets it before its second pass, which then draws the same masks. MindSpore's own Dropout
    does not allow this, since its random state on CPU cannot be reset.

    A mask takes about fifteen integer operators.

    Args:
        p (float): The probability of a zero, at least 0 and below 1. Default: ``0.5``.
        seed (int): The first seed. Layers with the same seed draw the same masks, so give each layer its own. With
            ``None`` each layer of a process gets another seed. Default: ``None``.

    Inputs:
        - **x** (Tensor) - Floating-point numbers of any shape, fewer than :math:`2^{31}`.

    Outputs:
        Tensor of the same shape and dtype; in evaluation, `x` itself.

    Raises:
        TypeError: If `p` is not a number or `seed` is not an int.
        ValueError: If `p` is out of range.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor, ops
        >>> from ms_gradaccum import ReplayDropout
        >>> drop = ReplayDropout(p=0.5, seed=1).set_train()
        >>> x = ops.ones((2, 8))
        >>> first, second = drop(x), drop(x)
        >>> drop.seed.set_data(Tensor(1))
        Parameter (name=seed, shape=(), dtype=Int32, requires_grad=False)
        >>> again = drop(x)
        >>> print((first == again).all(), (first == second).all())
        True False
    """

    # The last seed that was given to a layer without one.
    _last_seed = 0

    __call__: Callable[[Tensor], Tensor]

    def __init__(self, p: float = 0.5, seed: int | None = None) -> None:
        super().__init__()
        self.p = check_float(_OWNER, "p", p, "It is the probability of a zero.", least=0, below=1)
        if seed is None:
            # The seeds are far apart because each forward pass increments them.
            seed = (ReplayDropout._last_seed + 0x3C6EF35F) % 2**31
            ReplayDropout._last_seed = seed
        seed = check_int(_OWNER, "seed", seed, "Another one for each layer.", least=MIN_INT)
        self.seed = Parameter(Tensor(seed, ms.int32), name="seed", requires_grad=False)
        # Hashes are below 2 ** 24. An element with a hash of at least this number is kept.
        self.kept_from = round(self.p * 2**_BITS)
        self._is_built = True

    def construct(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        _check_size(x.shape)
        seed = self.seed + 0
        counted = ops.assign_add(self.seed, Tensor(1, ms.int32))
        seed = ops.depend(seed, counted)
        # The numbers of the elements, from 1. They are computed because constants of a graph are never freed.
        numbers = ops.CumSum()(_filled((x.size,), 1, seed), 0)
        # The seed itself is hashed first, because otherwise consecutive seeds would give shifted masks.
        draws = _hashed(ops.bitwise_xor(numbers, _hashed(seed, seed)), seed)
        draws = ops.bitwise_and(draws, Tensor(2**_BITS - 1, ms.int32))
        is_kept = ops.greater_equal(draws, self.kept_from).reshape(x.shape)
        mask = ops.cast(is_kept, x.dtype) * (1 / (1 - self.p))
        return x * ops.stop_gradient(mask)


def _hashed(values: Tensor, seed: Tensor) -> Tensor:
    """Hash each number to 32 bits with products and shifts modulo 2 ** 32."""
    for bits, multiplier in _ROUNDS:
        values = _folded(values, bits)
        # On CPU, MindSpore would store index lists for a broadcast integer product.
        values = values * _filled(values.shape, multiplier, seed)
    return _folded(values, _LAST_SHIFT)


def _folded(values: Tensor, bits: int) -> Tensor:
    """Return ``values ^ (values >> bits)``, without the ones that a right shift of a negative number fills in."""
    shifted = ops.bitwise_right_shift(values, Tensor(bits, ms.int32))
    shifted = ops.bitwise_and(shifted, Tensor(2 ** (32 - bits) - 1, ms.int32))
    return ops.bitwise_xor(values, shifted)


def _filled(shape: tuple[int, ...], number: int, seed: Tensor) -> Tensor:
    """Return a tensor of one number that the compiler does not take for a constant, which it would never free."""
    zero = ops.bitwise_and(seed, Tensor(0, ms.int32))
    return ops.FillV2()(shape, ops.bitwise_xor(zero, Tensor(number, ms.int32)))


@primexpr
def _check_size(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    if size >= 2**31:
        raise ValueError(
            f"For '{_OWNER}', the input must have fewer than 2 ** 31 elements, but got {size}. "
            f"Split it."
        )
