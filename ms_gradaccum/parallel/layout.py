"""The layout of messages: which tensors are sharded, and which are sent together. This file does not communicate."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor

from ms_gradaccum.backend.tensors import fill_buckets
from ms_gradaccum.parallel.kinds import Kind, Reduced, World

# Elements of one message. Fewer messages have less latency, larger ones need more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024

Shapes = tuple[tuple[int, ...], ...]


# The runs of a message: their begins, lengths in elements and numbers of tensors. A run is consecutive tensors of one
# size, which one operator splits. One slice per tensor would dominate the compile time.
Runs = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Bucket(NamedTuple):
    """Tensors that are sent together, in one message."""

    indices: tuple[int, ...]  # Indices of the tensors, in the order of the message.
    dtype: ms.Type  # The dtype of the message.
    runs: Runs

    @staticmethod
    def of(indices: Sequence[int], dtype: ms.Type, sizes: Sequence[int]) -> "Bucket":
        """Return the bucket of these tensors, with equal sizes side by side."""
        indices = tuple(sorted(indices, key=lambda i: sizes[i]))
        counts = Counter(sizes[i] for i in indices)  # In the order of the indices.
        lengths = tuple(size * count for size, count in counts.items())
        begins = tuple(accumulate(lengths[:-1], initial=0))
        return Bucket(indices, dtype, (begins, lengths, tuple(counts.values())))


class Layout(NamedTuple):
    """The memory and the messages of the `GradientReducer` of a kind, computed only from the shapes of the tensors.

    The indices of the scalars follow those of the tensors. Scalars are in the first message, which is sent in float32.
    """

    kind: Kind
    world: World
    shard_size: int  # The number of ranks that together have one copy of the shards.
    parts: Shapes  # The shapes of one rank's tensors.
    is_sharded: tuple[bool, ...]  # One flag per tensor.
    # The messages, in the order of sending.
    replicated: tuple[Bucket, ...]  # Scalars, and tensors that are whole on each rank.
    sharded: tuple[Bucket, ...]  # This rank's parts of the other tensors.
    every_batch: bool  # True if each micro batch is reduced to shards, not the sums of a window.

    @property
    def buffer_shapes(self) -> Shapes | None:
        """Shapes of the sums into which micro batches are added, or None for those of the parameters."""
        return self.parts if self.every_batch else None


def shard_size_of(parameter: Parameter) -> int:
    """Return the number of ranks that share a parameter, if its network reduces the gradients."""
    return int(getattr(parameter, "hsdp_effective_shard_size", 1))


def layout_of(
    kind: Kind,
    tensors: Sequence[Tensor],
    world: World,
    scalars: Sequence[int],
    dtypes: Sequence[ms.Type],
) -> Layout:
    """Return the layout for scalars and for gradients with the sizes of ``tensors``."""
    # The `scalars` have these sizes. Gradients are sent in these `dtypes`.
    shard_size = world.size if kind.shard_size == -1 else kind.shard_size
    parts = tuple(_part_of(tensor, shard_size, kind.threshold) for tensor in tensors)
    is_sharded = tuple(part != tensor.shape for part, tensor in zip(parts, tensors))
    is_sent = not isinstance(kind, Reduced)
    sizes = [tensor.size for tensor in tensors]
    own_sizes = [*map(math.prod, parts), *scalars]
    replicated: list[Bucket] = []
    sharded: list[Bucket] = []
    for dtype in sorted({*dtypes, ms.float32}, key=lambda each: each != ms.float32):
        # As a backward pass computes them.
        backwards = [i for i in reversed(range(len(sizes))) if dtypes[i] == dtype]
        whole = [i for i in backwards if is_sent and not is_sharded[i]]
        messages = list(fill_buckets(whole, sizes, BUCKET_SIZE))
        if dtype == ms.float32:
            messages[:1] = [sum(messages[:1], ()) + tuple(range(len(sizes), len(own_sizes)))]
        replicated += [Bucket.of(indices, dtype, own_sizes) for indices in messages]
        cut = [i for i in backwards if is_sharded[i]]
        sharded += [
            Bucket.of(indices, dtype, own_sizes)
            for indices in fill_buckets(cut, sizes, BUCKET_SIZE)
        ]
    return Layout(
        kind=kind,
        world=world,
        shard_size=shard_size,
        parts=parts,
        is_sharded=is_sharded,
        replicated=tuple(replicated),
        sharded=tuple(sharded),
        every_batch=kind.sync_each_batch and shard_size > 1,
    )


def _part_of(tensor: Tensor, ranks: int, threshold: int) -> tuple[int, ...]:
    """Return the shape that a rank has: a shard if its ranks can divide the first axis and it is large enough."""
    shape = tuple(tensor.shape)
    if not shape or shape[0] % ranks or tensor.nbytes < threshold * 1024:
        return shape
    return (shape[0] // ranks, *shape[1:])
