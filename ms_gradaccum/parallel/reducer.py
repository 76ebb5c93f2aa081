"""Reduce the sums of a window over the ranks: nothing in one process; what all kinds of several have in common."""

import itertools
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.tensors import Done, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, reciprocal
from ms_gradaccum.gradients.clipping import squares_of
from ms_gradaccum.parallel.collectives import AllReduce, Group, after
from ms_gradaccum.parallel.layout import BucketLayout, ReducerLayout
from ms_gradaccum.parallel.messages import Traffic
from ms_gradaccum.parallel.world import check_equal


class GradientReducer(nn.Cell):
    """Reduce the buffer at the end of a window, before and after the optimizer.

    This one is for one process and does nothing. The kinds of parallelism override what they need.
    """

    several = False
    # Whether the ranks meet in each micro batch, and not in each update alone.
    every_batch = False
    # Whether the optimizer takes the sums as they are, see `for_optimizer`.
    takes_sums = True
    # 1 in one process of a job, 0 in the others.
    is_first = 1.0

    def __init__(self, weights: ParameterTuple, buffer: GradientBuffer) -> None:
        super().__init__(auto_prefix=False)
        # What the optimizer updates, and the sums of its gradients after `reduce`.
        self.weights = weights
        self.sums = buffer.sums
        self.buffer = buffer
        # Whether the ranks add up the sums while the last micro batch's backward pass goes on.
        self.overlaps = False
        # By name, what makes the whole of a parameter of which this rank has a part.
        self.gathers: dict[str, Any] = {}

    def messages(self, norm_passes: int = 1) -> Traffic:
        """Return what this rank sends, if the norms of the window's gradients are taken so many times."""
        return Traffic()

    def max_micro_batches(self, micro_batches: int) -> int:
        """Return how many micro batches the rank with the most of them has in this batch. Called by the host."""
        return micro_batches

    def reduce_scatter_micro_batch(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what is added into the buffer for the gradients of one micro batch."""
        return grads

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Return the sum of a few numbers over the ranks."""
        return values

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
        """Bring `weights` up to date with what the network has."""
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
        return tuple(self.weights)

    def saved(self, parameter: Parameter) -> Parameter | None:
        """Return what a checkpoint holds for ``parameter``; None for nothing."""
        return parameter


class BucketedAllReduce(nn.Cell):
    """Add the buffer's loss and weight and some of its sums over all ranks, in place.

    Args:
        buffer: Whose sums.
        layout: Which of them, and in which messages.
        rank: Number of this rank.
    """

    def __init__(self, buffer: GradientBuffer, layout: BucketLayout, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer
        self.sums = buffer.sums
        self.totals = ParameterTuple(buffer.totals())
        # Where each of them begins in what is sent of all.
        self.total_begins = tuple(itertools.accumulate([value.size for value in self.totals[:-1]], initial=0))
        # As its own, because a graph knows the attributes of a cell alone.
        self.buckets, self.begins, self.ends = layout.buckets, layout.begins, layout.ends
        self.all_reduce = AllReduce(Group(layout.world, rank))
        self.like = Tensor(0.0, layout.dtype)
        self.in_float32 = layout.in_float32
        self.map = ops.HyperMap()

    def construct(self, added: Any = ()) -> Done:
        """Add them up, with what the buffer's `add` has returned if that is part of the same graph."""
        sums = tuple(self.sums) if len(added) == 0 else added[0]
        done: Done = ()
        last: Done = None
        factor = weight = Tensor(1.0, ms.float32)
        if not self.in_float32:
            # The weight must be exact, and a sum over many rows can be no 16-bit number where its mean is one.
            done = self._put_totals(self.all_reduce(self._flat_totals(added)), 0)
            last = weight = ops.depend(self.buffer.weight + 0.0, done)
            factor = reciprocal(weight)
        for number, bucket in enumerate(self.buckets):
            # They go with the first message, so that they cost none of their own.
            with_totals = number == 0 and self.in_float32
            flat = self.map(_flat, pick(sums, bucket))
            if not self.in_float32:
                flat = self.map(ops.partial(rounded, factor, self.like), flat)
            if with_totals:
                flat += (self._flat_totals(added),)
            if len(flat) > 0:
                # After the last message, but not after what has come of it is in its place.
                last = self.all_reduce(after(ops.concat(flat), last))
                done += self._put(number, last, weight, with_totals)
        return done

    def _put(self, number: int, total: Tensor, weight: Tensor, with_totals: bool) -> Done:
        """Assign what has come of a message."""
        if not self.in_float32:
            total = ops.cast(total, ms.float32) * weight
        done: Done = ()
        if len(self.buckets[number]) > 0:
            sums = pick(tuple(self.sums), self.buckets[number])
            done = self.map(ops.partial(_assign_part, total), sums, self.begins[number])
        return done + self._put_totals(total, self.ends[number]) if with_totals else done

    def _flat_totals(self, added: Any) -> Tensor:
        flat: tuple[Tensor, ...] = ()
        for i, value in enumerate(self.totals):
            # Of the loss and the weight there is a newer value.
            flat += (added[1 + i].reshape(1) if 0 < len(added) - 1 - i else value.reshape(-1),)
        return ops.concat(flat)

    def _put_totals(self, total: Tensor, begin: int) -> Done:
        done: Done = ()
        for i, value in enumerate(self.totals):
            done += (ops.assign(value, part_of(total, value, begin + self.total_begins[i])),)
        return done


_flat = ops.MultitypeFuncGraph("flat")


@_flat.register("Tensor")
def _flat_one(total: Tensor) -> Tensor:
    return total.reshape(-1)


rounded = ops.MultitypeFuncGraph("rounded")


@rounded.register("Tensor", "Tensor", "Tensor")
def _rounded_one(factor: Tensor, like: Tensor, total: Tensor) -> Tensor:
    return ops.cast(total * factor, like.dtype)


def part_of(message: Tensor, like: Tensor, begin: int) -> Tensor:
    """Return the part of a flat message that begins there and has the shape of another tensor."""
    return message[begin : begin + like.size].reshape(like.shape)


_assign_part = ops.MultitypeFuncGraph("assign_part")


@_assign_part.register("Tensor", "Tensor", "Number")
def _assign_one_part(message: Tensor, total: Parameter, begin: int) -> Tensor:
    return ops.assign(total, part_of(message, total, begin))


class CollectiveReducer(GradientReducer):
    """Each rank has a replica of the weights.

    Args:
        weights: What the optimizer updates.
        buffer: The sums of their gradients on this rank.
        layout: What is sent, and in which messages.
        rank: Number of this rank.
        settings: The kind of parallelism.
    """

    several = True

    def __init__(
        self, weights: ParameterTuple, buffer: GradientBuffer, layout: ReducerLayout, rank: int, settings: Any
    ) -> None:
        super().__init__(weights, buffer)
        self.layout = layout
        self.is_first = float(rank == 0)
        self.bucketed_all_reduce = BucketedAllReduce(buffer, layout.all_reduced, rank)
        self.all_reduce_world = AllReduce(Group(layout.all_reduced.world, rank))
        self.every_batch = layout.every_batch
        self.check_weights = settings.check_weights
        self.no_squares = Tensor([0.0] * len(weights), ms.float32)

    def messages(self, norm_passes: int = 1) -> Traffic:
        return self.layout.messages(norm_passes)

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        return self.all_reduce_world(values)

    def send_again(self, done: Done) -> Done:
        reduced = ops.depend(self.reduce(), done)
        squares = self.all_reduce_squares(ops.depend(self.no_squares, reduced))
        grads = self.for_optimizer(ops.depend(tuple(self.sums), squares))
        return self.after_update(ops.depend(grads, self.before_update()))

    def check_replicas(self) -> None:
        if self.check_weights:
            check_equal("TrainOneStepCell", self.replicas())
