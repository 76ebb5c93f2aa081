"""Collectives of many tensors in few messages, with replacements for operators that a device lacks."""

from collections.abc import Sequence
from itertools import accumulate, islice

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group
from mindspore.ops.operations import Split

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.kernels import as_dtype
from ms_gradaccum.backend.tensors import Done, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, reciprocal
from ms_gradaccum.parallel.layout import BucketLayout, Buckets, Cuts, Ranks

# The parts of a message or their targets, grouped into runs of one size, in the order of the message.
Runs = tuple[tuple[Tensor, ...], ...]

_map = ops.HyperMap()


def check_sent(owner: str, dtype: ms.Type) -> None:
    """Raise for a dtype that the device cannot reduce over ranks."""
    if dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        rule, remedy = "one whose reduce_dtype the device can send", "Use float32, or float16 to halve the messages."
        raise ValueError(argument_error(owner, "mixed_precision", rule, "bfloat16 on CPU", remedy))


class Group:
    """A group of ranks, from ``first`` on with step ``stride``. This ``rank`` has the number ``index`` in it."""

    def __init__(self, ranks: Ranks, rank: int, first: int = 0, stride: int = 1) -> None:
        self.ranks = ranks
        self.index = (rank - first) // stride
        self.name = GlobalComm.WORLD_COMM_GROUP if ranks.is_world else f"ms_gradaccum_{first}_{ranks.size}_{stride}"
        if not ranks.is_world and ranks.size > 1 and self.name not in _created:
            create_group(self.name, [first + stride * i for i in range(ranks.size)])
            _created.add(self.name)


_created: set[str] = set()


class AllReduce(nn.Cell):
    """Sum of a tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(group=group.name) if group.ranks.size > 1 else None

    def construct(self, values: Tensor) -> Tensor:
        return values if self.all_reduce is None else self.all_reduce(values)


class ReduceScatter(nn.Cell):
    """Row `index` of the sum of a (group size, n) tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.index = group.index
        self.reduce_scatter = None
        if group.ranks.reduce_scatter_operator == "ReduceScatter":
            self.reduce_scatter = ops.ReduceScatter(group=group.name)
        else:
            self.all_reduce = AllReduce(group)

    def construct(self, values: Tensor) -> Tensor:
        if self.reduce_scatter is not None:
            return self.reduce_scatter(values).reshape(-1)
        return self.all_reduce(values)[self.index]


