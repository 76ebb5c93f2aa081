"""The loss of a language model as (cross-entropy sum, valid tokens)."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum._checks import (
    MIN_INT,
    FrozenAfterInit,
    check_bool,
    check_cell,
    check_float,
    check_int,
    typed,
)
from ms_gradaccum.backend.arithmetic import as_dtype
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.batch.blockwise_cross_entropy import BlockwiseCrossEntropy
from ms_gradaccum.batch.weighted_loss import first_of

_OWNER = "TokenMeanLoss"
_OWN_LOSS_REMEDY = (
    "A model that computes its own loss needs no TokenMeanLoss: let it return (loss_sum, tokens), "
    "in mindformers by calculate_per_token_loss=True, and give GradAccumulation weighted=True."
)
# What a head may be.
Head: TypeAlias = nn.Cell | Parameter | tuple[Parameter, Parameter]
_INTS = (*mstype.int_type, *mstype.uint_type)


class TokenMeanLoss(FrozenAfterInit, nn.Cell):
    r"""Cross-entropy of a network's logits, summed over the valid tokens, and the number of these tokens.

    In :class:`GradAccumulation`, :class:`TrainOneStepCell`, :class:`Model` and :class:`Accumulator` the sums and the
    numbers of tokens are added over micro batches and ranks, and one division gives the mean over all tokens of the
    window, however they are distributed, without prefetching a window to count its tokens.

    A network that computes its loss itself does not need this cell: let it return `(loss_sum, tokens)`, and give it to
    ``GradAccumulation(network, micro_size, weighted=True)``.

    Labels are aligned with the logits: for a causal language model, shift them in the dataset.

    The loss is computed in blocks, in float32, and its backward pass computes each block again, so that
    nothing but the logits and their gradient has the size of the table of tokens and classes. With `head`, the logits
    of a block are computed there as well, and no table exists at all, neither in training nor in evaluation:

    .. code-block:: python

        loss_cell = TokenMeanLoss(network.body, head=network.head)

    Args:
        backbone (Cell): Network that returns logits of shape :math:`(*, C)` with :math:`C` classes, or hidden states of
            shape :math:`(*, D)` if there is a `head`, alone or before other outputs.
        ignore_index (int): Label of padding, which is ignored. Default: ``-100``.
        head (Union[Cell, Parameter, tuple[Parameter], None]): Linear layer from hidden states to logits: an
            ``nn.Dense``, a ``mint.nn.Linear``, its weight of shape :math:`(C, D)`, or a tuple of weight and bias. The
            table of an embedding, which is also in `backbone`, gets the sum of both gradients. Default: ``None``.
        block_tokens (Union[int, None]): Tokens whose logits fit into a block. With a `head` and fewer tokens than
            classes, a block has as many logits, of all tokens and some classes. By default 16 MiB of logits, or a
            thirty-second part of all. Default: ``None``.

    Keyword Args:
        label_smoothing (float): Share of the label that all classes have, at least 0 and below 1. Default: ``0.0``.
        z_loss (float): Factor of the squared log-sum-exp of a token's logits, which is added to its cross-entropy, at
            least 0. Default: ``0.0``.
        logit_softcap (Union[float, None]): Logits :math:`x` become :math:`c \tanh(x / c)`. Default: ``None``.
        token_weights (bool): Whether a weight for each label is the last input. Default: ``False``.

    Inputs:
        - **\*inputs** - Inputs of `backbone`, and after them:
        - **labels** (Tensor) - Classes, integers of shape :math:`(*)`. A label that is neither a class nor
          `ignore_index` is an error of MindSpore's GatherD.
        - **token_weights** (Tensor) - Numbers of the shape of `labels`, not negative, only with `token_weights`. They
          have no gradient.

    Outputs:
        Tuple of 2 float32 scalars, the sum of the cross-entropy and the number of labels that are not `ignore_index`,
        or the sum of their weights. Both are 0 if no label is valid. With 16-bit hidden states, the products with the
        head are in 16 bits, and logits, sums and the gradient of the head in float32.

    Raises:
        TypeError: If an argument has the wrong type, `backbone` takes the labels itself, or they are not integers.
        ValueError: If an argument is out of range, or the shapes of logits, head, labels and weights do not fit.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_gradaccum import TokenMeanLoss
        >>> backbone = nn.Dense(1, 2, weight_init="zeros", has_bias=False)  # the same probability for both classes
        >>> tokens, labels = np.ones((2, 3, 1), np.float32), np.array([[0, 1, 1], [0, -100, -100]], np.int32)
        >>> loss_sum, valid_tokens = TokenMeanLoss(backbone)(Tensor(tokens), Tensor(labels))
        >>> print(round(float(loss_sum / valid_tokens), 4), valid_tokens)
        0.6931 4.0
    """

    # With this attribute GradAccumulation takes the loss as weighted=True.
    returns_weight = True

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        backbone: nn.Cell,
        ignore_index: int = -100,
        head: Head | None = None,
        block_tokens: int | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_softcap: float | None = None,
        token_weights: bool = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.backbone = check_cell(
            _OWNER, "backbone", backbone, "Give the network that returns logits."
        )
        signature = inspect.signature(backbone.construct)
        needed = [each for each in signature.parameters.values() if each.default is each.empty]
        self.signature = f"construct{signature}"
        self.required = sum(
            each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in needed
        )
        remedy = "It is the label of padding tokens."
        self.ignore_index = check_int(_OWNER, "ignore_index", ignore_index, remedy, least=MIN_INT)
        if block_tokens is not None:
            check_int(_OWNER, "block_tokens", block_tokens, "Fewer tokens take less memory.")
        remedy = "It is the share of the label that all classes have."
        label_smoothing = check_float(
            _OWNER, "label_smoothing", label_smoothing, remedy, least=0, below=1
        )
        z_loss = check_float(_OWNER, "z_loss", z_loss, "0 means none.", least=0)
        if logit_softcap is not None:
            logit_softcap = check_float(
                _OWNER, "logit_softcap", logit_softcap, "None means no cap."
            )
        self.token_weights = check_bool(
            _OWNER, "token_weights", token_weights, "True adds an input after the labels."
        )
        self.head_weight, self.head_bias = _parameters_of(head)
        self.product_dtype = _product_dtype_of(head)
        self.cross_entropy = BlockwiseCrossEntropy(
            self.head_weight is not None,
            self.head_bias is not None,
            block_tokens,
            label_smoothing,
            z_loss,
            logit_softcap,
        )
        self._get_attr_from_cell(backbone)
        self._is_built = True

    def construct(self, *inputs: object) -> tuple[Tensor, Tensor]:
        weights = None
        if self.token_weights:
            weights = inputs[-1]
            inputs = inputs[:-1]
        if len(inputs) - 1 < self.required:
            _refuse_own_loss(self.signature, len(inputs) - 1)
        hidden = first_of(self.backbone(*inputs[:-1]))
        labels: Tensor = inputs[-1]
        _check_dtype(labels.dtype if isinstance(labels, Tensor) else None)
        _check_shapes(hidden.shape if isinstance(hidden, Tensor) else None, labels.shape)
        if self.token_weights:
            _check_weights(weights.shape if isinstance(weights, Tensor) else None, labels.shape)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        labels = ops.cast(labels, ms.int32).reshape(-1)
        is_valid = ops.not_equal(labels, self.ignore_index)
        token_weights = ops.cast(is_valid, ms.float32)
        if self.token_weights:
            token_weights = token_weights * ops.stop_gradient(
                as_dtype(weights, ms.float32)
            ).reshape(-1)
        # Stand-ins, which nothing reads.
        weight = token_weights
        bias = token_weights
        classes = hidden.shape[1]
        if self.head_weight is not None:
            _check_head(self.head_weight.shape, hidden.shape)
            if self.product_dtype is not None:
                hidden = as_dtype(hidden, self.product_dtype)
            # The compiler refuses a parameter itself as input of a cell with a bprop. A reshape copies nothing.
            weight = self.head_weight.reshape(self.head_weight.shape)
            classes = weight.shape[0]
        if self.head_bias is not None:
            bias = self.head_bias.reshape(self.head_bias.shape)
        # MindSpore's kernels would take -1 for the last class.
        labels = ops.select(is_valid, ops.select(labels < 0, classes, labels), 0)
        return self.cross_entropy(hidden, weight, bias, labels, token_weights)[
            0
        ], token_weights.sum()

    def around(self, backbone: nn.Cell, product_dtype: ms.Type) -> "TokenMeanLoss":
        """Return a cell with these settings and parameters around another network, with products of this dtype."""
        head = self.head_weight if self.head_bias is None else (self.head_weight, self.head_bias)
        other = TokenMeanLoss(backbone, self.ignore_index, head, token_weights=self.token_weights)
        other.cross_entropy = self.cross_entropy
        other.product_dtype = product_dtype
        return other


def _parameters_of(head: Any) -> tuple[Parameter | None, Parameter | None]:
    """Return weight and bias of a head."""
    if head is None:
        return None, None
    weight = head
    bias = None
    if isinstance(head, nn.Cell):
        if (
            type(head) not in (nn.Dense, mint.nn.Linear)
            or getattr(head, "activation", None) is not None
        ):
            raise TypeError(
                f"For '{_OWNER}', the argument 'head' must be an nn.Dense or a mint.nn.Linear "
                f"without an activation, but got {type(head).__name__}. If it multiplies by the "
                f"transposed weight, give head=(weight, bias)."
            )
        weight = head.weight
        bias = getattr(head, "bias", None)
    elif isinstance(head, tuple) and len(head) == 2:
        weight, bias = head
    are_parameters = isinstance(weight, Parameter) and (bias is None or isinstance(bias, Parameter))
    if not are_parameters:
        raise TypeError(
            f"For '{_OWNER}', the argument 'head' must be a linear layer, its weight, or a tuple "
            f"of weight and bias, but got {typed(head)}. For example head=network.head."
        )
    if len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(str(each.shape) for each in (weight, bias) if each is not None)
        raise ValueError(
            f"For '{_OWNER}', the argument 'head' must have a weight of shape (classes, width) and "
            f"a bias of shape (classes,), but got {shapes}. Leave the loss without a head, and let "
            f"the backbone return logits."
        )
    return weight, bias


def _product_dtype_of(head: object) -> ms.Type | None:
    """Return the dtype that ``to_float`` has set for a head, or None for that of the hidden states."""
    if not isinstance(head, nn.Cell):
        return None
    flags = head.get_flags()
    for flag, dtype in (("fp16", ms.float16), ("bf16", ms.bfloat16), ("fp32", ms.float32)):
        if flags.get(flag):
            return dtype
    return None


@primexpr
def _refuse_own_loss(signature: str, given: int) -> None:
    raise TypeError(
        f"For '{_OWNER}', the backbone must take all inputs except the labels, which come last, "
        f"but got {signature} for {given} inputs. {_OWN_LOSS_REMEDY}"
    )


@primexpr
def _check_shapes(logits: tuple[int, ...] | None, labels: tuple[int, ...]) -> None:
    if logits is None:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return a tensor of logits, alone or before other "
            f"outputs, but got no tensor. Give the network that returns logits."
        )
    if len(logits) == 0:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return logits with an axis of classes, but got a "
            f"scalar. {_OWN_LOSS_REMEDY}"
        )
    if tuple(logits[:-1]) != tuple(labels):
        raise ValueError(
            f"For '{_OWNER}', the labels must have the shape of the logits without their last "
            f"axis, but got labels of shape {tuple(labels)} and logits of shape {tuple(logits)}. "
            f"Give one label per token."
        )


@primexpr
def _check_head(weight: tuple[int, ...], hidden: tuple[int, ...]) -> None:
    if weight[1] != hidden[1]:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return hidden states of the width {weight[1]} of "
            f"its head, but got {hidden[1]}. Give the part of the network before the head."
        )


@primexpr
def _check_weights(weights: tuple[int, ...] | None, labels: tuple[int, ...]) -> None:
    if weights is None or tuple(weights) != tuple(labels):
        got = (
            "no tensor"
            if weights is None
            else f"{tuple(weights)} for labels of shape {tuple(labels)}"
        )
        raise ValueError(
            f"For '{_OWNER}', the token weights (the last input) must have the shape of the "
            f"labels, but got {got}. Give one weight per label."
        )


@primexpr
def _check_dtype(labels: object) -> None:
    if labels in _INTS:
        return
    got = "no tensor" if labels is None else f"a tensor of {labels}"
    raise TypeError(
        f"For '{_OWNER}', the labels (the last input) must be a tensor of integers, but got {got}. "
        f"Give the class of each token."
    )
