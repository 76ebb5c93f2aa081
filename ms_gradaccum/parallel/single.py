"""One process: the stand-in for communication, and the interface of the others."""

from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.grad_clip import sum_of_squares


class SingleProcess(nn.Cell):
    """Nothing to communicate. The other kinds of parallelism override what they need."""

    def __init__(self, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        # What the optimizer updates, in its order.
        self.weights = weights

    def reduce(self, buffer: GradBuffer) -> tuple[Tensor, ...]:
        """Sum the buffer's loss and weight over the ranks and return the summed gradients of `weights`."""
        return tuple(buffer.sums)

    def norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the L2 norm of the whole gradient taken as one vector, a float32 scalar."""
        total = sum_of_squares(grads[0])
        for grad in grads[1:]:
            total = total + sum_of_squares(grad)
        return ops.sqrt(total)

    def publish(self, updated: Any) -> Any:
        """Give all ranks the weights that the optimizer has changed on this one, after ``updated``."""
        return updated
