"""What a training step reports."""

from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import sentence


class StepOutput(NamedTuple):
    """Report of one call of a training step.

    The order is MindSpore's: ``LossMonitor`` reads item 0, ``Model`` item 1, fault tolerance item 2.
    All items are tensors. What only an update can tell is NaN in a call that ended inside a window.

    Attributes:
        loss: Weighted mean loss of the window so far, float32 scalar. On an update it is the loss of the
            whole window: the loss that the same rows give as one batch.
        overflow: Whether the window's gradient had an Inf or a NaN, so that its update was skipped. Bool scalar.
        loss_scale: Factor by which the loss was multiplied before the backward pass. Float32 scalar.
        updated: Whether this call ran the optimizer. Bool scalar.
        grad_norm: Global L2 norm of the window's mean gradient before clipping. Float32 scalar.
        clipped_grad_norm: The same after clipping. Float32 scalar.
        learning_rate: Learning rate of the update: a float32 scalar, or a vector with one entry per parameter
            of the optimizer if its groups have rates of their own.
        weight: Weight of the window so far: rows, or what the network counts (tokens). Float32 scalar.

    Examples:
        >>> from mindspore import Tensor, nn, ops
        >>> from ms_gradaccum import GradAccumulation, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
        >>> train_step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.5))
        >>> output = train_step(ops.ones((4, 1)), ops.ones((4, 1)))
        >>> print(output.loss, output.updated, output.grad_norm, output.weight)
        1.0 True 2.0 4.0
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor
    updated: Tensor
    grad_norm: Tensor
    clipped_grad_norm: Tensor
    learning_rate: Tensor
    weight: Tensor

    @property
    def ends_window(self) -> bool:
        """Whether this call ended its window, with an update or with one that was skipped."""
        # Nothing waits for a device: inside a window they are constants of the host, at its end the step has read them.
        return bool(self.updated.asnumpy() or self.overflow.asnumpy() or np.isfinite(self.grad_norm.asnumpy()))


def check_output(owner: str, output: Any) -> None:
    """Raise unless ``output`` is that of a training step, or None."""
    if output is not None and not isinstance(output, StepOutput):
        got, remedy = type(output).__name__, "With several networks, give the output of one of them."
        raise TypeError(sentence(owner, "output", "a StepOutput or None", got, remedy))
