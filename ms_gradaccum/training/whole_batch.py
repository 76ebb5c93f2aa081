"""The loss and the gradient of rows in one piece, with which windows of micro batches are compared."""

from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.compiled import forget_passes, op_by_op
from ms_gradaccum.backend.kernels import ONE
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import reciprocal


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
        self.map = ops.HyperMap()
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, *tensors: object) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
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


class Eager:
    """Calls a cell op by op."""

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = cell

    def __call__(self, *tensors: Tensor) -> Any:
        # MindSpore divides the gradient of a BCEWithLogitsLoss by the rows of a pass before, if it knows one.
        forget_passes()
        with op_by_op():
            return self.cell(*tensors)
