"""What a window costs on each rank: the messages that it sends and the memory of its sums."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ms_gradaccum.gradients.clipping import ClipByGroupNorm, ClipByValue
from ms_gradaccum.parallel.collectives import has_all_gather, has_reduce_scatter
from ms_gradaccum.parallel.factory import layout_for
from ms_gradaccum.parallel.layout import ShardLayout, all_backwards, all_reduce_buckets

# Sums are float32, and so is all that is sent.
_ITEMSIZE = 4


class Message(NamedTuple):
    """One collective operator.

    Attributes:
        operator: Its class in ``mindspore.ops``: ``"AllReduce"``, ``"ReduceScatter"`` or ``"AllGather"``.
        ranks: Number of ranks that take part.
        nbytes: Size of the tensor that each of them hands in. Unit: bytes.
    """

    operator: str
    ranks: int
    nbytes: int


@dataclass(frozen=True)
class Traffic:
    """The messages that each rank sends, in their order.

    Attributes:
        per_micro_batch: Of each micro batch: gradients, if the ranks share the sums.
        per_batch: Of each batch, before its micro batches: their number, if they communicate.
        per_update: At the end of the window.
    """

    per_micro_batch: tuple[Message, ...] = ()
    per_batch: tuple[Message, ...] = ()
    per_update: tuple[Message, ...] = ()

    def of_window(self, batches: int, micro_batches: int) -> tuple[Message, ...]:
        """Return the messages of a window of so many batches and, all together, micro batches."""
        return batches * self.per_batch + micro_batches * self.per_micro_batch + self.per_update


def sum_bytes(kind: Any, weights: Any, ranks: int) -> int:
    """Return the bytes of the sums that each rank keeps, of gradients of tensors with a `shape` and an `itemsize`."""
    layout = layout_for(kind, weights, ranks)
    whole: int = sum(math.prod(weight.shape) for weight in weights)
    if layout is None:
        return _ITEMSIZE * whole
    parts: list[int] = [math.prod(shape) for shape in layout.shapes]
    if kind.sync_each_batch:
        return _ITEMSIZE * sum(parts)
    # The sums of the rank's own rows beside those of all rows.
    return _ITEMSIZE * (whole + sum(parts[i] for i in layout.sharded))


def traffic_of(kind: Any, weights: Any, ranks: int, clip: Any, device_target: str) -> Traffic:
    """Return what the ranks of a kind of parallelism send for weights with a `shape` and an `itemsize`."""
    if kind is None:
        return Traffic()
    layout = layout_for(kind, weights, ranks)
    if layout is None:
        sizes = [math.prod(weight.shape) for weight in weights]
        return Traffic(per_update=_sums(all_backwards(sizes), sizes, ranks))
    scatter = _scatter(layout, ranks, device_target)
    # The squares of each gradient, for the norm; once more for what the limit does not tell, and for each group's.
    passes = 2 if isinstance(clip, ClipByValue) else 3 if isinstance(clip, ClipByGroupNorm) else 1
    norms = (Message("AllReduce", ranks, _ITEMSIZE * len(layout.sizes)),) * passes
    kept, gather = _sums(layout.kept, layout.sizes, ranks), _gather(layout, ranks, device_target)
    if kind.sync_each_batch:
        return Traffic(scatter, (Message("AllGather", ranks, _ITEMSIZE),), kept + norms + gather)
    return Traffic(per_update=kept + scatter + norms + gather)


def _sums(indices: Any, sizes: Any, ranks: int) -> tuple[Message, ...]:
    """Return the messages of `BucketedAllReduce`."""
    counts = [sum(sizes[i] for i in bucket) for bucket in all_reduce_buckets(indices, sizes)]
    counts[0] += 2  # The loss and the weight.
    return tuple(Message("AllReduce", ranks, _ITEMSIZE * count) for count in counts)


def _scatter(layout: ShardLayout, ranks: int, device_target: str) -> tuple[Message, ...]:
    """Return the messages of `Shards.reduce_scatter`."""
    operator = "ReduceScatter" if has_reduce_scatter(device_target) else "AllReduce"
    messages: tuple[Message, ...] = ()
    for nbytes in _bucket_bytes(layout):
        messages += (Message(operator, layout.size, nbytes),)
        if layout.size < ranks:
            messages += (Message("AllReduce", ranks // layout.size, nbytes // layout.size),)
    return messages


def _gather(layout: ShardLayout, ranks: int, device_target: str) -> tuple[Message, ...]:
    """Return the messages of `Shards.all_gather`."""
    if has_all_gather(device_target, layout.size == ranks):
        return tuple(Message("AllGather", layout.size, nbytes // layout.size) for nbytes in _bucket_bytes(layout))
    return tuple(Message("AllReduce", layout.size, nbytes) for nbytes in _bucket_bytes(layout))


def _bucket_bytes(layout: ShardLayout) -> list[int]:
    return [_ITEMSIZE * sum(layout.sizes[i] for i in bucket) for bucket in layout.buckets]
