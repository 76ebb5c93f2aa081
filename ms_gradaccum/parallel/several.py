"""What all kinds of several processes have in common."""

from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.parallel.collectives import Group, Sum, after
from ms_gradaccum.parallel.layout import sum_buckets
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.parallel.world import World, check_equal


class SumOverRanks(nn.Cell):
    """Add the buffer's loss and weight and some of its sums over all ranks, in place."""

    def __init__(self, indices: Any, sizes: Any, world: World) -> None:
        super().__init__(auto_prefix=False)
        self.buckets = sum_buckets(indices, sizes)
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


class SeveralProcesses(SingleProcess):
    """Each rank has a replica of the weights."""

    several = True

    def __init__(self, weights: ParameterTuple, buffer: GradBuffer, world: World, settings: Any) -> None:
        super().__init__(weights, buffer)
        self.is_first = float(world.rank == 0)
        self.sum_over_world = Sum(Group(0, world.size, 1, world.rank, world.size))
        # Whether the ranks meet in each micro batch, and not in each update alone.
        self.every_batch = settings.sync_each_batch
        self.check_weights = settings.check_weights

    def total(self, values: Tensor) -> Tensor:
        return self.sum_over_world(values)

    def check_replicas(self) -> None:
        if self.check_weights:
            check_equal("TrainOneStepCell", self.replicas())
