"""Collectives for many tensors in few messages, with replacements for operators that a device lacks."""

from collections.abc import Sequence
from functools import cache
from itertools import islice

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group
from mindspore.ops.operations import Split

from ms_gradaccum.backend.arithmetic import as_dtype, set_in_place
from ms_gradaccum.backend.device import has_all_collectives, reduces_in_order
from ms_gradaccum.backend.tensors import Done, map_tensors
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.parallel.kinds import World
from ms_gradaccum.parallel.layout import Bucket, Runs

Parts = tuple[tuple[Tensor, ...], ...]  # The tensors of a message, grouped by its runs.


class Group:
    """Some ranks of a job, from ``first`` on with step ``stride``. The position of ``rank`` in them is ``index``."""

    def __init__(self, size: int, world: World, first: int = 0, stride: int = 1) -> None:
        self.size = size
        self.index = (world.rank - first) // stride
        self.is_world = size == world.size
        self.name = GlobalComm.WORLD_COMM_GROUP
        if 1 < size < world.size:
            self.name = _created(range(first, first + stride * size, stride))


@cache
def _created(ranks: range) -> str:
    """Create a group of ranks, and return its name."""
    name = f"ms_gradaccum_{ranks.start}_{len(ranks)}_{ranks.step}"
    create_group(name, list(ranks))
    return name


class AllReduce(nn.Cell):
    """Sum of a tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.size = group.size
        # On GPU, a ReduceScatter and an AllGather stand in for an AllReduce.
        self.reduces = reduces_in_order()
        if self.size > 1 and self.reduces:
            self.all_reduce = ops.AllReduce(group=group.name)
        elif self.size > 1:
            self.reduce_scatter = ops.ReduceScatter(group=group.name)
            self.all_gather = ops.AllGather(group=group.name)

    def construct(self, values: Tensor) -> Tensor:
        if self.size == 1:
            return values
        if self.reduces:
            return self.all_reduce(values)
        # Each rank adds up its part, and all gather the parts, as a ring does it.
        row = values.reshape(-1)
        missing = -values.size % self.size
        if missing:
            row = ops.concat((row, ops.zeros((missing,), values.dtype)))
        total = self.all_gather(self.reduce_scatter(row))
        if missing:
            total = total[: values.size]
        return total.reshape(values.shape)


class AllGather(nn.Cell):
    """The (group size, n) tensor of all ranks' n values."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_gather = None
        if group.is_world or has_all_collectives():
            self.all_gather = ops.AllGather(group=group.name)
        else:
            # Each rank fills its own row, and an AllReduce adds them up.
            self.all_reduce = AllReduce(group)
            self.own_row = Tensor([[i == group.index] for i in range(group.size)])

    def construct(self, values: Tensor) -> Tensor:
        values = values.reshape(1, -1)
        if self.all_gather is not None:
            return self.all_gather(values)
        return self.all_reduce(ops.where(self.own_row, values, ops.zeros_like(values)))


class BucketedReduce(nn.Cell):
    """Sum of tensors over all ranks in one message. Each rank of a group keeps its rows of the result.

    In 16 bits, the tensors are divided by a weight before sending: a sum over many rows can overflow where its mean
    does not. All ranks must send their messages in the same order, so each message waits for the ``last`` one.
    """

    def __init__(self, group: Group, replicas: Group, dtype: ms.Type) -> None:
        super().__init__(auto_prefix=False)
        self.size = group.size
        self.index = group.index
        self.reduce_scatter = None
        # On CPU, an AllReduce of the whole tensor stands in for it.
        if self.size > 1 and has_all_collectives():
            self.reduce_scatter = ops.ReduceScatter(group=group.name)
        self.all_reduce_group = AllReduce(group)
        self.all_reduce_replicas = AllReduce(replicas)
        self.like = Tensor(0.0, dtype)
        self.in_float32 = dtype == ms.float32

    def construct(self, tensors: tuple[Tensor, ...], weight: Tensor, last: Done) -> Tensor:
        """Return the sums in float32, one after the other in one row."""
        rows = map_tensors(ops.partial(_as_rows, self.size), tensors)
        if not self.in_float32:
            rows = map_tensors(ops.partial(_rounded, reciprocal(weight), self.like), rows)
        total = ops.depend(ops.concat(rows, 1), last)
        if self.reduce_scatter is not None:
            total = self.reduce_scatter(total)
        elif self.size > 1:
            total = self.all_reduce_group(total)[self.index]
        total = self.all_reduce_replicas(total)
        if not self.in_float32:
            total = ops.cast(total, ms.float32) * weight
        return total.reshape(1, -1)


def _as_rows(size: int, whole: Tensor) -> Tensor:
    return as_dtype(whole, ms.float32).reshape(size, -1)


def _rounded(factor: Tensor, like: Tensor, total: Tensor) -> Tensor:
    return ops.cast(total * factor, like.dtype)


def of_bucket(parameters: Sequence[Parameter], bucket: Bucket) -> ParameterTuple:
    """Return the parameters of a message. A lookup one by one in a graph would cost compile time."""
    return ParameterTuple([parameters[i] for i in bucket.indices])


def _run(rows: Tensor, begin: int, length: int, count: int) -> tuple[Tensor, ...]:
    if length < rows.shape[1]:
        rows = ops.slice(rows, (0, begin), (rows.shape[0], length))
    return (rows,) if count == 1 else Split(1, count)(rows)


def split_message(rows: Tensor, runs: Runs) -> Parts:
    """Split a message, a tensor of shape (ranks, n), into its parts. Each part has the same number of rows."""
    parts: Parts = map_tensors(ops.partial(_run, rows), *runs)
    return parts


class AssignParts(nn.Cell):
    """Assign the parts of a message to parameters of their sizes."""

    def __init__(self, parameters: Sequence[Parameter], bucket: Bucket) -> None:
        super().__init__(auto_prefix=False)
        self.runs = bucket.runs
        # The parameters, grouped by the runs of the message, of which the last item has their numbers.
        each = iter(of_bucket(parameters, bucket))
        self.targets = tuple(ParameterTuple(islice(each, count)) for count in bucket.runs[-1])

    def construct(self, message: Tensor) -> Done:
        return map_tensors(_assign_part, self.targets, split_message(message, self.runs))


class SumMessage(nn.Cell):
    """A message that adds up parameters over all ranks, and assigns the sums."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        sums: Sequence[Parameter],
        bucket: Bucket,
        group: Group,
        replicas: Group,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = of_bucket(parameters, bucket)
        self.reduce = BucketedReduce(group, replicas, bucket.dtype)
        self.assign = AssignParts(sums, bucket)

    def construct(self, weight: Tensor, last: Done) -> tuple[Tensor, Done]:
        """Return the sums, for which the next message waits, and the assigned parameters."""
        total = self.reduce(self.parameters, weight, last)
        return total, self.assign(total)


def _assign_part(target: Parameter, part: Tensor) -> Tensor:
    return set_in_place(target, part.reshape(target.shape))
