"""Contrastive losses whose table of similarities, rows times rows, exists a block of rows at a time."""

import math
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.primitive import _primexpr

from ms_gradaccum._checks import check_bool, check_positive_float, check_positive_int
from ms_gradaccum.backend.kernels import as_dtype

_OWNER = "ContrastiveLoss"
# A graph has a copy of the loop's body for each block.
_MOST_BLOCKS = 32
_NONE = -1e30


class ContrastiveLoss(nn.Cell):
    r"""InfoNCE, in the memory of a block of rows: symmetric for two towers, supervised if there are labels.

    With :math:`s_{ij} = a_i \cdot b_j / \tau` and the positives :math:`P_i` of a row, which are the row of the same
    place alone or all rows of the same label, the loss of two towers is the mean over both directions of

    .. math::
        -\frac{1}{N} \sum_i \frac{1}{|P_i|} \sum_{j \in P_i} \log \frac{\exp s_{ij}}{\sum_k \exp s_{ik}}

    which for pairs without labels is that of CLIP (Radford et al., 2021). Of one tower, :math:`b = a`, a row is neither
    its own positive nor its own negative, and rows without a positive are left out: supervised contrastive learning
    (Khosla et al., 2020).

    The similarities of `block_rows` rows with all others are computed at a time, and once more in the backward pass,
    so that no table of :math:`N \times N` numbers is kept. Inside a :class:`GradCacheLoss` the rows are those of the
    whole batch, of all processes.

    Args:
        temperature (float): :math:`\tau`, at the beginning if it is learnable. Default: ``0.07``.

    Keyword Args:
        learnable (bool): Whether the temperature is trained: as the parameter `logit_scale`, which is
            :math:`\log 1/\tau`. Default: ``True``.
        normalize (bool): Whether the representations are divided by their lengths. Default: ``True``.
        towers (int): 1 or 2. Default: ``2``.
        block_rows (int): Rows of a block, at least a 32nd of all. Default: ``256``.

    Inputs:
        - **first** (Tensor) - Representations of shape :math:`(N, D)`.
        - **second** (Tensor) - Those of the other tower, of the same shape; not for one tower.
        - **labels** (Tensor) - Classes, integers of shape :math:`(N,)`. Optional for two towers.

    Outputs:
        The loss, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the inputs are not those of so many towers.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import ops
        >>> from ms_gradaccum import ContrastiveLoss
        >>> rows = ops.eye(4, 4)
        >>> print(round(float(ContrastiveLoss(temperature=1.0)(rows, rows)), 4))  # log(e + 3) - 1
        0.7437
    """

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
        temperature = check_positive_float(_OWNER, "temperature", temperature, "CLIP begins with 0.07.")
        learnable = check_bool(_OWNER, "learnable", learnable, "False keeps the temperature as it is.")
        self.normalize = check_bool(_OWNER, "normalize", normalize, "False takes the rows as they are.")
        self.towers = check_positive_int(_OWNER, "towers", towers, "It counts the representations of a row.", most=2)
        block_rows = check_positive_int(_OWNER, "block_rows", block_rows, "Fewer rows take less memory.")
        value = Tensor(-math.log(temperature), ms.float32)
        self.logit_scale = Parameter(value, name="logit_scale", requires_grad=learnable)
        self.log_sum_exps = LogSumExps(block_rows, towers == 1)
        self.first_alike = FirstAlike(block_rows)

    def construct(self, first: Tensor, *rest: Tensor) -> Tensor:
        if len(rest) not in ((1,) if self.towers == 1 else (1, 2)):
            _refuse_inputs(self.towers, 1 + len(rest))
        second = first if self.towers == 1 else rest[0]
        labels = rest[self.towers - 1] if len(rest) == self.towers else None
        _check_shapes(first.shape, second.shape, None if labels is None else labels.shape)
        first, second = self._unit(first), self._unit(second)
        scaled = first * ops.exp(self.logit_scale)
        sums = self.log_sum_exps(scaled, second)
        if labels is None:
            # Twice: each direction has one positive of each row.
            return (sums[0] + sums[1] - 2.0 * (scaled * second).sum(1)).mean() / 2.0
        rows = first.shape[0]
        places = ops.stop_gradient(self.first_alike(labels.reshape(-1)))
        # Sums over the rows of one label, at the place of the first of them.
        counts = ops.unsorted_segment_sum(ops.ones((rows,), ms.float32), places, rows)[places]
        others = ops.unsorted_segment_sum(second, places, rows)[places]
        if self.towers == 1:
            others, counts = others - second, counts - 1.0
            counted = as_dtype(counts > 0, ms.float32)
            each = sums[0] - (scaled * others).sum(1) / ops.maximum(counts, Tensor(1.0, ms.float32))
            return (each * counted).sum() / ops.maximum(counted.sum(), Tensor(1.0, ms.float32))
        # The sum over i and j in P_i of s_ij / |P_i| is the same in both directions, since both have the same labels.
        return (sums[0] + sums[1] - 2.0 * (scaled * others).sum(1) / counts).mean() / 2.0

    def _unit(self, rows: Tensor) -> Tensor:
        rows = as_dtype(rows, ms.float32)
        return rows * ops.rsqrt(ops.square(rows).sum(1, keepdims=True) + 1e-12) if self.normalize else rows


