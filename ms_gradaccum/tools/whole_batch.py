"""The whole batch in one piece, for comparisons with windows and partitioned programs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.tensors import Array, map_tensors
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.training.grad_accumulation import GradAccumulation

Values = dict[str, Array]


class MeanLoss(nn.Cell):
    """The mean loss of some rows, and its weight."""

    def __init__(self, weighted_loss: WeightedLoss) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss

    def construct(self, *tensors: object) -> tuple[Tensor, Tensor]:
        sums = self.weighted_loss(ONE, *tensors)
        return sums[0] * reciprocal(sums[1]), sums[1]


class WholeBatch(nn.Cell):
    """The mean loss of some rows, its weight and its gradient."""

    def __init__(self, weighted_loss: WeightedLoss, parameters: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.loss_and_grads = ops.value_and_grad(MeanLoss(weighted_loss), None, parameters, has_aux=True)
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, *tensors: object) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        (loss, weight), grads = self.loss_and_grads(*tensors)
        return loss, weight, map_tensors(_dense, grads)


_dense = ops.MultitypeFuncGraph("dense_gradient")


@_dense.register("Tensor")
def _keep(grad: Tensor) -> Tensor:
    return grad


@_dense.register("RowTensor")
def _scatter(grad: Any) -> Tensor:
    # The gradient of a sparse lookup contains the rows that were read. A row can occur more than once.
    return ops.unsorted_segment_sum(ops.cast(grad.values, ms.float32), grad.indices, grad.dense_shape[0])


class LossOnly(nn.Cell):
    """The mean loss of a network as its only output, for MindSpore's steps."""

    def __init__(self, network: GradAccumulation) -> None:
        super().__init__(auto_prefix=False)
        self.mean_loss = MeanLoss(network.whole_loss_of())

    def construct(self, *inputs: object) -> Tensor:
        return self.mean_loss(*inputs)[0]


class ClippedOptimizer(nn.Cell):
    """An optimizer whose gradient is first clipped by MindSpore's own functions, with the settings of a step's clip."""

    def __init__(self, optimizer: nn.Cell, clip: object) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameters = optimizer, optimizer.parameters
        self.max_norm, self.limit = getattr(clip, "max_norm", None), getattr(clip, "limit", None)

    def construct(self, grads: tuple[Tensor, ...]) -> Tensor:
        if self.limit is not None:
            grads = ops.clip_by_value(grads, -self.limit, self.limit)
        elif self.max_norm is not None:
            grads = ops.clip_by_global_norm(grads, self.max_norm)
        return self.optimizer(grads)


class Difference(NamedTuple):
    """The largest difference of a parameter's element, the largest change by training, and the parameter's name."""

    difference: float
    moved: float
    farthest: str


def values_of(network: nn.Cell) -> Values:
    """Return the trainable parameters of a network by their indices, since a step may rename them."""
    return {str(i): parameter.asnumpy().copy() for i, parameter in enumerate(network.trainable_params())}


def train_whole(
    loss_cell: nn.Cell, optimizer: nn.Cell, batches: Iterable[Sequence[object]], norms: bool = True
) -> list[tuple[float, float]]:
    """Train with MindSpore's own step. Return each batch's loss and gradient norm (0 without ``norms``)."""
    # In a graph, MindSpore loops over the gradients that it returns, so they must be few.
    step = nn.TrainOneStepCell(loss_cell, optimizer, return_grad=norms)
    reports = []
    for batch in batches:
        loss, grads = step(*batch) if norms else (step(*batch), {})
        norm = math.hypot(*(np.linalg.norm(grad.asnumpy().ravel()) for grad in grads.values()))
        reports.append((float(loss.asnumpy()), norm))
    return reports


def compare(values: Values, whole: Values, start: Values) -> Difference:
    """Compare the parameters after a training with those of the whole batch."""
    apart, moved = (
        {name: float(np.abs(value - each[name]).max(initial=0.0)) for name, value in whole.items()}
        for each in (values, start)
    )
    return Difference(apart[worst(apart)], max(moved.values()), worst(apart))


def worst(differences: dict[str, float]) -> str:
    """Return the name of the largest difference, or of one that is NaN."""
    return max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
