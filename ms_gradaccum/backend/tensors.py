"""Many tensors some at a time, in a way that the compiler takes well.

A loop in a graph nests: what follows an iteration, the compiler sees as deep inside it. That takes more and more time,
and it gives up at a depth of 1000. So a graph maps a function over a run of tensors, and loops over runs. It takes one
run after the other, or there would be the temporary tensors of all of them at a time.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

# Each run takes the compiler time, so there are not many more,
_MOST_CHUNKS = 32
# and some 2 MB of memory: as much as this many elements.
_COMPILED = 512 * 1024
# The elements that are one run anyway. They take 4 MB.
_FEW = 1024 * 1024

Chunks = tuple[tuple[int, int], ...]

# An ordering token: the outputs of operators that must have run, whose values nobody reads. A graph runs what its
# output needs, in any order that the data allow. So what has an effect (it assigns, or sends a message) returns its
# outputs as a token ``done``, and what must come later computes with `ops.depend(values, done)`: these are ``values``,
# but they are there only once ``done`` is. () and None are tokens of nothing to wait for.
Done = Any


def chunks_of(sizes: Sequence[int]) -> Chunks:
    """Return where runs of neighbours begin and end.

    What a run takes while it is computed grows with its elements, what the compiler takes with the number of runs.
    Both are the same if a run has the square root of all elements times ``_COMPILED``.
    """
    elements = sum(sizes)
    limit = max(*sizes, elements // _MOST_CHUNKS, isqrt(elements * _COMPILED), _FEW)
    return tuple((run[0], run[-1] + 1) for run in fill_buckets(range(len(sizes)), sizes, limit))


def chunk_of(items: tuple[Any, ...], begin: int, end: int) -> tuple[Any, ...]:
    """Return the items of a run. All of them as they are: the compiler takes its time for a slice."""
    return items[begin:end] if end - begin < len(items) else items


def copy_after(number: Tensor, done: Any) -> Tensor:
    """Return ``number`` after ``done``, as what a kernel has made.

    Otherwise each of n tensors that wait for it would wait for each of ``done`` by itself: n times n messages.
    """
    return ops.depend(number, done) + 0.0


def scalar(value: Any) -> Tensor:
    """Return a number, or a tensor of one element, as a scalar of float32, or float64 if it is one of these."""
    # A cast that changes nothing would cost time all the same where a network runs op by op.
    if not (isinstance(value, Tensor) and (value.dtype == ms.float64 or value.dtype == ms.float32)):
        value = ops.cast(value, ms.float32)
    # The compiler takes its time for a reshape.
    return value if value.ndim == 0 else value.reshape(())


_pick = ops.MultitypeFuncGraph("pick")


@_pick.register("Tuple", "Number")
def _pick_one(items: tuple[Any, ...], index: int) -> Any:
    return items[index]


_map = ops.HyperMap()


def pick(items: tuple[Any, ...], indices: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the items of a tuple that have these indices."""
    picked: tuple[Any, ...] = ()
    if len(indices) > 0:
        picked = _map(ops.partial(_pick, items), indices)
    return picked


def fill_buckets(indices: Any, sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return ``indices`` in groups of at most ``limit`` elements, at least one index each."""
    buckets: list[list[int]] = []
    filled = limit + 1
    for i in indices:
        if filled + sizes[i] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return tuple(tuple(bucket) for bucket in buckets)
