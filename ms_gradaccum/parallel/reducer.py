"""Reduction of the sums of a window over the ranks: the interface, and data parallelism."""

from collections.abc import Iterable

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.gradients.clipping import squares_of
from ms_gradaccum.parallel.collectives import AllReduce, Group, SumMessage
from ms_gradaccum.parallel.layout import Layout
from ms_gradaccum.parallel.world import RanksDiffer, differing_ranks, gather_counts, gather_rows


class GradientReducer(nn.Cell):
    """Reduce the buffer at the end of a window, before and after the optimizer. This class is for one process."""

    is_distributed = False
    # True if the ranks communicate in each micro batch and not only in each update.
    every_batch = False
    # True if the gradients of a micro batch are already reduced over all ranks.
    grads_are_reduced = False
    # True if the network accumulates gradients itself; holds_grads: until the last micro batch of the window.
    accumulates = holds_grads = False
    has_shards = False  # True if the parameters of the network are shards.

    def __init__(self, parameters: ParameterTuple, buffer: GradientBuffer) -> None:
        super().__init__(auto_prefix=False)
        # The parameters of the optimizer, and the sums of their gradients after `reduce`.
        self.parameters = parameters
        self.sums = buffer.sums
        self.buffer = buffer
        # By the id of a shard: what checkpoints hold in its place. They leave it out if that is None.
        self.stand_ins: dict[int, Parameter | None] = {}

    def most(self, doing: str, count: int) -> int:
        """Return the maximum of ``count`` over the ranks. Called by the host."""
        return max(gather_counts(doing, count)) if self.is_distributed else count

    def gather_rows(self, rows: int, tensors: list[Tensor]) -> tuple[int, int, list[Tensor]]:
        """Return the place of this rank's first row among all rows, their number, and the gathered tensors."""
        return 0, rows, tensors

    def max_micro_batches(self, micro_batches: int) -> int:
        """Return the maximum number of micro batches of a rank in this batch. Called by the host."""
        return micro_batches

    def begin_micro_batch(self, is_last: bool) -> None:
        """Prepare the network for a micro batch, maybe the last one of its window. Called by the host."""

    def end_micro_batch(self, factor: float | None = None) -> None:
        """Wait for the gradients of a micro batch; record the factor of a caller's gradients. Called by the host."""

    def check_window(self, owner: str) -> None:
        """Raise if the gradients of a full window are not reduced over all ranks. Called by the host."""

    def restart(self) -> None:
        """Begin a window. Called by the host."""

    def reduce_scatter_micro_batch(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of one micro batch in the form that is added to the buffer."""
        return grads

    def reduce(self) -> Done:
        """Reduce the buffer's loss, weight and sums over the ranks. The reduced sums are in `sums`."""
        return ()

    def norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the L2 norm of the whole gradient taken as one vector, a float32 scalar."""
        return ops.sqrt(ops.sum(self.squares(grads)))

    def squares(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the squares of each whole gradient, a float32 tensor."""
        return self.all_reduce_squares(squares_of(grads, self.buffer.chunks))

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        """Reduce the squares of shards to those of whole gradients."""
        return squares

    def before_update(self) -> Done:
        """Copy the network's parameters to `parameters`."""
        return ()

    def after_update(self, updated: Done) -> Done:
        """Distribute the updated parameters to the network."""
        return updated

    def check_replicas(self) -> None:
        """With `check_weights`, raise if the ranks' parameters differ. Called by the host after each update."""

    def reshard(self) -> None:
        """Cut the parameters that an evaluation has left whole. Called by the host before it reads or updates them."""

    def replicas(self) -> tuple[Parameter, ...]:
        """Return the whole parameters, which all ranks have."""
        return tuple(self.parameters)

    def shared(self) -> tuple[Parameter, ...]:
        """Return the parameters that are equal on all ranks."""
        return self.replicas()


def replicas_of(reducers: Iterable[GradientReducer]) -> list[Parameter]:
    """Return the whole parameters of all reducers."""
    parameters: list[Parameter] = []
    for reducer in reducers:
        parameters += reducer.replicas()
    return parameters


def shared_by(reducers: Iterable[GradientReducer]) -> list[Parameter]:
    """Return the parameters of all reducers that are equal on all ranks."""
    parameters: list[Parameter] = []
    for reducer in reducers:
        parameters += reducer.shared()
    return parameters


class DataParallelReducer(GradientReducer):
    """Reducer for ranks with replicas of the parameters, which all-reduce the sums at the end of a window."""

    is_distributed = True

    def __init__(self, optimizer: nn.Cell, buffer: GradientBuffer, layout: Layout) -> None:
        super().__init__(optimizer.parameters, buffer)
        self.layout = layout
        world = layout.world
        everyone = Group(world.size, world)
        alone = Group(1, world)
        sums = (*buffer.sums, *buffer.totals())
        self.all_reduce_world = AllReduce(everyone)
        messages = [SumMessage(sums, sums, bucket, alone, everyone) for bucket in layout.replicated]
        self.messages = nn.CellList(messages, auto_prefix=False)
        self.check_weights = layout.kind.check_weights and world.size > 1
        self.checks_next = self.check_weights  # True if the next update is checked.

    def gather_rows(self, rows: int, tensors: list[Tensor]) -> tuple[int, int, list[Tensor]]:
        begin, total, arrays = gather_rows([tensor.asnumpy() for tensor in tensors])
        return begin, total, [Tensor(array) for array in arrays]

    def reduce(self) -> Done:
        last: Done = ()
        done: Done = ()
        weight = ONE
        for number, message in enumerate(self.messages):
            # A message waits for the previous one, but not for the assignment of its result.
            last, assigned = message(weight, last)
            done += assigned
            if number == 0:
                # For messages of 16 bits, which come later.
                weight = ops.depend(self.buffer.weight + 0.0, done)
        return done

    def check_replicas(self) -> None:
        if not self.checks_next:
            return
        ranks = differing_ranks(self.shared())
        if ranks:
            raise RanksDiffer(
                f"For 'TrainOneStepCell', the ranks must have the same weights after an update, "
                f"but ranks {ranks} differ from rank 0. Look for code that changes weights outside "
                f"the optimizer, or on some ranks alone."
            )
        self.checks_next = self.check_weights
