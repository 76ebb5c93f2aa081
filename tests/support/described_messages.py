"""The messages that a layout stands for, worked out by hand: what the tests count must be these."""

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.communication import get_group_size

from ms_gradaccum.backend import device
from ms_gradaccum.parallel.reduced import ReducedReducer

FLOAT = 4
COUNT = 16  # Bytes of a count that the host sends, with what it counts.


class Message(NamedTuple):
    """One collective operator: its class in ``mindspore.ops``, its number of ranks, and the bytes per rank."""

    operator: str
    ranks: int
    nbytes: int


class Traffic(NamedTuple):
    """The messages that each rank sends, in their order."""

    per_micro_batch: tuple = ()  # Gradients, if the ranks share the sums.
    per_batch: tuple = ()  # The number of micro batches, sent first, if these communicate.
    per_update: tuple = ()

    def of_window(self, batches, micro_batches):
        """Return the messages of a window with these total numbers of batches and micro batches."""
        return batches * self.per_batch + micro_batches * self.per_micro_batch + self.per_update


def _message(ranks, operator, nbytes):
    return (Message(operator, ranks, nbytes),) if ranks > 1 else ()


def all_reduce(ranks, elements, itemsize=FLOAT):
    if device.reduces_in_order():
        return _message(ranks, "AllReduce", elements * itemsize)
    part = -(-elements // ranks) * itemsize
    return reduce_scatter(ranks, part) + all_gather(ranks, part)


def reduce_scatter(ranks, nbytes):
    scatters = device.has_all_collectives()
    return _message(ranks, "ReduceScatter" if scatters else "AllReduce", nbytes * ranks)


def all_gather(ranks, nbytes):
    if ranks == get_group_size() or device.has_all_collectives():
        return _message(ranks, "AllGather", nbytes)
    return _message(ranks, "AllReduce", nbytes * ranks)


def elements_of(bucket):
    _, lengths, _ = bucket.runs
    return sum(lengths)


def described(reducer, num_norm_reductions=1):
    """Return the messages of a window that makes ``num_norm_reductions`` passes over the gradients for norms."""
    layout, world, group = reducer.layout, get_group_size(), reducer.layout.shard_size
    reduced = ()
    for bucket in layout.replicated:
        reduced += all_reduce(world, elements_of(bucket), itemsize_of(bucket))
    squares = num_norm_reductions * all_reduce(world, len(layout.parts))
    if isinstance(reducer, ReducedReducer):
        return Traffic(per_batch=all_gather(world, COUNT), per_update=reduced + (squares if reducer.has_shards else ()))
    if group == 1:
        return Traffic(per_update=reduced)
    scattered, gathered = (), ()
    for bucket in layout.sharded:
        scattered += reduce_scatter(group, elements_of(bucket) * itemsize_of(bucket))
        scattered += all_reduce(world // group, elements_of(bucket), itemsize_of(bucket))
        gathered += all_gather(group, FLOAT * elements_of(bucket))
    if layout.every_batch:
        return Traffic(scattered, all_gather(world, COUNT), reduced + squares + gathered)
    return Traffic(per_update=reduced + scattered + squares + gathered)


def itemsize_of(bucket):
    return FLOAT if bucket.dtype == ms.float32 else 2


def bytes_of_sums(reducer):
    """Return the memory of the sums on each rank: those of the buffer and, if separate, the shards of their totals."""
    layout, total = reducer.layout, 0
    for whole, part in zip([each.shape for each in reducer.replicas()], layout.parts):
        held = [part] if layout.every_batch else [whole]
        if part != whole and not layout.every_batch:
            held.append(part)
        total += sum(FLOAT * int(np.prod(shape)) for shape in held)
    return total


def sent_by(reducer, note):
    """Call ``note`` with the operator and the values of each message that the cells of a reducer send from now on."""
    for _, cell in reducer.cells_and_names():
        for attribute in ("all_reduce", "all_gather"):
            operator = getattr(cell, attribute, None)
            if isinstance(operator, ops.Primitive):
                setattr(cell, attribute, lambda values, run=operator: note(run, values) or run(values))


def sizes_sent(reducer):
    """Return a list that gets the number of elements of each message."""
    sizes = []
    sent_by(reducer, lambda operator, values: sizes.append(values.size))
    return sizes
