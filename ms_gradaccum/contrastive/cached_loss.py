"""The substitute of a loss over all rows in micro batches, once a first pass has found the loss and its gradient."""

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.tensors import scalar
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss

OUTPUT_REMEDY = (
    "Return a tensor or a tuple of tensors with a row per row of the batch; put the rest into "
    "loss_fn."
)
_HALF = (ms.float16, ms.bfloat16)


class CachedLoss(WeightedLoss):
    """Substitute that a micro batch differentiates in place of the loss. `CachePass` has computed its gradient.

    It returns the share of the loss, the share, and the `distance` of each output from the first pass's output.
    """

    counts_rows = True
    is_prepared = True

    def __init__(self, network: nn.Cell, structure: SequenceOf | None = None) -> None:
        super().__init__(network, structure)
        self.own = ParameterTuple(network.loss_fn.trainable_params())

    def construct(self, share: Tensor, *tensors: Tensor) -> Tensors:
        items = tensors
        if self.structure is not None:
            items = self.structure.rebuild(tensors)
        loss, own_grads, firsts, cache = items[:4]
        start = Tensor(0.0, ms.float32)
        # A linear function with the gradient of `loss_fn`, so that it is reduced with the network's and counts once.
        for i, parameter in enumerate(self.own):
            start = start + _product(parameter, own_grads[i]) * share
        distances: Tensors = ()
        for output in self.network.outputs(items[4:]):
            if output.dtype in mstype.float_type:
                i = len(distances)
                start = start + _product(output, cache[i])
                distances += (distance(ops.stop_gradient(output), firsts[i]),)
        # This has the value of the loss and the gradient of ``start``.
        value = scalar(loss) * share + (start - ops.stop_gradient(start))
        return value, share, ops.stack(distances)


def distance(second: Tensor, first: Tensor) -> Tensor:
    """Return the largest difference of two outputs, relative to the largest number in its row. NaN equals NaN."""
    both_nan = ops.logical_and(ops.isnan(second), ops.isnan(first))
    is_same = ops.logical_or(second == first, both_nan)
    zeros = ops.zeros_like(first)
    differences = _row_maxima(ops.select(is_same, zeros, ops.abs(second - first)))
    # The rounding error of an element may be that of the row's largest one.
    finite = ops.select(ops.isfinite(first), first, zeros)
    sizes = _row_maxima(ops.abs(finite))
    least = ops.maximum(ops.amax(sizes) * 0.01, Tensor(1e-30, ms.float32))
    return scalar(ops.amax(differences / ops.maximum(sizes, least)))


def _row_maxima(values: Tensor) -> Tensor:
    rows = values.reshape((values.shape[0], -1))
    return ops.amax(rows, 1)


def _product(values: Tensor, grads: Tensor) -> Tensor:
    return scalar(ops.sum(widened(values) * widened(grads)))


def widened(values: Tensor) -> Tensor:
    """Return 16-bit numbers in float32, where the gradients of a mean over many rows do not underflow."""
    if values.dtype in _HALF:
        return ops.cast(values, ms.float32)
    return values


def check_rows(outputs: Tensors, rows: int) -> None:
    """Raise unless the outputs of a micro batch of ``rows`` rows have them on axis 0."""
    for output in outputs:
        if output.shape[:1] != (rows,):
            raise ValueError(
                f"For 'GradCacheLoss', the backbone must return tensors with the {rows} rows of "
                f"the micro batch on axis 0, but got one of shape {output.shape}. {OUTPUT_REMEDY}"
            )
