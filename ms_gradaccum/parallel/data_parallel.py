"""Data parallel: every rank holds everything, and the sums of a window are added over the ranks once."""

from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.parallel.collectives import Group, Sum, after, fill_buckets
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.parallel.world import World


class DataParallel:
    """Data parallelism over all processes. ``parallel="auto"`` chooses it when there are several.

    The sums of a window and its weight are added over the ranks in a few fused messages, once per update; micro
    batches in between communicate nothing.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import DataParallel
        >>> print(DataParallel())
        DataParallel()
    """

    def __repr__(self) -> str:
        return "DataParallel()"


class SumOverRanks(nn.Cell):
    """Add the buffer's loss and weight and some of its sums over all ranks, in place."""

    def __init__(self, indices: Any, sizes: Any, world: World) -> None:
        super().__init__(auto_prefix=False)
        # The loss and the weight go with the first message, so that they cost none of their own.
        self.buckets = fill_buckets(indices, sizes) or ((),)
        self.sum = Sum(Group(0, world.size, 1, world.rank, world.size))

    def construct(self, buffer_sums: ParameterTuple, loss: Any, weight: Any) -> Any:
        done: Any = None
        for number, bucket in enumerate(self.buckets):
            flat: tuple[Tensor, ...] = ()
            for i in bucket:
                flat += (buffer_sums[i].reshape(-1),)
            if number == 0:
                flat += (loss.reshape(1), weight.reshape(1))
            total = self.sum(after(ops.concat(flat), done))
            done = ()
            begin = 0
            for i in bucket:
                size = buffer_sums[i].size
                done += (ops.assign(buffer_sums[i], total[begin : begin + size].reshape(buffer_sums[i].shape)),)
                begin += size
            if number == 0:
                done += (ops.assign(loss, total[begin].reshape(())), ops.assign(weight, total[begin + 1].reshape(())))
        return done


class DataParallelSum(SingleProcess):
    """What data parallelism does at the end of a window."""

    several = True

    def __init__(self, weights: ParameterTuple, buffer: GradBuffer, world: World) -> None:
        super().__init__(weights, buffer)
        sizes = [weight.size for weight in weights]
        self.sum_over_ranks = SumOverRanks(range(len(sizes)), sizes, world)

    def reduce(self) -> Any:
        return self.sum_over_ranks(self.buffer.sums, self.buffer.loss, self.buffer.weight)
