"""Cross-entropy of tokens, block by block, with or without the head that computes their logits."""

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import functional as F

from ms_gradaccum.backend.arithmetic import Tensors, as_dtype
from ms_gradaccum.backend.mindspore_private import primexpr

# A table of the default has at least 16 MiB in float32, and more where that would be more blocks than these: in GRAPH
# mode each block is compiled.
_LOGITS_OF_BLOCK = 2**22
_MOST_BLOCKS = 32
# In a block of nothing but words whose bias is -Inf, the softmax would be NaN.
_LEAST_BIAS = -1e30
_INT32_MAX = 2**31 - 1
# Begin and end of rows. The end of all rows is None.
Rows = tuple[int, int | None]
# The number of a block's words, these words, and its tokens.
Block = tuple[int, Rows, Rows]
_softmax = ops.Softmax(-1)
_argmax = ops.ArgMaxWithValue(1)
_stack = ops.Stack()
_add_bias = ops.BiasAdd()
_add_elements = ops.TensorScatterElements(1, "add")
_product = ops.MatMul()
_product_of_transposed = ops.MatMul(transpose_a=True)
_product_with_transposed = ops.MatMul(transpose_b=True)


class BlockwiseCrossEntropy(nn.Cell):
    """Weighted sum of the cross-entropy of all tokens, and what the backward pass needs to know of their softmax.

    The logits of a block are computed in the forward pass, and again in the backward pass, so that no table of all
    tokens and words exists. The longer side of the table is cut, if there is a head: a block has all tokens and some
    words, whose gradient is final after the block, or some tokens and all words. The gradient of the side that is not
    cut is added up. Given logits are cut by tokens. Logits, log-sum-exps and sums over blocks are in float32.

    Nothing of a block is broadcast by arithmetic: on CPU, MindSpore stores two index lists of the result's size for
    each such operator, as long as its graph lives. BroadcastTo and BiasAdd store none.
    """

    def __init__(
        self,
        has_head: bool,
        has_bias: bool,
        block_tokens: int | None,
        label_smoothing: float,
        z_loss: float,
        logit_softcap: float | None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.has_head = has_head
        self.has_bias = has_bias
        self.block_tokens = block_tokens
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_softcap = logit_softcap

    def construct(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, token_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum, the log-sum-exp of each token, and the probability of each block of words for each token.

        Without a head, ``hidden`` are the logits, and nothing reads ``weight``. The products have the dtype of
        ``hidden``. The labels are valid classes.
        """
        blocks, block_words = self.blocks(hidden, weight)
        parts: Tensors = ()
        for number, words, tokens in blocks:
            place = label_in_block(column(labels, tokens), number, block_words)[1]
            part = self.numbers_of(
                rows(hidden, tokens), rows(weight, words), self.bias_of(words, bias), place
            )
            parts += (part,)
            # The blocks run one after the other, so that their logits do not exist at the same time.
            hidden = ops.depend(hidden, part)
            weight = ops.depend(weight, part)
        # Each has a row for each block of words, and a column for each token.
        numbers = joined(parts, 1 if blocks[-1][0] > 0 else 2)
        peaks = numbers[0]
        peak = ops.amax(peaks, 0, True)
        # The sums of the exponentials of all logits minus the peak.
        sums = ops.exp(peaks - peak) / numbers[1]
        total = sums.sum(0, keepdims=True)
        log_of_total = ops.log(total)
        log_sum_exp = peak + log_of_total
        losses = (
            peak - ops.gather_d(numbers[2], 0, labels.reshape(1, -1) // block_words) + log_of_total
        )
        if self.label_smoothing > 0:
            of_all_classes = log_sum_exp - numbers[3].sum(0, keepdims=True) / self.classes(
                hidden, weight
            )
            losses = losses * (1 - self.label_smoothing) + of_all_classes * self.label_smoothing
        if self.z_loss > 0:
            losses = losses + ops.square(log_sum_exp) * self.z_loss
        return (losses * token_weights.reshape(1, -1)).sum(), log_sum_exp, sums / total

    def numbers_of(self, part: Tensor, head: Tensor, bias: Tensor, place: Tensor) -> Tensor:
        """Return for each token the largest logit, its share of the softmax, the logit at ``place``, and the sum."""
        logits = self.logits(part, as_dtype(head, part.dtype), bias)
        # CPU's LogSoftmax would be off by 3e-6, which is much of a small loss.
        place_of_peak, peak = _argmax(logits)
        share_of_peak = ops.gather_d(_softmax(logits), 1, place_of_peak.reshape(-1, 1)).reshape(
            1, -1
        )
        numbers: Tensors = (
            peak.reshape(1, -1),
            share_of_peak,
            ops.gather_d(logits, 1, place).reshape(1, -1),
        )
        if self.label_smoothing > 0:
            numbers += (logits.sum(1).reshape(1, -1),)
        # Not in a list comprehension, of which the compiler would keep 3 MB for each block.
        return _stack(numbers)

    def bprop(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradients. The logits are computed again."""
        blocks, block_words = self.blocks(hidden, weight)
        cuts_words = blocks[-1][0] > 0
        rates = token_weights * dout[0]
        factors = rates.reshape(1, -1)
        if self.z_loss > 0:
            factors = factors + factors * out[1] * (2 * self.z_loss)
        # The softmax of a block times its probability is the softmax of all words.
        factors = ops.unstack(factors * out[2])
        hidden_grads: Tensors = ()
        weight_grads: Tensors = ()
        bias_grads: Tensors = ()
        of_all = rates * (self.label_smoothing / self.classes(hidden, weight))
        for number, words, tokens in blocks:
            is_here, place = label_in_block(column(labels, tokens), number, block_words)
            of_label = ops.select(is_here, column(rates, tokens) * (self.label_smoothing - 1), 0.0)
            grads = self.grads_of(
                rows(hidden, tokens),
                rows(weight, words),
                self.bias_of(words, bias),
                place,
                of_label,
                column(of_all, tokens),
                column(factors[number], tokens),
            )
            hidden_grads = collected(hidden_grads, grads[0], not cuts_words)
            weight_grads = collected(weight_grads, grads[1], cuts_words)
            bias_grads = collected(bias_grads, grads[2], cuts_words and self.has_bias)
            done = (hidden_grads[-1], weight_grads[-1], bias_grads[-1])
            hidden = ops.depend(hidden, done)
            weight = ops.depend(weight, done)
        # Neither `joined` nor `as_dtype`: after many blocks, MindSpore's compiler fails at a function that is called
        # for the first time.
        hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else ops.concat(hidden_grads)
        weight_grad = weight_grads[0] if len(weight_grads) == 1 else ops.concat(weight_grads)
        bias_grad = bias_grads[0] if len(bias_grads) == 1 else ops.concat(bias_grads)
        if weight.dtype != ms.float32:
            weight_grad = ops.cast(weight_grad, weight.dtype)
        if hidden.dtype != ms.float32:
            hidden_grad = ops.cast(hidden_grad, hidden.dtype)
        bias_grad = ops.cast(bias_grad, bias.dtype)
        return (
            hidden_grad,
            weight_grad,
            bias_grad,
            ops.zeros_like(labels),
            ops.zeros_like(token_weights),
        )

    def grads_of(
        self,
        part: Tensor,
        head: Tensor,
        bias: Tensor,
        place: Tensor,
        of_label: Tensor,
        of_all: Tensor,
        factor: Tensor,
    ) -> Tensors:
        """Return the gradients of a block's hidden states, weight and bias. Those of the stand-ins are any numbers."""
        head = as_dtype(head, part.dtype)
        # The logits have no name, with which PYNATIVE mode would keep them.
        grad = self.grad_of_logits(self.logits(part, head, bias), place, of_label, of_all, factor)
        of_weight = bias
        of_bias = bias
        if self.has_bias:
            of_bias = _product_of_transposed(ops.ones_like(factor), grad).reshape(-1)
        grad = as_dtype(grad, part.dtype)
        if self.has_head:
            of_weight = as_dtype(_product_of_transposed(grad, part), ms.float32)
            grad = as_dtype(_product(grad, head), ms.float32)
        return grad, of_weight, of_bias

    def grad_of_logits(
        self, logits: Tensor, place: Tensor, of_label: Tensor, of_all: Tensor, factor: Tensor
    ) -> Tensor:
        """Return the gradient of the products with the head. All arguments but the logits are columns."""
        spread = ops.BroadcastTo((-1, logits.shape[1]))
        # A graph would spread the columns of all blocks at its begin.
        grad = _softmax(logits) * spread(ops.depend(factor, logits))
        if self.label_smoothing > 0:
            grad = grad - spread(ops.depend(of_all, grad))
        grad = _add_elements(grad, place, of_label)
        if self.logit_softcap is not None:
            grad = grad * (1 - ops.square(logits * (1 / self.logit_softcap)))
        return grad

    def bias_of(self, words: Rows, bias: Tensor) -> Tensor:
        """Return the bias of a block of words, or the stand-in for none."""
        return rows(bias, words) if self.has_bias else bias

    def logits(self, part: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        if self.has_head:
            part = _product_with_transposed(part, head)
        logits = as_dtype(part, ms.float32)
        if self.has_bias:
            logits = _add_bias(logits, ops.maximum(as_dtype(bias, ms.float32), _LEAST_BIAS))
        if self.logit_softcap is not None:
            logits = ops.tanh(logits * (1 / self.logit_softcap)) * self.logit_softcap
        return logits

    def blocks(self, hidden: Tensor, weight: Tensor) -> tuple[tuple[Block, ...], int]:
        """Return the blocks, and the number of words of each but the last."""
        # The compiler knows the number of tokens, unless set_inputs() has left it open.
        if not F.isconstant(hidden.shape):
            return ((0, (0, None), (0, None)),), _INT32_MAX
        blocks: tuple[tuple[Block, ...], int] = blocks_of(
            hidden.shape[0], self.classes(hidden, weight), self.has_head, self.block_tokens
        )
        return blocks

    def classes(self, hidden: Tensor, weight: Tensor) -> int:
        classes: int = weight.shape[0] if self.has_head else hidden.shape[1]
        return classes


def rows(values: Tensor, limits: Rows) -> Tensor:
    """Return some rows. All rows are the tensor itself, which a slice would copy."""
    return values if limits[1] is None else values[limits[0] : limits[1]]


def column(values: Tensor, limits: Rows) -> Tensor:
    return rows(values, limits).reshape(-1, 1)


def joined(parts: Tensors, axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.concat(parts, axis)


def collected(parts: Tensors, part: Tensor, has_own_rows: bool) -> Tensors:
    """Return the parts of a gradient with that of one more block, or, if all have the same rows, their sum."""
    if has_own_rows or len(parts) == 0:
        return parts + (part,)
    return (parts[0] + part,)


def label_in_block(labels: Tensor, number: int, block_words: int) -> tuple[Tensor, Tensor]:
    """Return which labels are words of a block, and their places in it. The others have the place 0."""
    is_here = ops.equal(labels // block_words, number)
    return is_here, ops.select(is_here, labels % block_words, 0)


@primexpr
def blocks_of(
    tokens: int, classes: int, has_head: bool, block_tokens: int | None
) -> tuple[tuple[Block, ...], int]:
    """Return the blocks of a table of logits, and the number of words of each but the last."""
    whole: Rows = (0, None)
    limit = max(_LOGITS_OF_BLOCK, tokens * classes // _MOST_BLOCKS)
    if block_tokens is not None:
        limit = block_tokens * classes
    if has_head and classes > tokens:
        words = limit // tokens
        return tuple((i, part, whole) for i, part in enumerate(cut(classes, words))), words
    return tuple((0, whole, part) for part in cut(tokens, limit // classes)), classes


def cut(length: int, size: int) -> tuple[Rows, ...]:
    """Return the begin and end of each part of rows."""
    if length <= size:
        return ((0, None),)
    size = max(size, 1)
    return tuple((begin, min(begin + size, length)) for begin in range(0, length, size))