class AllGather(nn.Cell):
    """The (group size, n) tensor of all ranks' n values."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_gather = None
        if group.ranks.all_gather_operator == "AllGather":
            self.all_gather = ops.AllGather(group=group.name)
        else:
            # Each rank fills its own row, and an AllReduce adds them up.
            self.all_reduce = AllReduce(group)
            self.own_row = Tensor([[i == group.index] for i in range(group.ranks.size)])

    def construct(self, values: Tensor) -> Tensor:
        values = values.reshape(1, -1)
        if self.all_gather is not None:
            return self.all_gather(values)
        return self.all_reduce(ops.where(self.own_row, values, ops.zeros_like(values)))


def after(values: Tensor, done: Done) -> Tensor:
    """Return ``values`` after ``done``: all ranks must send their messages in the same order."""
    return values if done is None else ops.depend(values, done)


def in_buckets(parameters: Sequence[Parameter], buckets: Buckets) -> tuple[ParameterTuple, ...]:
    """Return the parameters of each message. Looking them up one by one in a graph would take compile time."""
    return tuple(ParameterTuple(parameters[i] for i in bucket) for bucket in buckets)


def in_runs(parameters: Sequence[Parameter], buckets: Buckets, cuts: Sequence[Cuts]) -> tuple[Runs, ...]:
    """Return the parameters of each message in runs, the targets of the result of `cut`."""
    bucketed = zip(in_buckets(parameters, buckets), cuts)
    return tuple(tuple(map(ParameterTuple, runs_of(bucket, cut))) for bucket, cut in bucketed)


def runs_of(bucket: Sequence[object], cuts: Cuts) -> Runs:
    """Return the parts of a message in runs."""
    each = iter(bucket)
    return tuple(tuple(islice(each, count)) for count in cuts.counts)


def _run(rows: Tensor, begin: int, length: int, count: int) -> tuple[Tensor, ...]:
    columns = rows if length == rows.shape[1] else ops.slice(rows, (0, begin), (rows.shape[0], length))
    return (columns,) if count == 1 else Split(1, count)(columns)


def cut(rows: Tensor, cuts: Cuts) -> Runs:
    """Split a message, a tensor of shape (ranks, n), into its parts. Each part has the same number of rows."""
    runs: Runs = _map(ops.partial(_run, rows), *cuts)
    return runs


def _assign_part(target: Parameter, part: Tensor) -> Tensor:
    return ops.assign(target, as_dtype(part.reshape(target.shape), target.dtype))


def assign_runs(targets: Runs, runs: Runs) -> Done:
    """Assign parts of a message to parameters of their sizes."""
    return _map(_assign_part, targets, runs)


def rounded(factor: Tensor, like: Tensor, total: Tensor) -> Tensor:
    return ops.cast(total * factor, like.dtype)


def _flat(total: Tensor) -> Tensor:
    return total.reshape(-1)


class BucketedAllReduce(nn.Cell):
    """Add the buffer's loss and weight and some of its sums over all ranks, in place."""

    def __init__(self, buffer: GradientBuffer, layout: BucketLayout, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer
        self.totals = ParameterTuple(buffer.totals())
        # The begin of each scalar in the message.
        self.total_begins = tuple(accumulate([value.size for value in self.totals[:-1]], initial=0))
        # Copied because a graph can only read attributes of a cell.
        self.buckets, self.cuts, self.ends = layout.buckets, layout.cuts, layout.ends
        self.sums = in_buckets(buffer.sums, layout.buckets)
        self.targets = in_runs(buffer.sums, layout.buckets, layout.cuts)
        self.all_reduce = AllReduce(Group(layout.world, rank))
        self.like = Tensor(0.0, layout.dtype)
        self.in_float32 = layout.in_float32
        self.map = ops.HyperMap()

    def construct(self, added: Done = ()) -> Done:
        """Reduce the sums. ``added`` is the result of the buffer's `add` if that is part of the same graph."""
        done: Done = ()
        last: Done = None
        factor = weight = Tensor(1.0, ms.float32)
        if not self.in_float32:
            # The weight must be exact, and a sum over many rows can overflow 16 bits where its mean does not.
            done = self._put_totals(self.all_reduce(self._flat_totals(added)), 0)
            last = weight = ops.depend(self.buffer.weight + 0.0, done)
            factor = reciprocal(weight)
        for number, bucket in enumerate(self.buckets):
            # The scalars go with the first message, so that they need none of their own.
            with_totals = number == 0 and self.in_float32
            sums = tuple(self.sums[number]) if len(added) == 0 else pick(added[0], bucket)
            flat = self.map(_flat, sums)
            if not self.in_float32:
                flat = self.map(ops.partial(rounded, factor, self.like), flat)
            if with_totals:
                flat += (self._flat_totals(added),)
            if len(flat) > 0:
                # It waits for the last message, but not for the assignment of its result.
                last = self.all_reduce(after(ops.concat(flat), last))
                done += self._put(number, last, weight, with_totals)
        return done

    def _put(self, number: int, total: Tensor, weight: Tensor, with_totals: bool) -> Done:
        """Assign the result of a message."""
        if not self.in_float32:
            total = ops.cast(total, ms.float32) * weight
        done: Done = ()
        if len(self.buckets[number]) > 0:
            done = assign_runs(self.targets[number], cut(total.reshape(1, -1), self.cuts[number]))
        return done + self._put_totals(total, self.ends[number]) if with_totals else done

    def _flat_totals(self, added: Done) -> Tensor:
        flat: tuple[Tensor, ...] = ()
        for i, value in enumerate(self.totals):
            # For the loss and the weight, ``added`` has newer values.
            flat += (added[1 + i].reshape(1) if 0 < len(added) - 1 - i else value.reshape(-1),)
        return ops.concat(flat)

    def _put_totals(self, total: Tensor, begin: int) -> Done:
        done: Done = ()
        for i, value in enumerate(self.totals):
            place = begin + self.total_begins[i]
            done += (ops.assign(value, total[place : place + value.size].reshape(value.shape)),)
        return done
