"""The loss of a language model as (cross-entropy sum, valid tokens)."""

import inspect
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import _primexpr

from ms_gradaccum._checks import Settled, check_cell, check_int

_OWNER = "TokenMeanLoss"
_OWN_LOSS_REMEDY = (
    "A model that computes its loss itself goes into GradAccumulation without it: let it return (loss_sum, tokens), in "
    "mindformers with calculate_per_token_loss=True, and set weighted=True."
)
_INTS = (*mstype.int_type, *mstype.uint_type)


class TokenMeanLoss(Settled, nn.Cell):
    r"""Cross-entropy of a network's logits, summed over the valid tokens, and the number of these tokens.

    In :class:`GradAccumulation`, :class:`TrainOneStepCell`, :class:`Model` and :class:`Accumulator` the sums and the
    numbers of tokens are added over micro batches and ranks, and one division gives the mean over all tokens of the
    window, however they are distributed, without prefetching a window to count its tokens.

    A network that computes its loss itself does not need this cell: let it return `(loss_sum, tokens)`, and give it to
    ``GradAccumulation(network, micro_size, weighted=True)``.

    Labels are aligned with the logits: for a causal language model, shift them in the dataset.

    Args:
        backbone (Cell): Network that returns logits of shape :math:`(*, C)` with :math:`C` classes, alone or before
            other outputs.
        ignore_index (int): Label of padding, which is ignored. Default: ``-100``.

    Inputs:
        - **\*inputs** - Inputs of `backbone`, and after them:
        - **labels** (Tensor) - Classes, integers of shape :math:`(*)`.

    Outputs:
        Tuple of 2 float32 scalars, the sum of the cross-entropy and the number of labels that are not `ignore_index`.
        Both are 0 if no label is valid. The cross-entropy of half-precision logits is computed in float32.

    Raises:
        TypeError: If an argument has the wrong type, `backbone` takes the labels itself, or they are not integers.
        ValueError: If `ignore_index` is not an int32, or the shapes of logits and labels do not fit.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

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

    def __init__(self, backbone: nn.Cell, ignore_index: int = -100) -> None:
        super().__init__(auto_prefix=False)
        self.backbone = check_cell(_OWNER, "backbone", backbone, "Give the network that returns logits.")
        signature = inspect.signature(backbone.construct)
        needed = [each for each in signature.parameters.values() if each.default is each.empty]
        self.signature = f"construct{signature}"
        self.required = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in needed)
        self.ignore_index = check_int(_OWNER, "ignore_index", ignore_index, "It is the label of padding.")
        self._get_attr_from_cell(backbone)
        self._is_built = True

    def construct(self, *inputs: object) -> tuple[Tensor, Tensor]:
        if len(inputs) - 1 < self.required:
            _refuse_own_loss(self.signature, len(inputs) - 1)
        logits = self.backbone(*inputs[:-1])
        labels: Tensor = inputs[-1]
        if isinstance(logits, (tuple, list)):
            logits = logits[0] if len(logits) > 0 else None
        _check_dtype(labels.dtype if isinstance(labels, Tensor) else None)
        _check_shapes(logits.shape if isinstance(logits, Tensor) else None, labels.shape)
        logits = ops.cast(logits, ms.float32).reshape(-1, logits.shape[-1])
        labels = ops.cast(labels, ms.int32).reshape(-1)
        loss_sum = ops.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")
        return loss_sum, ops.cast(ops.not_equal(labels, self.ignore_index), ms.float32).sum()


@_primexpr
def _refuse_own_loss(signature: str, given: int) -> None:
    raise TypeError(
        f"For '{_OWNER}', the backbone must take the inputs before the last one, which is the labels, but got "
        f"{signature} for {given} of them. {_OWN_LOSS_REMEDY}"
    )


@_primexpr
def _check_shapes(logits: tuple[int, ...] | None, labels: tuple[int, ...]) -> None:
    if logits is None:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return a tensor of logits, alone or before other outputs, but got no "
            f"tensor. Give the network that returns logits."
        )
    if len(logits) == 0:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return logits with an axis of classes, but got a scalar. "
            f"{_OWN_LOSS_REMEDY}"
        )
    if tuple(logits[:-1]) != tuple(labels):
        raise ValueError(
            f"For '{_OWNER}', the labels must have the shape of the logits without their last axis, but got labels of "
            f"shape {tuple(labels)} and logits of shape {tuple(logits)}. Give one label per token."
        )


@_primexpr
def _check_dtype(labels: object) -> None:
    if labels in _INTS:
        return
    got = "no tensor" if labels is None else f"a tensor of {labels}"
    raise TypeError(
        f"For '{_OWNER}', the labels, its last input, must be a tensor of integers, but got {got}. "
        f"Give the class of each token."
    )
