"""Which tensors are sharded, and which of them go together in a message. Nothing here communicates."""

import math
from itertools import accumulate
from typing import Any, NamedTuple

from ms_gradaccum.backend.tensors import fill_buckets

# Elements of one message: fewer messages cost less latency, larger ones more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024

Buckets = tuple[tuple[int, ...], ...]


class ShardLayout(NamedTuple):
    """The parts of a tuple of tensors on each rank of a group.

    Attributes:
        size: Number of ranks of a group.
        is_sharded: Whether each rank has its rows of a tensor, and not all of it, per tensor.
        sharded: The indices of those that are sharded.
        kept: The indices of the others.
        whole_shapes: Shapes of the whole tensors.
        shapes: Shapes of what one rank has.
        sizes: Numbers of elements of the whole tensors.
        buckets: The indices in `sharded` in the order in which they are sent, one tuple per message.
    """

    size: int
    is_sharded: tuple[bool, ...]
    sharded: tuple[int, ...]
    kept: tuple[int, ...]
    whole_shapes: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    buckets: Buckets


def shard_layout(tensors: Any, size: int, threshold: int) -> ShardLayout:
    """Shard each tensor whose first axis ``size`` divides and that has at least ``threshold`` KB.

    Of ``tensors`` only `shape` and `itemsize` are read.
    """
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
    # From the last to the first: the order in which a backward pass makes gradients.
    buckets = fill_buckets(sharded[::-1], sizes, BUCKET_SIZE)
    return ShardLayout(size, is_sharded, sharded, kept, whole_shapes, shapes, sizes, buckets)


def places(buckets: Buckets, sizes: Any) -> tuple[Buckets, tuple[int, ...]]:
    """Return where each tensor begins in its message, and where the last one of each message ends."""
    ends = tuple(tuple(accumulate((sizes[i] for i in bucket), initial=0)) for bucket in buckets)
    return tuple(bucket[:-1] for bucket in ends), tuple(bucket[-1] for bucket in ends)


def all_backwards(sizes: Any) -> range:
    """Return all indices, from the last to the first: the order in which a backward pass makes gradients."""
    return range(len(sizes) - 1, -1, -1)


def all_reduce_buckets(indices: Any, sizes: Any) -> Buckets:
    """Return the messages in which tensors are summed over all ranks, at least one.

    The loss and the weight go with the first message, so that they cost none of their own.
    """
    return fill_buckets(indices, sizes, BUCKET_SIZE) or ((),)
