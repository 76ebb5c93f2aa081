"""Data parallel: every rank holds everything, and the sums of a window are added over the ranks once."""

from dataclasses import dataclass
from typing import Any

from mindspore import ParameterTuple, Tensor

from ms_gradaccum._checks import check_bool
from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.parallel.several import SeveralProcesses, SumOverRanks
from ms_gradaccum.parallel.sharding import ShardedSums
from ms_gradaccum.parallel.world import World


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism over all processes. ``parallel="auto"`` chooses it when there are several.

    The sums of a window and its weight are added over the ranks in a few fused messages, once per update; micro
    batches in between communicate nothing.

    Args:
        sync_each_batch (bool): Whether to add up the gradients of each micro batch over the ranks instead. Each rank
            then keeps 1 / ranks of the sums, in exchange for a message per micro batch. The name is that of Hugging
            Face Accelerate's ``GradientAccumulationPlugin``. Default: ``False``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update and raise a
            RuntimeError if they differ; for debugging. Default: ``False``.

    Raises:
        TypeError: If an argument is not a bool.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import DataParallel
        >>> print(DataParallel(sync_each_batch=True))
        DataParallel(sync_each_batch=True, check_weights=False)
    """

    sync_each_batch: bool = False
    check_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("sync_each_batch", "check_weights"):
            check_bool("DataParallel", name, getattr(self, name), "The default is False.")


class DataParallelSum(SeveralProcesses):
    """What data parallelism does at the end of a window."""

    def __init__(self, weights: ParameterTuple, buffer: GradBuffer, world: World, settings: DataParallel) -> None:
        super().__init__(weights, buffer, world, settings)
        sizes = [weight.size for weight in weights]
        self.sum_over_ranks = SumOverRanks(range(len(sizes)), sizes, world)

    def reduce(self) -> Any:
        return self.sum_over_ranks(self.buffer.sums, self.buffer.loss, self.buffer.weight)


class DataParallelShards(ShardedSums):
    """What data parallelism does with ``sync_each_batch``: only the buffer is sharded."""

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.shards.gather(grads, None)
