"""Processing of many tensors in chunks, which keeps compile time and memory low.

The compiler unrolls a loop into nested calls, which takes more than linear time, and fails at a depth of 1000. So a
graph maps a function over a chunk of tensors and loops over the chunks. The chunks run one after the other, so that
their temporary tensors do not exist at the same time.
"""

from collections.abc import Callable, Iterable, Sequence
from math import isqrt
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

_MOST_CHUNKS = 32  # Each chunk adds compile time, so their number is limited.
_COMPILED = 512 * 1024  # A compiled chunk takes some 2 MB of memory, as this many elements do.
_FEW = 1024 * 1024  # A chunk holds at least this many elements (4 MB).

Chunks = tuple[tuple[int, int], ...]

# An ordering token: the outputs of operators that must have run, whose values are not read. A graph runs only what its
# output depends on, in any order that the data flow allows. So a function with a side effect (an assignment, a
# collective) returns its outputs as a token `done`, and later operators take `ops.depend(values, done)`: the same
# `values`, available once `done` is. () and None are empty tokens.
Done = Any


def chunks_of(sizes: Sequence[int]) -> Chunks:
    """Return the begin and end of each chunk of consecutive tensors."""
    # Large chunks take memory while they run; many chunks take memory in the compiled graph. Both are equal if a chunk
    # has as many elements as the square root of all elements times `_COMPILED`.
    elements = sum(sizes)
    limit = max(*sizes, elements // _MOST_CHUNKS, isqrt(elements * _COMPILED), _FEW)
    return tuple((run[0], run[-1] + 1) for run in fill_buckets(range(len(sizes)), sizes, limit))


def chunk_of(items: tuple[Tensor, ...], begin: int, end: int) -> tuple[Tensor, ...]:
    """Return the items of a chunk. A slice of all items is left out to save compile time."""
    return items[begin:end] if end - begin < len(items) else items


def copy_after(number: Tensor, done: object) -> Tensor:
    """Return a copy of ``number`` that is made after ``done``."""
    # Without the copy, each of n tensors would depend on each item of `done`: n * n edges.
    return ops.depend(number, done) + 0.0


def scalar(value: Tensor | float) -> Tensor:
    """Return a number, or a tensor of one element, as a float32 scalar (a float64 tensor as float64)."""
    # Op by op, a redundant cast would cost time.
    if not (isinstance(value, Tensor) and (value.dtype == ms.float64 or value.dtype == ms.float32)):
        value = ops.cast(value, ms.float32)
    return value if value.ndim == 0 else value.reshape(())  # A reshape takes compile time.


def _pick(items: tuple[Tensor, ...], index: int) -> Tensor:
    return items[index]


# Apply a function to each tensor of a tuple, or to the matching tensors of several tuples, in a graph too.
map_tensors: Callable[..., tuple[Tensor, ...]] = ops.HyperMap()
# The same, for the last tensor first.
map_backwards: Callable[..., tuple[Tensor, ...]] = ops.HyperMap(reverse=True)


def pick(items: tuple[Tensor, ...], indices: tuple[int, ...]) -> tuple[Tensor, ...]:
    return map_tensors(ops.partial(_pick, items), indices) if len(indices) > 0 else ()


def fill_buckets(
    indices: Iterable[int], sizes: Sequence[int], limit: int
) -> tuple[tuple[int, ...], ...]:
    """Group ``indices`` into buckets of at most ``limit`` elements, with at least one index each."""
    buckets: list[list[int]] = []
    filled = limit + 1
    for i in indices:
        if filled + sizes[i] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return tuple(tuple(bucket) for bucket in buckets)
