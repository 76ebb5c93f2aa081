"""The order of an update. No other file knows it."""

from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.loss_weight import WeightedLoss
from ms_gradaccum.optimizers import LearningRate
from ms_gradaccum.parallel.single import SingleProcess


class MicroStep(nn.Cell):
    """Forward and backward of one micro batch, added into the buffer."""

    def __init__(self, weighted_loss: WeightedLoss, buffer: GradBuffer, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss
        self.buffer = buffer
        self.loss_and_grads = ops.value_and_grad(weighted_loss, None, weights, has_aux=True)
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the weight of the window so far."""
        (loss_sum, weight), grads = self.loss_and_grads(rows, *tensors)
        added = self.buffer.add(loss_sum, weight, grads)
        mean_loss = ops.depend(self.buffer.mean_loss(), added)
        return mean_loss, ops.depend(self.buffer.weight + 0.0, added)


class Window(nn.Cell):
    """The end of a window: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, divide by the weight, unscale, finite?, norm, clip, optimizer, clear, report.
    """

    def __init__(self, buffer: GradBuffer, optimizer: nn.Cell, clip: nn.Cell, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer
        self.optimizer = optimizer
        self.clip = clip
        self.parallel = parallel
        self.learning_rate = LearningRate(optimizer)

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """Update once the micro steps behind ``done`` have run. Return the items of a StepOutput."""
        sums = ops.depend(self.parallel.reduce(self.buffer), done)
        loss, weight = ops.depend((self.buffer.mean_loss(), self.buffer.weight + 0.0), sums)
        grads = self.mean_of(sums)
        norm = self.parallel.norm(grads)
        finite = ops.isfinite(norm)
        # A window that weighs nothing (no valid token anywhere) has no mean and makes no update.
        updated = ops.logical_and(finite, ops.greater(weight, 0.0))
        learning_rate = self.learning_rate()
        grads = self.clip(grads, norm)
        clipped_norm = self.clip.norm_after(norm)
        if clipped_norm is None:
            clipped_norm = self.parallel.norm(grads)
        report = (loss, weight, norm, clipped_norm, updated, learning_rate)
        if updated:
            report = ops.depend(report, self.parallel.publish(self.optimizer(grads)))
        report = ops.depend(report, self.buffer.clear())
        loss, weight, norm, clipped_norm, updated, learning_rate = report
        overflow, scale = ops.logical_not(finite), Tensor(1.0, ms.float32)
        # A plain tuple: strict graph syntax knows no NamedTuple.
        return loss, overflow, scale, updated, norm, clipped_norm, learning_rate, weight

    def mean_of(self, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the window's mean gradient in the dtype of each weight."""
        factor = self.buffer.reciprocal_weight()
        grads: tuple[Tensor, ...] = ()
        for total, weight in zip(sums, self.parallel.weights):
            grads += (ops.cast(total * factor, weight.dtype),)
        return grads
