"""One process: the stand-in for communication, and the interface of the others."""

from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.grad_clip import squares_of


class SingleProcess(nn.Cell):
    """Nothing to communicate. The other kinds of parallelism override what they need."""

    several = False
    # Whether the ranks meet in each micro batch, and not in each update alone.
    every_batch = False
    # Whether the optimizer takes the sums as they are, see `for_optimizer`.
    takes_sums = True
    # 1 in one process of a job, 0 in the others.
    is_first = 1.0

    def __init__(self, weights: ParameterTuple, buffer: GradBuffer) -> None:
        super().__init__(auto_prefix=False)
        # What the optimizer updates, and the sums of its gradients after `reduce`.
        self.weights = weights
        self.sums = buffer.sums
        self.buffer = buffer
        # Whether the ranks add up the sums while the last micro batch's backward pass goes on.
        self.overlaps = False
        # By name, what makes the whole of a parameter of which this rank has a part.
        self.gathers: dict[str, Any] = {}

    def rounds(self, micro_batches: int) -> int:
        """Return how many micro batches the rank with the most of them has in this batch. Called by the host."""
        return micro_batches

    def share(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what is added into the buffer for the gradients of one micro batch."""
        return grads

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a few numbers over the ranks."""
        return values

    def reduce(self, added: Any = ()) -> Any:
        """Add the buffer's loss and weight and its sums over the ranks, the latter into `sums`.

        ``added`` is what the buffer's last `add` has returned, if that is part of the same graph.
        """
        return ()

    def norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the L2 norm of the whole gradient taken as one vector, a float32 scalar."""
        return ops.sqrt(ops.sum(self.squares(grads)))

    def squares(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the squares of each whole gradient, a float32 tensor."""
        return squares_of(grads, self.buffer.runs)

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients as the optimizer takes them."""
        return grads

    def before_update(self) -> Any:
        """Bring `weights` up to date with what the network has."""
        return ()

    def after_update(self, updated: Any) -> Any:
        """Give the network the weights that the optimizer has changed."""
        return updated

    def check_replicas(self) -> None:
        """Raise if the ranks' weights differ, when asked to look. Called by the host after each update."""

    def replicas(self) -> tuple[Parameter, ...]:
        """Return the whole weights, which all ranks have."""
        return tuple(self.weights)

    def saved(self, parameter: Parameter) -> Parameter | None:
        """Return what a checkpoint holds for ``parameter``; None for nothing."""
        return parameter
