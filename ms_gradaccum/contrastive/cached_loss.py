"""The substitute of a loss over all rows in micro batches, once a first pass has found the loss and its gradient."""

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum.backend.tensors import scalar
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss

OUTPUT_REMEDY = "Return a tensor or a tuple of tensors with a row per row of the batch; put the rest into loss_fn."
HALF = (ms.float16, ms.bfloat16)


class CachedLoss(WeightedLoss):
    """Substitute that a micro batch differentiates in place of the loss. `CachePass` has computed its gradient.

    It returns the share of the loss, the share, and the `distance` of each output from the first pass's output.
    """

    counts_rows = True
    is_prepared = True

    def __init__(self, network: nn.Cell, structure: SequenceOf | None = None) -> None:
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
    if values.dtype in HALF:
        values, grads = ops.cast(values, ms.float32), ops.cast(grads, ms.float32)
    return scalar(ops.sum(values * grads))


def check_rows(outputs: tuple[Tensor, ...], rows: int) -> None:
    """Raise unless the outputs of a micro batch of ``rows`` rows have them on axis 0."""
    for shape in [tuple(output.shape) for output in outputs]:
        if not shape or shape[0] != rows:
            raise ValueError(
                f"For 'GradCacheLoss', the backbone must return tensors with the {rows} rows of the micro batch on "
                f"axis 0, but got one of shape {shape}. {OUTPUT_REMEDY}"
            )
