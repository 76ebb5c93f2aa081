"""Data parallel: every rank holds everything, and the sums of a window are added over the ranks once."""

from typing import Any

from mindspore import ParameterTuple, Tensor, ops

from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.parallel.single import SingleProcess

# Elements of one message: fewer messages cost less latency, larger ones more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024


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


class SumOverRanks(SingleProcess):
    """Add the sums of all ranks, in buckets."""

    def __init__(self, weights: ParameterTuple) -> None:
        super().__init__(weights)
        self.buckets = fill_buckets([weight.size for weight in weights], BUCKET_SIZE)
        self.all_reduce = ops.AllReduce()

    def reduce(self, buffer: GradBuffer) -> tuple[Tensor, ...]:
        done: Any = None
        for number, bucket in enumerate(self.buckets):
            flat: tuple[Tensor, ...] = ()
            for i in bucket:
                flat += (buffer.sums[i].reshape(-1),)
            if number == 0:
                # In the first message, so that the weight costs no message of its own.
                flat += (buffer.loss.reshape(1), buffer.weight.reshape(1))
            message = ops.concat(flat)
            # All ranks must send in one order, which independent nodes of a graph do not have.
            message = message if done is None else ops.depend(message, done)
            total = self.all_reduce(message)
            done = self._take(buffer, bucket, total, number == 0)
        return ops.depend(tuple(buffer.sums), done)

    def _take(self, buffer: GradBuffer, bucket: Any, total: Tensor, with_weight: bool) -> Any:
        taken: tuple[Any, ...] = ()
        begin = 0
        for i in bucket:
            size = buffer.sums[i].size
            taken += (ops.assign(buffer.sums[i], total[begin : begin + size].reshape(buffer.sums[i].shape)),)
            begin += size
        if with_weight:
            taken += (ops.assign(buffer.loss, total[begin].reshape(())),)
            taken += (ops.assign(buffer.weight, total[begin + 1].reshape(())),)
        return taken


def fill_buckets(sizes: list[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return neighbouring indices in groups of at most ``limit`` elements, at least one index each."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for i, size in enumerate(sizes):
        if buckets[-1] and filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += size
    return tuple(tuple(bucket) for bucket in buckets)
