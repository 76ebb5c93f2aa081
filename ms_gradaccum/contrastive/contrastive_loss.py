"""Contrastive losses that compute the similarity matrix in blocks of rows."""

import math
from collections.abc import Callable
from itertools import pairwise

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import FrozenAfterInit, check_bool, check_float, check_int
from ms_gradaccum.backend.arithmetic import ONE, Tensors, as_dtype
from ms_gradaccum.backend.mindspore_private import primexpr

_OWNER = "ContrastiveLoss"
# A graph contains a copy of the loop's body for each block.
_MOST_BLOCKS = 32
_NONE = -1e30


class ContrastiveLoss(FrozenAfterInit, nn.Cell):
    r"""InfoNCE loss computed in blocks of rows: symmetric for two towers, supervised if there are labels.

    With :math:`s_{ij} = a_i \cdot b_j / \tau` and the positives :math:`P_i` of a row (only the row at the same index,
    or all rows with the same label), the loss of two towers is the mean over both directions of

    .. math::
        -\frac{1}{N} \sum_i \frac{1}{|P_i|} \sum_{j \in P_i} \log \frac{\exp s_{ij}}{\sum_k \exp s_{ik}}

    For pairs without labels this is the loss of CLIP (Radford et al., 2021). With one tower, :math:`b = a`, no row is
    compared with itself, and rows without a positive are ignored: supervised contrast (Khosla et al., 2020).

    The similarities are computed for `block_rows` rows at a time, and again in the backward pass, so no :math:`N \times
    N` matrix is stored. In a :class:`GradCacheLoss` the rows are those of all processes' batches.

    Args:
        temperature (float): :math:`\tau`, or its initial value if it is learnable. Default: ``0.07``.

    Keyword Args:
        learnable (bool): Whether the temperature is trained, as `logit_scale`, :math:`\log 1/\tau`. Default: ``True``.
        normalize (bool): Whether the representations are divided by their lengths. Default: ``True``.
        towers (int): 1 or 2. Default: ``2``.
        block_rows (int): Rows of a block, at least a 32nd of all. Default: ``256``.

    Inputs:
        - **first** (Tensor) - Representations of shape :math:`(N, D)`.
        - **second** (Tensor) - Representations of the other tower, of the same shape; omitted with one tower.
        - **labels** (Tensor) - Classes, integers of shape :math:`(N,)`. Optional for two towers.

    Outputs:
        The loss, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the inputs do not fit `towers`.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import ops
        >>> from ms_gradaccum import ContrastiveLoss
        >>> rows = ops.eye(4, 4)
        >>> print(round(float(ContrastiveLoss(temperature=1.0)(rows, rows)), 4))  # log(e + 3) - 1
        0.7437
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        learnable: bool = True,
        normalize: bool = True,
        towers: int = 2,
        block_rows: int = 256,
    ) -> None:
        super().__init__()
        temperature = check_float(_OWNER, "temperature", temperature, "CLIP starts with 0.07.")
        learnable = check_bool(_OWNER, "learnable", learnable, "False keeps the temperature fixed.")
        self.normalize = check_bool(
            _OWNER, "normalize", normalize, "False leaves the rows as they are."
        )
        self.towers = check_int(
            _OWNER, "towers", towers, "It counts the representations of a row.", most=2
        )
        block_rows = check_int(_OWNER, "block_rows", block_rows, "Fewer rows take less memory.")
        self.logit_scale = Parameter(
            Tensor(-math.log(temperature), ms.float32), "logit_scale", requires_grad=learnable
        )
        self.log_sum_exps = LogSumExps(block_rows, towers == 1)
        self._is_built = True

    def construct(self, first: Tensor, *rest: Tensor) -> Tensor:
        shapes: tuple[tuple[int, ...], ...] = (first.shape,)
        for each in rest:
            shapes += (each.shape,)
        _check_shapes(self.towers, shapes)
        first = self._unit(first)
        second = first
        if self.towers == 2:
            second = self._unit(rest[0])
        # Sums over the positives of each row, equal in both directions, which share the labels.
        sums = second
        counts = ops.ones((first.shape[0],), ms.float32)
        if len(rest) == self.towers:
            numbers = ops.stop_gradient(label_numbers(rest[-1]))
            sums = _sum_alike(sums, numbers)
            counts = _sum_alike(counts, numbers)
        if self.towers == 1:
            sums = sums - second
            counts = counts - 1.0
        has_positive = as_dtype(counts > 0, ms.float32)
        weights = has_positive / ops.maximum(has_positive.sum(), ONE)
        scaled = first * ops.exp(self.logit_scale)
        positives = (scaled * sums).sum(1) / ops.maximum(counts, ONE)
        log_sum_exps = self.log_sum_exps(scaled, second, weights / self.towers)[0]
        return log_sum_exps - (positives * weights).sum()

    def _unit(self, rows: Tensor) -> Tensor:
        rows = as_dtype(rows, ms.float32)
        if not self.normalize:
            return rows
        squares = ops.square(rows).sum(1, keepdims=True)
        return rows * ops.rsqrt(squares + 1e-12)


class LogSumExps(nn.Cell):
    """Weighted sum of log-sum-exp of the products of all rows of ``a`` and ``b``, along both axes, block by block.

    No matrix is broadcast: on CPU, MindSpore stores two index lists of the result's size for each broadcast. Instead,
    each row gets one more element, which adds a number to whole rows or columns.
    """

    def __init__(self, block_rows: int, is_one: bool) -> None:
        super().__init__(auto_prefix=False)
        self.block_rows = block_rows
        self.is_one = is_one

    def construct(self, a: Tensor, b: Tensor, weights: Tensor) -> Tensors:
        """Return the sum (for one tower, only along the rows of ``a``) and the logarithms for the backward pass."""
        by_row: Tensors = ()
        by_column = ops.zeros((b.shape[0],), ms.float32) + _NONE
        for begin, end in blocks_of(a.shape[0], self.block_rows):
            # The blocks run one after the other, so that their products do not exist at the same time.
            part = ops.depend(a[begin:end], (by_row, by_column))
            products = self.products(part, b, begin, end)
            by_row += (_log_sum_exp(products, 1),)
            if not self.is_one:
                own = _log_sum_exp(products, 0)
                larger = ops.maximum(by_column, own)
                shares = ops.exp(by_column - larger) + ops.exp(own - larger)
                by_column = larger + ops.log(shares)
        rows = ops.concat(by_row)
        total = rows
        if not self.is_one:
            total = rows + by_column
        return (total * weights).sum(), rows, by_column

    def products(self, part: Tensor, b: Tensor, begin: int, end: int) -> Tensor:
        products = ops.matmul(part, b.T)
        if self.is_one:
            # Make the diagonal depend on an input: the compiler would store a constant one for each block.
            itself = ops.diag(ops.minimum(part[:, 0], Tensor(_NONE, ms.float32)))
            products = products + ops.pad(itself, (begin, b.shape[0] - end))
        return products

    def bprop(
        self,
        a: Tensor,
        b: Tensor,
        weights: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradients. The products are computed again."""
        logs = ops.log(weights)
        ones = ops.ones(logs.shape, ms.float32)
        longer_b = ops.column_stack((b, ones))
        shifted_b = ops.column_stack((b, logs - out[2]))
        row_shifts = logs - out[1]
        a_grads: Tensors = ()
        b_grad = ops.zeros(b.shape, ms.float32)
        for begin, end in blocks_of(b.shape[0], self.block_rows):
            part = ops.depend(a[begin:end], (a_grads, b_grad))
            shifted = ops.column_stack((part, row_shifts[begin:end]))
            shares = ops.exp(self.products(shifted, longer_b, begin, end))
            if not self.is_one:
                longer = ops.column_stack((part, ones[begin:end]))
                shares = shares + ops.exp(ops.matmul(longer, shifted_b.T))
            a_grads += (ops.matmul(shares, b),)
            b_grad = b_grad + ops.matmul(shares.T, part)
        a_grad = ops.concat(a_grads)
        return a_grad * dout[0], b_grad * dout[0], ops.zeros_like(weights)


