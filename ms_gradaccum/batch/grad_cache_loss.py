"""A loss over all rows of a batch together, and its substitute in micro batches after the first pass.

After L. Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.
"""

from collections.abc import Callable

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import _primexpr

from ms_gradaccum._checks import FrozenAfterInit, check_cell, check_construct, check_int, require
from ms_gradaccum.backend.arithmetic import as_dtype
from ms_gradaccum.backend.tensors import scalar
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss

_OWNER = "GradCacheLoss"
_OUTPUT_REMEDY = "Return a tensor or a tuple of tensors with a row per row of the batch; put the rest into loss_fn."
_HALF = (ms.float16, ms.bfloat16)


class GradCacheLoss(FrozenAfterInit, nn.Cell):
    r"""A network and a loss that looks at all rows of a batch together: contrastive, ranking, correlation, batch Dice.

    Inside :class:`GradAccumulation` it is trained with the gradient of the whole batch, over all processes, with the
    memory of a micro batch: a first pass keeps only the outputs of all micro batches, and the gradient of `loss_fn`
    with respect to them starts the backward passes of a second pass.

    Anywhere else, for example in evaluation, it is an ordinary loss cell. With `accumulation_steps` the loss of the
    window is the mean of its batches' losses, weighted by their rows.

    Parameters that the forward pass changes (averages, counters) are changed once per micro batch. If the second pass
    does not reproduce the outputs of the first one, for example because of Dropout, the training step raises a
    RuntimeError. :class:`ReplayDropout` draws the same masks again.

    Args:
        backbone (Cell): Network that returns a tensor or a tuple of tensors, with the rows of its inputs on axis 0.
            Gradients flow through floating-point outputs. 16-bit outputs are passed to `loss_fn` in float32.
        loss_fn (Cell): Called with the outputs of `backbone` and the last `labels` inputs, of all rows together. It
            returns a floating-point scalar, the loss of the batch, and may have parameters.
        labels (int): Number of inputs, the last ones, that go to `loss_fn` instead of `backbone`. Default: ``0``.

    Inputs:
        - **\*inputs** - Inputs of `backbone`, and after them those of `loss_fn`.

    Outputs:
        The loss that `loss_fn` returns.

    Raises:
        TypeError: If an argument has the wrong type, a subclass its own `construct`, or a backbone returns no tensors.
        ValueError: If `labels` is negative, or all of the inputs; later, if an output lacks the rows on axis 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_gradaccum import ContrastiveLoss, GradAccumulation, GradCacheLoss, TrainOneStepCell
        >>> class Towers(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.image, self.text = nn.Dense(8, 4), nn.Dense(6, 4)
        ...     def construct(self, image, text):
        ...         return self.image(image), self.text(text)
        >>> network = GradCacheLoss(Towers(), ContrastiveLoss())
        >>> optimizer = nn.SGD(network.trainable_params(), 0.1)
        >>> train_step = TrainOneStepCell(GradAccumulation(network, micro_size=4), optimizer)
        >>> image, text = (Tensor(np.random.rand(16, length).astype(np.float32)) for length in (8, 6))
        >>> output = train_step(image, text)  # 16 rows, each with 15 negatives, in micro batches of 4
        >>> print(output.weight)
        16.0
    """

    __call__: Callable[..., Tensor]

    def __init__(self, backbone: nn.Cell, loss_fn: nn.Cell, labels: int = 0) -> None:
        super().__init__(auto_prefix=False)
        check_construct(_OWNER, type(self), GradCacheLoss, "Put what it does into backbone or loss_fn.")
        self.backbone = check_cell(_OWNER, "backbone", backbone, "Give the network that returns representations.")
        self.loss_fn = check_cell(_OWNER, "loss_fn", loss_fn, "Give the cell that is called with all of them.")
        remedy = "It counts the last inputs, which go to loss_fn."
        self.labels = check_int(_OWNER, "labels", labels, remedy)
        require(labels >= 0, _OWNER, "labels", "an int of at least 0", labels, remedy)
        self._get_attr_from_cell(backbone)
        self._is_built = True

    def construct(self, *inputs: object) -> Tensor:
        end = len(inputs) - self.labels
        if end < 1:
            _refuse_inputs(len(inputs), self.labels)
        return self.loss_fn(*self.outputs(inputs[:end]), *inputs[end:])

    def outputs(self, inputs: tuple[object, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of the backbone in the form that `loss_fn` takes."""
        returned = self.backbone(*inputs)
        items = returned if isinstance(returned, (tuple, list)) else (returned,)
        outputs: tuple[Tensor, ...] = ()
        for item in items:
            if not isinstance(item, Tensor):
                _refuse_output()
            # In 16 bits the gradients of a mean over many rows would underflow.
            outputs += (as_dtype(item, ms.float32) if item.dtype in _HALF else item,)
        return outputs


class CachedLoss(WeightedLoss):
    """Substitute that a micro batch differentiates in place of the loss. `CachePass` has computed its gradient.

    It returns the share of the loss, the share, and the `distance` of each output from the first pass's output.
    """

    counts_rows = True
    is_cached = True

    def __init__(self, network: GradCacheLoss, structure: SequenceOf | None = None) -> None:
        super().__init__(network, structure)
        self.own = ParameterTuple(network.loss_fn.trainable_params())

    def construct(self, share: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        items = tensors if self.unflatten is None else self.unflatten(tensors)
        loss, own_grads, firsts, cache = items[0], items[1], items[2], items[3]
        start = Tensor(0.0, ms.float32)
        # A linear function with the gradient of `loss_fn`, so that it is reduced with the network's and counts once.
        for i, parameter in enumerate(self.own):
            start = start + _product(parameter, own_grads[i]) * share
        place = 0
        distances: tuple[Tensor, ...] = ()
        for output in self.network.outputs(items[4:]):
            if output.dtype in mstype.float_type:
                start = start + _product(output, cache[place])
                distances += (distance(ops.stop_gradient(output), firsts[place]),)
                place += 1
        # This has the value of the loss and the gradient of ``start``.
        value = scalar(loss) * share + (start - ops.stop_gradient(start))
        return value, share, ops.stack(distances)


def distance(second: Tensor, first: Tensor) -> Tensor:
    """Return the largest difference of two outputs, relative to the largest number in its row. NaN equals NaN."""
    same = ops.logical_or(second == first, ops.logical_and(ops.isnan(second), ops.isnan(first)))
    zeros = ops.zeros_like(first)
    difference = ops.select(same, zeros, ops.abs(second - first)).reshape((first.shape[0], -1))
    size = ops.select(ops.isfinite(first), ops.abs(first), zeros).reshape((first.shape[0], -1))
    rows = ops.amax(size, 1)
    # The rounding error of an element may be that of the row's largest one.
    least = ops.maximum(ops.amax(size) * 0.01, Tensor(1e-30, ms.float32))
    return scalar(ops.amax(ops.amax(difference, 1) / ops.maximum(rows, least)))


def _product(values: Tensor, grads: Tensor) -> Tensor:
    if values.dtype in _HALF:
        values, grads = ops.cast(values, ms.float32), ops.cast(grads, ms.float32)
    return scalar(ops.sum(values * grads))


@_primexpr
def _refuse_inputs(inputs: int, labels: int) -> None:
    raise ValueError(
        f"For '{_OWNER}', there must be more inputs than the {labels} labels, but got {inputs}. Give the inputs of the "
        f"backbone first, and then the labels."
    )


@_primexpr
def _refuse_output() -> None:
    raise TypeError(
        f"For '{_OWNER}', the backbone must return a tensor or a tuple of tensors, but got something else. "
        f"{_OUTPUT_REMEDY}"
    )


def check_output(shape: tuple[int, ...], rows: int) -> None:
    """Raise unless an output of a micro batch of ``rows`` rows has them on axis 0."""
    if not shape or shape[0] != rows:
        raise ValueError(
            f"For '{_OWNER}', the backbone must return tensors with the {rows} rows of the micro batch on axis 0, but "
            f"got one of shape {tuple(shape)}. {_OUTPUT_REMEDY}"
        )
