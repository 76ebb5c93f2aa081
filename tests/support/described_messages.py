"""The messages that a layout stands for, worked out by hand: what the tests count must be these."""

from typing import NamedTuple

import numpy as np
from mindspore import ops

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


def _message(group, operator, nbytes):
    return (Message(operator, group.size, nbytes),) if group.size > 1 else ()


def all_reduce(group, elements, itemsize=FLOAT):
    if group.reduces:
        return _message(group, "AllReduce", elements * itemsize)
    part = -(-elements // group.size) * itemsize
    return reduce_scatter(group, part) + all_gather(group, part)


def reduce_scatter(group, nbytes):
    return _message(group, "ReduceScatter" if group.scatters else "AllReduce", nbytes * group.size)


def all_gather(group, nbytes):
    if group.gathers:
        return _message(group, "AllGather", nbytes)
    return _message(group, "AllReduce", nbytes * group.size)


def described(layout, num_norm_reductions=1):
    """Return the messages of a window that makes ``num_norm_reductions`` passes over the gradients for norms."""
    reduced = ()
    for bucket in layout.replicated:
        reduced += all_reduce(layout.world, bucket.elements, bucket.itemsize)
    squares = num_norm_reductions * all_reduce(layout.world, len(layout.shapes))
    if layout.shares:
        has_shards = any(share * layout.world.size > 1 for share in layout.shares)
        counts = all_gather(layout.world, COUNT)
        return Traffic(per_batch=counts, per_update=reduced + (squares if has_shards else ()))
    if layout.group.size == 1:
        return Traffic(per_update=reduced)
    scattered, gathered = (), ()
    for bucket in layout.sharded:
        scattered += reduce_scatter(layout.group, bucket.elements * bucket.itemsize)
        scattered += all_reduce(layout.replicas, bucket.elements, bucket.itemsize)
        gathered += all_gather(layout.group, FLOAT * bucket.elements)
    if layout.every_batch:
        return Traffic(scattered, all_gather(layout.world, COUNT), reduced + squares + gathered)
    return Traffic(per_update=reduced + scattered + squares + gathered)


def bytes_of_sums(layout):
    """Return the memory of the sums on each rank: those of the buffer and, if separate, the shards of their totals."""
    total = 0
    for itemsize, whole, part in zip(layout.itemsizes, layout.shapes, layout.parts):
        held = [part] if layout.every_batch else [whole]
        if part != whole and not layout.every_batch:
            held.append(part)
        total += sum(itemsize * int(np.prod(shape)) for shape in held)
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
