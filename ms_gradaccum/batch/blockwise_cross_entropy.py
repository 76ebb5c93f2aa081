"""Cross-entropy of tokens, block by block, with or without the head that computes their logits."""

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import functional as F

from ms_gradaccum.backend.arithmetic import Tensors, as_dtype
from ms_gradaccum.backend.mindspore_private import primexpr

# The blocks of the default have so many logits, 32 MiB in float32.
_LOGITS_OF_BLOCK = 2**23
_LEAST_TOKENS = 128
Block = tuple[int, int | None]
_softmax = ops.Softmax(-1)
_argmax = ops.ArgMaxWithValue(1)
_add_bias = ops.BiasAdd()
_add_elements = ops.TensorScatterElements(1, "add")
_product = ops.MatMul()
_product_of_transposed = ops.MatMul(transpose_a=True)
_product_with_transposed = ops.MatMul(transpose_b=True)


class BlockwiseCrossEntropy(nn.Cell):
    """Weighted sum of the cross-entropy of all tokens, and the log-sum-exp of each token for the backward pass.

    The logits of a block of tokens are computed in the forward pass, and again in the backward pass, so that no table
    of all tokens and classes exists. Logits, log-sum-exps and the sums over blocks are in float32.

    Nothing is broadcast by arithmetic: on CPU, MindSpore stores two index lists of the result's size for each such
    operator, as long as its graph lives. BroadcastTo and BiasAdd store none.
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
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the log-sum-exps.

        Without a head, ``hidden`` are the logits, and nothing reads ``weight``. The products have the dtype of
        ``hidden``. The labels are valid classes.
        """
        head = as_dtype(weight, hidden.dtype)
        total = Tensor(0.0, ms.float32)
        log_sum_exps: Tensors = ()
        for begin, end in self.blocks(hidden, weight):
            # The blocks run one after the other, so that their logits do not exist at the same time.
            part = ops.depend(rows(hidden, begin, end), total)
            losses, log_sum_exp = self.losses(self.logits(part, head, bias), column(labels, begin, end))
            total = total + (losses * rows(token_weights, begin, end)).sum()
            log_sum_exps += (log_sum_exp,)
        return total, joined(log_sum_exps)

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the log-sum-exp of each token of a block."""
        # CPU's LogSoftmax would be off by 3e-6, which is much of a small loss.
        place_of_peak, peak = _argmax(logits)
        share_of_peak = ops.gather_d(_softmax(logits), 1, place_of_peak.reshape(-1, 1)).reshape(-1)
        log_of_share = ops.log(share_of_peak)
        log_sum_exp = peak - log_of_share
        losses = peak - ops.gather_d(logits, 1, labels).reshape(-1) - log_of_share
        if self.label_smoothing > 0:
            of_all_classes = log_sum_exp - logits.mean(1)
            losses = losses * (1 - self.label_smoothing) + of_all_classes * self.label_smoothing
        if self.z_loss > 0:
            losses = losses + ops.square(log_sum_exp) * self.z_loss
        return losses, log_sum_exp

    def bprop(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        out: tuple[Tensor, ...],
        dout: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Return the gradients. The logits are computed again."""
        head = as_dtype(weight, hidden.dtype)
        rates = token_weights * dout[0]
        factors = rates
        if self.z_loss > 0:
            factors = rates + rates * out[1] * (2 * self.z_loss)
        nothing = ops.zeros_like(token_weights)
        hidden_grads: Tensors = ()
        # Those of the stand-ins, until the first block. Zeros of their size would be constants, which are never freed.
        weight_grad = nothing
        bias_grad = nothing
        for begin, end in self.blocks(hidden, weight):
            part = ops.depend(rows(hidden, begin, end), (hidden_grads, weight_grad, bias_grad))
            rate = column(rates, begin, end)
            factor = column(factors, begin, end)
            # The logits have no name, with which PYNATIVE mode would keep them until the next block.
            grad = self.grad_of_logits(self.logits(part, head, bias), column(labels, begin, end), rate, factor)
            if self.has_bias:
                of_bias = _product_of_transposed(ops.ones_like(rate), grad).reshape(-1)
                bias_grad = of_bias if begin == 0 else bias_grad + of_bias
            grad = as_dtype(grad, hidden.dtype)
            if self.has_head:
                of_weight = as_dtype(_product_of_transposed(grad, part), ms.float32)
                weight_grad = of_weight if begin == 0 else weight_grad + of_weight
                grad = _product(grad, head)
            hidden_grads += (grad,)
        # Not `as_dtype`: after many blocks, MindSpore's compiler fails at a function that is called for the first time.
        if weight.dtype != ms.float32:
            weight_grad = ops.cast(weight_grad, weight.dtype)
        bias_grad = ops.cast(bias_grad, bias.dtype)
        return joined(hidden_grads), weight_grad, bias_grad, ops.zeros_like(labels), nothing

    def grad_of_logits(self, logits: Tensor, labels: Tensor, rates: Tensor, factors: Tensor) -> Tensor:
        """Return the gradient of the products with the head. All arguments but the logits are columns."""
        spread = ops.BroadcastTo((-1, logits.shape[1]))
        # Columns are spread when their block needs them. A graph would spread those of all blocks first.
        grad = _softmax(logits) * spread(ops.depend(factors, logits))
        if self.label_smoothing > 0:
            grad = grad - spread(ops.depend(rates, grad) * (self.label_smoothing / logits.shape[1]))
        grad = _add_elements(grad, labels, rates * (self.label_smoothing - 1))
        if self.logit_softcap is not None:
            grad = grad * (1 - ops.square(logits * (1 / self.logit_softcap)))
        return grad

    def logits(self, part: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        if self.has_head:
            part = _product_with_transposed(part, head)
        logits = as_dtype(part, ms.float32)
        if self.has_bias:
            logits = _add_bias(logits, as_dtype(bias, ms.float32))
        if self.logit_softcap is not None:
            logits = ops.tanh(logits * (1 / self.logit_softcap)) * self.logit_softcap
        return logits

    def blocks(self, hidden: Tensor, weight: Tensor) -> tuple[Block, ...]:
        # The compiler knows the number of tokens, unless set_inputs() has left it open.
        if not F.isconstant(hidden.shape):
            return ((0, None),)
        classes = weight.shape[0] if self.has_head else hidden.shape[1]
        blocks: tuple[Block, ...] = blocks_of(hidden.shape[0], classes, self.block_tokens)
        return blocks


def rows(values: Tensor, begin: int, end: int | None) -> Tensor:
    """Return the rows of a block. The only block is the tensor itself, which a slice would copy."""
    return values if end is None else values[begin:end]


def column(values: Tensor, begin: int, end: int | None) -> Tensor:
    return rows(values, begin, end).reshape(-1, 1)


def joined(parts: Tensors) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.concat(parts)


@primexpr
def blocks_of(tokens: int, classes: int, block_tokens: int | None) -> tuple[Block, ...]:
    """Return the begin and end of each block of tokens. An only block has no end."""
    size = block_tokens or max(_LEAST_TOKENS, _LOGITS_OF_BLOCK // classes)
    if tokens <= size:
        return ((0, None),)
    return tuple((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))
