"""Reference steps on the whole batch, with which windows and partitioned programs are compared."""

from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.training.train_step import TrainOneStepCell


class MeanLoss(nn.Cell):
    """The loss and the weight of a whole batch."""

    def __init__(self, weighted_loss: WeightedLoss) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss

    def construct(self, *tensors: Any) -> tuple[Tensor, Tensor]:
        sums = self.weighted_loss(Tensor(1.0, ms.float32), *tensors)
        return sums[0] * reciprocal(sums[1]), sums[1]


class WholeBatch(nn.Cell):
    """The loss, the weight and the gradient of a whole batch."""

    def __init__(self, weighted_loss: WeightedLoss, parameters: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.loss = MeanLoss(weighted_loss)
        self.loss_and_grads = ops.value_and_grad(self.loss, None, parameters, has_aux=True)
        self.map = ops.HyperMap()
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, *tensors: Any) -> tuple[Any, ...]:
        (loss, weight), grads = self.loss_and_grads(*tensors)
        return loss, weight, self.map(_dense, grads)


_dense = ops.MultitypeFuncGraph("dense_gradient")


@_dense.register("Tensor")
def _keep(grad: Tensor) -> Tensor:
    return grad


@_dense.register("RowTensor")
def _scatter(grad: Any) -> Tensor:
    # The gradient of a sparse lookup has the rows that were read; a row can occur more than once.
    return ops.unsorted_segment_sum(ops.cast(grad.values, ms.float32), grad.indices, grad.dense_shape[0])


class WholeBatchStep(nn.Cell):
    """An update with one gradient of the whole batch, without micro batches, ranks and loss scale.

    Args:
        step: The step whose network, optimizer and clip it takes.
    """

    def __init__(self, step: TrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = step.optimizer
        self.whole = WholeBatch(step.network.whole_loss_of(), self.optimizer.parameters)
        clip = step.body.clip
        self.max_norm: Any = getattr(clip, "max_norm", None)
        self.limit: Any = getattr(clip, "limit", None)

    def construct(self, *inputs: Any) -> Tensor:
        loss, _, grads = self.whole(*inputs)
        if self.limit is not None:
            grads = ops.clip_by_value(grads, -self.limit, self.limit)
        elif self.max_norm is not None:
            grads = ops.clip_by_global_norm(grads, self.max_norm)
        return ops.depend(loss, self.optimizer(grads))
