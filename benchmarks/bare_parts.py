"""The parts of a window and nothing between them: what a window is measured against."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops


class DroppingGrads(nn.Cell):
    """The gradient of one micro batch, computed and dropped."""

    def __init__(self, network: nn.Cell, parameters: Any) -> None:
        super().__init__(auto_prefix=False)
        self.value_and_grad = ops.value_and_grad(network, None, parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.value_and_grad(x, y)
        return ops.depend(loss, gradients)


class UpdateFromGiven(nn.Cell):
    """The optimizer alone, from gradients that are given."""

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients: Tensor) -> Any:
        return self.optimizer(gradients)


def loop_of_bare_parts(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Callable[..., None]:
    """Return the parts of a window and nothing between them: nothing is split or added, no loss is kept.

    What is returned takes one batch, and the same one in later calls.
    """
    forward_backward, update = DroppingGrads(network, optimizer.parameters), UpdateFromGiven(optimizer)
    zeros = [Tensor(np.zeros(parameter.shape, np.float32)) for parameter in optimizer.parameters]
    micro_batches: list[Any] = []

    def run(*batch: Tensor) -> None:
        if not micro_batches:
            pieces = (np.split(tensor.asnumpy(), micro_size) for tensor in batch)
            micro_batches.extend(tuple(map(Tensor, each)) for each in zip(*pieces))
        for micro_batch in micro_batches:
            forward_backward(*micro_batch).asnumpy()
        update(*zeros)

    return run
