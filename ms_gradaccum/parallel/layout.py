"""The layout of messages: which tensors are sharded, and which are sent together. This file does not communicate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor

from ms_gradaccum.backend.device import has_all_gather_in_groups, has_reduce_scatter, reduces_in_order
from ms_gradaccum.backend.tensors import fill_buckets
from ms_gradaccum.parallel.kinds import DataParallel, Kind, Reduced

# Elements of one message. Fewer messages have less latency, larger ones need more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024

_FLOAT = 4  # Bytes of a float32 number.

Shapes = tuple[tuple[int, ...], ...]


class Ranks(NamedTuple):
    """A group of ranks of a job. Their device type decides which operators need replacements."""

    size: int
    world_size: int
    device_target: str

    @property
    def is_world(self) -> bool:
        """True if these are all ranks of the job."""
        return self.size == self.world_size

    @property
    def scatters(self) -> bool:
        """True if the device has a ReduceScatter. On CPU, an AllReduce of the whole tensor stands in."""
        return has_reduce_scatter(self.device_target)

    @property
    def gathers(self) -> bool:
        """True if the device has an AllGather for these ranks. Otherwise an AllReduce of zero-padded rows stands in."""
        return self.is_world or has_all_gather_in_groups(self.device_target)

    @property
    def reduces(self) -> bool:
        """True if a graph can have several AllReduces. On GPU, a ReduceScatter and an AllGather stand in for each."""
        return reduces_in_order(self.device_target)


# The runs of a message: their begins, lengths in elements and numbers of tensors. A run is consecutive tensors of one
# size, which one operator splits. One slice per tensor would dominate the compile time.
Cuts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Bucket(NamedTuple):
    """Tensors that are sent together, in one message."""

    indices: tuple[int, ...]  # Indices of the tensors, in the order of the message.
    dtype: ms.Type  # The dtype of the message.
    cuts: Cuts
    elements: int

    @property
    def itemsize(self) -> int:
        return _FLOAT if self.dtype == ms.float32 else 2

    @staticmethod
    def of(indices: Sequence[int], dtype: ms.Type, sizes: Sequence[int]) -> "Bucket":
        """Return the bucket of these tensors, with equal sizes side by side."""
        indices = tuple(sorted(indices, key=lambda i: sizes[i]))
        runs = [(size, len(list(run))) for size, run in groupby(sizes[i] for i in indices)]
        lengths = tuple(size * count for size, count in runs)
        *begins, end = accumulate(lengths, initial=0)
        return Bucket(indices, dtype, (tuple(begins), lengths, tuple(count for _, count in runs)), end)


@dataclass(frozen=True)
class Layout:
    """The memory and the messages of a `GradientReducer`, computed only from the shapes of the tensors.

    The indices of the scalars follow those of the tensors. Scalars are in the first message, which is sent in float32.
    """

    world: Ranks
    group: Ranks  # The ranks that together have one copy of the shards.
    shapes: Shapes
    parts: Shapes  # The shapes of one rank's tensors.
    itemsizes: tuple[int, ...]  # Bytes per element of the sums.
    # The messages, in the order of sending.
    kept: tuple[Bucket, ...]  # Scalars, and tensors that are whole on each rank.
    sharded: tuple[Bucket, ...]  # This rank's parts of the other tensors.
    every_batch: bool = False  # True if each micro batch is reduced to shards, not the sums of a window.
    # If gradients come reduced and none is sent: the share of each gradient's squares that a rank adds to the norm.
    shares: tuple[float, ...] = ()

    @property
    def replicas(self) -> Ranks:
        """The ranks that have the same shards, one of each group."""
        return self.world._replace(size=self.world.size // self.group.size)

    @property
    def is_sharded(self) -> tuple[bool, ...]:
        """One flag per tensor: True if it is sharded."""
        return tuple(part != shape for part, shape in zip(self.parts, self.shapes))

    @property
    def buffer_shapes(self) -> Shapes:
        """Shapes of the sums into which micro batches are added."""
        return self.parts if self.every_batch else self.shapes


def shard_size_of(parameter: Parameter) -> int:
    """Return the number of ranks that share a parameter, if its network reduces the gradients."""
    return int(getattr(parameter, "hsdp_effective_shard_size", 1))


def layout_of(
    kind: Kind | None, tensors: Sequence[Tensor], world: Ranks, scalars: Sequence[int], dtypes: Sequence[ms.Type] = ()
) -> Layout:
    """Return the layout for scalars and for gradients with the `shape` and `itemsize` of ``tensors``."""
    # The `scalars` have these sizes. `kind` is None for one process. A tensor is sharded if the ranks of a group
    # can divide its first axis and it is not below the threshold. Gradients are sent in these `dtypes`, or in float32.
    kind = DataParallel() if kind is None else kind
    shares = tuple(shard_size_of(each) / world.size for each in tensors) if isinstance(kind, Reduced) else ()
    shard_size = world.size if kind.shard_size == -1 else kind.shard_size
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    parts = tuple(
        (shape[0] // shard_size, *shape[1:])
        if shape and shape[0] % shard_size == 0 and math.prod(shape) * tensor.itemsize >= kind.threshold * 1024
        else shape
        for shape, tensor in zip(shapes, tensors)
    )
    backwards = range(len(shapes))[::-1]  # A backward pass computes the last gradient first.
    sizes, own_sizes = ([math.prod(shape) for shape in each] for each in (shapes, parts))
    kept: list[tuple[tuple[int, ...], ms.Type]] = []
    sharded: list[Bucket] = []
    for dtype in sorted(set(dtypes) or {ms.float32}, key=lambda each: each != ms.float32):
        own = [i for i in backwards if not dtypes or dtypes[i] == dtype]
        whole = [i for i in own if parts[i] == shapes[i] and not shares]
        kept += [(bucket, dtype) for bucket in fill_buckets(whole, sizes, BUCKET_SIZE)]
        cut = [i for i in own if parts[i] != shapes[i]]
        sharded += [Bucket.of(bucket, dtype, own_sizes) for bucket in fill_buckets(cut, sizes, BUCKET_SIZE)]
    behind = tuple(range(len(sizes), len(sizes) + len(scalars)))
    if kept and kept[0][1] == ms.float32:
        kept[0] = kept[0][0] + behind, ms.float32
    else:
        kept.insert(0, (behind, ms.float32))
    # Sums are float32, or float64 for float64 weights.
    itemsizes = tuple(max(_FLOAT, tensor.itemsize) for tensor in tensors)
    messages = tuple(Bucket.of(bucket, dtype, [*sizes, *scalars]) for bucket, dtype in kept)
    group, every_batch = world._replace(size=shard_size), kind.sync_each_batch and shard_size > 1
    return Layout(world, group, shapes, parts, itemsizes, messages, tuple(sharded), every_batch, shares)