class LogSumExps(nn.Cell):
    """The logarithms of the sums of exponentials of the products of rows with rows, along both axes.

    Args:
        block_rows: Rows whose products exist at a time.
        is_one: Whether the two are representations of the same rows, none of which counts for itself.
    """

    def __init__(self, block_rows: int, is_one: bool) -> None:
        super().__init__(auto_prefix=False)
        self.block_rows = block_rows
        self.is_one = is_one

    def construct(self, a: Tensor, b: Tensor) -> Tensor:
        """Return those of each row of ``a``, and below them those of each row of ``b``; zeros if these are one."""
        rows = a.shape[0]
        by_row: tuple[Tensor, ...] = ()
        largest = ops.zeros((b.shape[0],), ms.float32) + _NONE
        total = ops.zeros((b.shape[0],), ms.float32)
        for begin, end in blocks_of(rows, self.block_rows):
            # One after the other, or the products of all blocks would be there at a time.
            products = self.products(ops.depend(a[begin:end], (by_row, total)), b, begin, end)
            most = ops.amax(products, 1, keepdims=True)
            by_row += (most.reshape(-1) + ops.log(ops.exp(products - most).sum(1)),)
            if not self.is_one:
                larger = ops.maximum(largest, ops.amax(products, 0))
                total = total * ops.exp(largest - larger) + ops.exp(products - larger).sum(0)
                largest = larger
        by_column = total if self.is_one else largest + ops.log(total)
        return ops.stack((ops.concat(by_row), by_column))

    def products(self, part: Tensor, b: Tensor, begin: int, end: int) -> Tensor:
        """Return the products of some rows with all of ``b``."""
        products = ops.matmul(part, b.T)
        if self.is_one:
            itself = ops.arange(begin, end).reshape(-1, 1) == ops.arange(0, b.shape[0]).reshape(1, -1)
            products = ops.masked_fill(products, itself, Tensor(_NONE, ms.float32))
        return products

    def bprop(self, a: Tensor, b: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients, from the products computed once more."""
        a_grads: tuple[Tensor, ...] = ()
        b_grad = ops.zeros(b.shape, ms.float32)
        for begin, end in blocks_of(a.shape[0], self.block_rows):
            part = ops.depend(a[begin:end], (a_grads, b_grad))
            products = self.products(part, b, begin, end)
            weights = ops.exp(products - out[0][begin:end].reshape(-1, 1)) * dout[0][begin:end].reshape(-1, 1)
            if not self.is_one:
                weights = weights + ops.exp(products - out[1]) * dout[1]
            a_grads += (ops.matmul(weights, b),)
            b_grad = b_grad + ops.matmul(weights.T, part)
        return ops.concat(a_grads), b_grad


class FirstAlike(nn.Cell):
    """For each label, the place of the first one that is equal."""

    def __init__(self, block_rows: int) -> None:
        super().__init__(auto_prefix=False)
        self.block_rows = block_rows

    def construct(self, labels: Tensor) -> Tensor:
        rows = labels.shape[0]
        places: tuple[Tensor, ...] = ()
        # The first one is the one that is worth most.
        worth = ops.cast(ops.arange(rows, 0, -1), ms.float32)
        for begin, end in blocks_of(rows, self.block_rows):
            part = ops.depend(labels[begin:end], places)
            alike = ops.cast(part.reshape(-1, 1) == labels.reshape(1, -1), ms.float32)
            places += (rows - ops.cast(ops.amax(alike * worth, 1), ms.int32),)
        return ops.concat(places)


@_primexpr
def blocks_of(rows: int, block_rows: int) -> tuple[tuple[int, int], ...]:
    """Return where each block of rows begins and ends."""
    size = max(block_rows, -(-rows // _MOST_BLOCKS))
    return tuple((begin, min(begin + size, rows)) for begin in range(0, rows, size))


@_primexpr
def _refuse_inputs(towers: int, count: int) -> None:
    inputs = "representations and labels" if towers == 1 else "two representations, and labels or not"
    raise ValueError(
        f"For '{_OWNER}', the inputs with towers={towers} must be {inputs}, but got {count}. Give the outputs of the "
        f"network first, and then the labels."
    )


@_primexpr
def _check_shapes(first: Any, second: Any, labels: Any) -> None:
    if len(first) == 2 and tuple(first) == tuple(second) and (labels is None or math.prod(labels) == first[0]):
        return
    shapes = ", ".join(str(tuple(shape)) for shape in (first, second, labels) if shape is not None)
    raise ValueError(
        f"For '{_OWNER}', the representations must be of one shape (rows, length), with a label for each row if there "
        f"are labels, but got {shapes}. Project what the towers return to one length."
    )