def _log_sum_exp(products: Tensor, axis: int) -> Tensor:
    log_shares = ops.LogSoftmax(axis)(products)
    return ops.amax(products, axis) - ops.amax(log_shares, axis)


def _sum_alike(values: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the sum of all rows with its number."""
    sums = ops.unsorted_segment_sum(values, numbers, values.shape[0])
    return ops.gather(sums, numbers, 0)


def label_numbers(labels: Tensor) -> Tensor:
    """Return a number below that of the rows for each label, and the same number for equal labels."""
    # In int64, because searchsorted takes no uint8 on CPU.
    labels = ops.cast(labels.reshape(-1), ms.int64)
    return ops.searchsorted(ops.sort(labels)[0], labels, out_int32=True)


@primexpr
def blocks_of(rows: int, block_rows: int) -> tuple[tuple[int, int], ...]:
    """Return the begin and end of each block of rows."""
    size = max(block_rows, -(-rows // _MOST_BLOCKS))
    return tuple(pairwise((*range(0, rows, size), rows)))


@primexpr
def _check_shapes(towers: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless the inputs are the representations of so many towers, and labels where they are needed."""
    if not 2 <= len(shapes) <= towers + 1:
        inputs = "two representations, with or without labels"
        if towers == 1:
            inputs = "representations and labels"
        raise ValueError(
            f"For '{_OWNER}', the inputs with towers={towers} must be {inputs}, but got "
            f"{len(shapes)}. Give the outputs of the network first, and then the labels."
        )
    first = shapes[0]
    fits = len(first) == 2 and first == shapes[towers - 1]
    for labels in shapes[towers:]:
        fits = fits and math.prod(labels) == first[0]
    if not fits:
        raise ValueError(
            f"For '{_OWNER}', the representations must have one shape (rows, length), and labels "
            f"one per row, but got {', '.join(map(str, shapes))}. Project the outputs of both "
            f"towers to one length."
        )
