"""What a partitioned step is compared with: one process that trains on the whole batch at once."""

from typing import Any

from mindspore import Tensor, nn, ops


class WholeBatch(nn.Cell):
    """An update from one gradient of the whole batch, without micro batches, ranks and loss scale.

    Args:
        step: A TrainOneStepCell, whose network, optimizer and clip it takes.
    """

    def __init__(self, step: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = step.network.network
        self.weighted = step.network.weighted
        self.losses = step.network.losses
        self.optimizer = step.optimizer
        clip = step.body.clip
        self.max_norm: Any = getattr(clip, "max_norm", None)
        self.limit: Any = getattr(clip, "limit", None)
        self.value_and_grad = ops.value_and_grad(self.loss, None, self.optimizer.parameters)

    def loss(self, *inputs: Any) -> Tensor:
        """Return the mean loss of the batch."""
        output = self.network(*inputs)
        if self.weighted:
            return output[0] / output[1]
        if self.losses == "sum":
            return ops.addn(output)
        return output if self.losses is None else output[0]

    def construct(self, *inputs: Any) -> Tensor:
        loss, grads = self.value_and_grad(*inputs)
        if self.limit is not None:
            grads = ops.clip_by_value(grads, -self.limit, self.limit)
        elif self.max_norm is not None:
            grads = ops.clip_by_global_norm(grads, self.max_norm)
        loss = ops.depend(loss, self.optimizer(grads))
        return loss
