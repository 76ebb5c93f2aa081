"""Reduce the sums of a window over the ranks: nothing in one process; what all kinds of several have in common."""

from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.gradients.clipping import squares_of
from ms_gradaccum.parallel.collectives import BucketedAllReduce
from ms_gradaccum.parallel.kinds import DataParallel
from ms_gradaccum.parallel.layout import ReducerLayout, Traffic
from ms_gradaccum.parallel.world import check_equal, gather_counts, gather_rows


class GradientReducer(nn.Cell):
    """Reduce the buffer at the end of a window, before and after the optimizer.

    This one is for one process and does nothing. The kinds of parallelism override what they need.
    """

    several = False
    # Whether the ranks meet in each micro batch, and not in each update alone.
    every_batch = False
    # Whether the optimizer takes the sums as they are, see `for_optimizer`.
    takes_sums = True

    def __init__(self, parameters: ParameterTuple, buffer: GradientBuffer) -> None:
        super().__init__(auto_prefix=False)
        # What the optimizer updates, and the sums of its gradients after `reduce`.
        self.parameters = parameters
        self.sums = buffer.sums
        self.buffer = buffer
        # Whether the ranks add up the sums while the last micro batch's backward pass goes on.
        self.overlaps = False
        # By name, what makes the whole of a parameter of which this rank has a part.
        self.gathers: dict[str, Any] = {}

    def messages(self, norm_passes: int = 1) -> Traffic:
        """Return what this rank sends, if the norms of the window's gradients are taken so many times."""
        return Traffic()

    def most(self, count: int) -> int:
        """Return the largest of the ranks' counts. Called by the host."""
        return count

    def gather_rows(self, rows: int, tensors: list[Tensor]) -> tuple[int, int, list[Tensor]]:
        """Return where this rank's rows begin in those of all, how many these are, and the tensors of all of them."""
        return 0, rows, tensors

    def max_micro_batches(self, micro_batches: int) -> int:
        """Return how many micro batches the rank with the most of them has in this batch. Called by the host."""
        return micro_batches

    def reduce_scatter_micro_batch(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what is added into the buffer for the gradients of one micro batch."""
        return grads

    def reduce(self, added: Any = ()) -> Done:
        """Add the buffer's loss and weight and its sums over the ranks, the latter into `sums`.

        ``added`` is what the buffer's last `add` has returned, if that is part of the same graph.
        """
        return ()

    def norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the L2 norm of the whole gradient taken as one vector, a float32 scalar."""
        return ops.sqrt(ops.sum(self.squares(grads)))

    def squares(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the squares of each whole gradient, a float32 tensor."""
        return self.all_reduce_squares(squares_of(grads, self.buffer.chunks))

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        """Return the same for the whole gradients, of which this rank may have parts."""
        return squares

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients as the optimizer takes them."""
        return grads

    def before_update(self) -> Done:
        """Bring `parameters` up to date with what the network has."""
        return ()

    def after_update(self, updated: Done) -> Done:
        """Give the network the weights that the optimizer has changed."""
        return updated

    def send_again(self, done: Done) -> Done:
        """Send what an update sends, in its order, without the update; for one norm. The buffer must be empty.

        Sums of zeros are zeros, and weights that are gathered are what they were.
        """
        return done

    def check_replicas(self) -> None:
        """Raise if the ranks' weights differ, when asked to look. Called by the host after each update."""

    def replicas(self) -> tuple[Parameter, ...]:
        """Return the whole weights, which all ranks have."""
        return tuple(self.parameters)

    def saved(self, parameter: Parameter) -> Parameter | None:
        """Return what a checkpoint holds for ``parameter``; None for nothing."""
        return parameter


class DataParallelReducer(GradientReducer):
    """Each rank has a replica of the parameters, and all add up all sums at the end of a window.

    Args:
        optimizer: What updates the parameters.
        buffer: The sums of their gradients on this rank.
        layout: What is sent, and in which messages.
        rank: Number of this rank.
        settings: The kind of parallelism.
    """

    several = True

    def __init__(
        self, optimizer: nn.Cell, buffer: GradientBuffer, layout: ReducerLayout, rank: int, settings: Any
    ) -> None:
        super().__init__(optimizer.parameters, buffer)
        self.layout = layout
        self.bucketed_all_reduce = BucketedAllReduce(buffer, layout.all_reduced, rank)
        self.check_weights = settings.check_weights
        self.overlaps = isinstance(settings, DataParallel) and settings.overlap
        self.no_squares = Tensor([0.0] * len(self.parameters), ms.float32)

    def messages(self, norm_passes: int = 1) -> Traffic:
        return self.layout.messages(norm_passes)

    def most(self, count: int) -> int:
        return max(gather_counts(count))

    def gather_rows(self, rows: int, tensors: list[Tensor]) -> tuple[int, int, list[Tensor]]:
        begin, total, arrays = gather_rows("GradCacheLoss", [tensor.asnumpy() for tensor in tensors])
        return begin, total, [Tensor(array) for array in arrays]

    def reduce(self, added: Any = ()) -> Done:
        return self.bucketed_all_reduce(added)

    def send_again(self, done: Done) -> Done:
        reduced = ops.depend(self.reduce(), done)
        squares = self.all_reduce_squares(ops.depend(self.no_squares, reduced))
        grads = self.for_optimizer(ops.depend(tuple(self.sums), squares))
        return self.after_update(ops.depend(grads, self.before_update()))

    def check_replicas(self) -> None:
        if self.check_weights:
            check_equal("TrainOneStepCell", self.replicas())
