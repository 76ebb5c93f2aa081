"""The layout of messages: which tensors are sharded, and which are sent together. Nothing here communicates.

The cells that communicate are built of these layouts, and `TrainingPlan` reads the messages from them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import mindspore as ms
from mindspore import Tensor

from ms_gradaccum.backend.tensors import fill_buckets

# Elements of one message: fewer messages cost less latency, larger ones more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024

# Bytes of a float32 number.
_FLOAT = 4

Buckets = tuple[tuple[int, ...], ...]
Shapes = tuple[tuple[int, ...], ...]


class Message(NamedTuple):
    """One collective operator: its class in ``mindspore.ops``, its number of ranks, and the bytes of each."""

    operator: str
    ranks: int
    nbytes: int


Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Traffic:
    """The messages that each rank sends, in their order."""

    per_micro_batch: Messages = ()  # Gradients, if the ranks share the sums.
    per_batch: Messages = ()  # The number of its micro batches, before them, if they communicate.
    per_update: Messages = ()

    def of_window(self, batches: int, micro_batches: int) -> Messages:
        """Return the messages of a window with this number of batches and, in all, of micro batches."""
        return batches * self.per_batch + micro_batches * self.per_micro_batch + self.per_update


class Ranks(NamedTuple):
    """A group of ranks of a job and their kind of device, which decides what stands in for operators that it lacks."""

    size: int
    world_size: int
    device_target: str

    @property
    def is_world(self) -> bool:
        """True if these are all ranks of the job."""
        return self.size == self.world_size

    @property
    def reduce_scatter_operator(self) -> str:
        """The operator of a reduce-scatter: on CPU an AllReduce of the whole tensor."""
        return "AllReduce" if self.device_target == "CPU" else "ReduceScatter"

    @property
    def all_gather_operator(self) -> str:
        """The operator of an all-gather: on CPU, for a part of the ranks, an AllReduce of rows padded with zeros."""
        return "AllReduce" if self.device_target == "CPU" and not self.is_world else "AllGather"

    def all_reduce(self, nbytes: int) -> Messages:
        """Return the messages that all-reduce tensors of ``nbytes`` bytes."""
        return self._send("AllReduce", nbytes)

    def reduce_scatter(self, nbytes: int) -> Messages:
        """Return the messages that reduce-scatter tensors of ``nbytes`` bytes."""
        return self._send(self.reduce_scatter_operator, nbytes)

    def all_gather(self, nbytes: int) -> Messages:
        """Return the messages that all-gather parts of ``nbytes`` bytes each."""
        operator = self.all_gather_operator
        return self._send(operator, nbytes if operator == "AllGather" else nbytes * self.size)

    def _send(self, operator: str, nbytes: int) -> Messages:
        return (Message(operator, self.size, nbytes),) if self.size > 1 else ()


class Cuts(NamedTuple):
    """The layout of a message: runs of consecutive tensors of one size, each run split by one operator.

    One slice per tensor would dominate the compile time.
    """

    begins: tuple[int, ...]
    lengths: tuple[int, ...]  # Elements of each run.
    counts: tuple[int, ...]  # Tensors of each run.


class BucketLayout(NamedTuple):
    """Sums that are added up over all ranks, and a few scalars beside them.

    The scalars are sent in float32. If the sums are too, the first message has them; else they are sent before it.
    """

    world: Ranks
    buckets: Buckets  # The indices of the tensors in the order in which they are sent: at least one message.
    cuts: tuple[Cuts, ...]
    ends: tuple[int, ...]  # The elements of each message, without the scalars.
    scalars: int
    dtype: ms.Type

    @property
    def in_float32(self) -> bool:
        """True if the sums are sent in float32."""
        return bool(self.dtype == ms.float32)

    def messages(self) -> Messages:
        """Return what `BucketedAllReduce` sends."""
        scalars = _FLOAT * self.scalars
        nbytes = [_itemsize(self.dtype) * end for end in self.ends]
        nbytes = [nbytes[0] + scalars, *nbytes[1:]] if self.in_float32 else [scalars, *filter(None, nbytes)]
        return _in_order(self.world.all_reduce(each) for each in nbytes)


class ShardLayout(NamedTuple):
    """The shards of a tuple of tensors on each rank of a group, replicated over the groups."""

    group: Ranks  # The ranks that have one copy together.
    replicas: Ranks  # The ranks that have the same shards, one of each group.
    world: Ranks
    is_sharded: tuple[bool, ...]
    sharded: tuple[int, ...]  # The indices of the tensors that are sharded.
    kept: tuple[int, ...]  # The indices of the others.
    shapes: Shapes  # The shapes of one rank's tensors.
    sizes: tuple[int, ...]  # Elements of the whole tensors.
    buckets: Buckets  # The indices in `sharded` in the order in which they are sent.
    cuts: tuple[Cuts, ...]  # Where the rank's own part of each message is cut.
    ends: tuple[int, ...]  # The elements of this part.
    dtype: ms.Type  # In which gradients are added up.


@dataclass(frozen=True)
class ReducerLayout:
    """The memory and messages of a `GradientReducer` whose sums are whole on all ranks, from their shapes alone."""

    shapes: Shapes
    itemsizes: tuple[int, ...]
    all_reduced: BucketLayout

    @property
    def buffer_shapes(self) -> Shapes:
        """Shapes of the sums into which micro batches are added."""
        return self.shapes

    @property
    def sum_bytes(self) -> int:
        """The memory of the sums on each rank: those of the buffer and, beside it, shards of their total."""
        counts = [math.prod(shape) + own for shape, own in zip(self.buffer_shapes, self._own_sizes())]
        return sum(itemsize * count for itemsize, count in zip(self.itemsizes, counts))

    def _own_sizes(self) -> list[int]:
        return [0] * len(self.shapes)

    def messages(self, norm_passes: int = 1) -> Traffic:
        """Return the messages of a window for a number of passes over the gradients for norms."""
        return Traffic(per_update=self.all_reduced.messages())


@dataclass(frozen=True)
class ShardedLayout(ReducerLayout):
    """The same for sums that are sharded at the end of the window or, if ``every_batch``, with each micro batch."""

    shards: ShardLayout
    every_batch: bool

    @property
    def buffer_shapes(self) -> Shapes:
        """Shapes of the sums into which micro batches are added."""
        return self.shards.shapes if self.every_batch else self.shapes

    def _own_sizes(self) -> list[int]:
        owns = not self.every_batch
        return [owns * part * math.prod(shape) for part, shape in zip(self.shards.is_sharded, self.shards.shapes)]

    def messages(self, norm_passes: int = 1) -> Traffic:
        shards = self.shards
        own = [_itemsize(shards.dtype) * end for end in shards.ends]
        # All rows of each message, then the own ones between the groups.
        scattered = _in_order(
            shards.group.reduce_scatter(shards.group.size * each) + shards.replicas.all_reduce(each) for each in own
        )
        # Once the shards are there: squares for the norms, a float32 number per tensor, then the whole tensors.
        later = norm_passes * shards.world.all_reduce(_FLOAT * len(shards.sizes))
        later += _in_order(shards.group.all_gather(_FLOAT * end) for end in shards.ends)
        if not self.every_batch:
            return Traffic(per_update=self.all_reduced.messages() + scattered + later)
        return Traffic(
            per_micro_batch=scattered,
            per_batch=shards.world.all_gather(_FLOAT),
            per_update=self.all_reduced.messages() + later,
        )


@dataclass(frozen=True)
class ReducedLayout(ReducerLayout):
    """The same for gradients that come reduced, whole or in shards: only scalars are added up."""

    shares: tuple[float, ...]  # The share of each gradient's squares that a rank contributes to the norm.

    def messages(self, norm_passes: int = 1) -> Traffic:
        world = self.all_reduced.world
        has_shards = len(set(self.shares)) > 1 or self.shares[0] * world.size > 1
        squares = norm_passes * has_shards * world.all_reduce(_FLOAT * len(self.shapes))
        return Traffic(per_batch=world.all_gather(_FLOAT), per_update=self.all_reduced.messages() + squares)


def bucket_layout(
    indices: Iterable[int], sizes: Sequence[int], world: Ranks, scalars: int, dtype: ms.Type
) -> BucketLayout:
    """Return how the sums with these ``indices`` are added up over all ranks."""
    buckets = _by_size(fill_buckets(indices, sizes, BUCKET_SIZE), sizes) or ((),)
    return BucketLayout(world, buckets, *_places(buckets, sizes), scalars, dtype)


def shard_layout(tensors: Sequence[Tensor], world: Ranks, size: int, threshold: int, dtype: ms.Type) -> ShardLayout:
    """Shard each tensor whose first axis ``size`` divides and that has at least ``threshold`` KB."""
    whole_shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    sizes = tuple(math.prod(shape) for shape in whole_shapes)
    is_sharded = tuple(
        size > 1 and len(shape) > 0 and shape[0] % size == 0 and count * tensor.itemsize >= threshold * 1024
        for tensor, shape, count in zip(tensors, whole_shapes, sizes)
    )
    shapes = tuple(
        (shape[0] // size, *shape[1:]) if sharded else shape for shape, sharded in zip(whole_shapes, is_sharded)
    )
    sharded = tuple(i for i, part in enumerate(is_sharded) if part)
    kept = tuple(i for i, part in enumerate(is_sharded) if not part)
    group, replicas = world._replace(size=size), world._replace(size=world.size // size)
    own_sizes = [math.prod(shape) for shape in shapes]
    buckets = _by_size(fill_buckets(backwards(sharded), sizes, BUCKET_SIZE), own_sizes)
    places = _places(buckets, own_sizes)
    return ShardLayout(group, replicas, world, is_sharded, sharded, kept, shapes, sizes, buckets, *places, dtype)


def backwards(indices: Iterable[int]) -> tuple[int, ...]:
    """Return indices from the last to the first: the order in which a backward pass makes gradients."""
    return tuple(indices)[::-1]


def _by_size(buckets: Buckets, sizes: Sequence[int]) -> Buckets:
    """Return the buckets with tensors of one size side by side."""
    return tuple(tuple(sorted(bucket, key=lambda i: sizes[i])) for bucket in buckets)


def _places(buckets: Buckets, sizes: Sequence[int]) -> tuple[tuple[Cuts, ...], tuple[int, ...]]:
    """Return where each message is cut, and where the last tensor of each message ends."""
    runs = [[(size, len(list(run))) for size, run in groupby(sizes[i] for i in bucket)] for bucket in buckets]
    lengths = [tuple(size * count for size, count in run) for run in runs]
    ends = [tuple(accumulate(each, initial=0)) for each in lengths]
    cuts = (Cuts(end[:-1], length, tuple(count for _, count in run)) for end, length, run in zip(ends, lengths, runs))
    return tuple(cuts), tuple(end[-1] for end in ends)


def _itemsize(dtype: ms.Type) -> int:
    return _FLOAT if dtype == ms.float32 else 2


def _in_order(parts: Iterable[Messages]) -> Messages:
    return tuple(message for messages in parts for message in messages)
