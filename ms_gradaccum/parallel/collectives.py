"""Sums over groups of ranks in fused messages, with stand-ins where a device has no kernel."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group

# Elements of one message: fewer messages cost less latency, larger ones more memory for the copy.
BUCKET_SIZE = 4 * 1024 * 1024


class Group:
    """Some ranks of the job: the ``size`` ranks from ``first`` on, ``stride`` apart. This rank is number ``index``."""

    def __init__(self, first: int, size: int, stride: int, rank: int, world_size: int) -> None:
        self.size = size
        self.index = (rank - first) // stride
        self.is_world = size == world_size
        self.name = GlobalComm.WORLD_COMM_GROUP if self.is_world else f"ms_gradaccum_{first}_{size}_{stride}"
        if not self.is_world and size > 1 and self.name not in _created:
            create_group(self.name, [first + stride * i for i in range(size)])
            _created.add(self.name)


_created: set[str] = set()


class Sum(nn.Cell):
    """Sum of a tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(group=group.name) if group.size > 1 else None

    def construct(self, values: Tensor) -> Tensor:
        return values if self.all_reduce is None else self.all_reduce(values)


class ScatterSum(nn.Cell):
    """Row `index` of the sum of a (group size, n) tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.index = group.index
        self.reduce_scatter = None
        if ms.get_context("device_target") == "CPU":
            self.sum = Sum(group)  # CPU has no ReduceScatter.
        else:
            self.reduce_scatter = ops.ReduceScatter(group=group.name)

    def construct(self, values: Tensor) -> Tensor:
        if self.reduce_scatter is not None:
            return self.reduce_scatter(values).reshape(-1)
        return self.sum(values)[self.index]


class Gather(nn.Cell):
    """The (group size, n) tensor of all ranks' n values."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_gather = None
        if ms.get_context("device_target") == "CPU" and not group.is_world:
            # CPU gathers over all ranks only: add up what each rank writes into its own row.
            self.sum = Sum(group)
            self.own_row = Tensor([[i == group.index] for i in range(group.size)])
        else:
            self.all_gather = ops.AllGather(group=group.name)

    def construct(self, values: Tensor) -> Tensor:
        values = values.reshape(1, -1)
        if self.all_gather is not None:
            return self.all_gather(values)
        return self.sum(ops.where(self.own_row, values, ops.zeros_like(values)))


def fill_buckets(indices: Any, sizes: Any, limit: int = BUCKET_SIZE) -> tuple[tuple[int, ...], ...]:
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


def after(values: Tensor, done: Any) -> Tensor:
    """Return ``values`` once ``done`` is there: all ranks must send their messages in one order."""
    return values if done is None else ops.depend(values, done)
