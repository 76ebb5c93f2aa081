"""Sums over groups of ranks in fused messages, with stand-ins where a device has no kernel."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group

from ms_gradaccum._checks import sentence


def has_reduce_scatter(device_target: str) -> bool:
    """Return whether a device adds up a part for each rank; CPU has to add up all of it everywhere."""
    return device_target != "CPU"


def has_all_gather(device_target: str, is_world: bool) -> bool:
    """Return whether a device gathers in a group; CPU does over all ranks only."""
    return is_world or device_target != "CPU"


def check_sent(owner: str, dtype: Any) -> None:
    """Raise for a dtype that a device does not add up over ranks."""
    if dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        rule, remedy = "one whose reduce_dtype the device can send", "Use float32, or float16 to halve the messages."
        raise ValueError(sentence(owner, "mixed_precision", rule, "bfloat16 on CPU", remedy))


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


class AllReduce(nn.Cell):
    """Sum of a tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(group=group.name) if group.size > 1 else None

    def construct(self, values: Tensor) -> Tensor:
        return values if self.all_reduce is None else self.all_reduce(values)


class ReduceScatter(nn.Cell):
    """Row `index` of the sum of a (group size, n) tensor over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(auto_prefix=False)
        self.index = group.index
        self.reduce_scatter = None
        if has_reduce_scatter(ms.get_context("device_target")):
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
        if has_all_gather(ms.get_context("device_target"), group.is_world):
            self.all_gather = ops.AllGather(group=group.name)
        else:
            # Add up what each rank writes into its own row.
            self.all_reduce = AllReduce(group)
            self.own_row = Tensor([[i == group.index] for i in range(group.size)])

    def construct(self, values: Tensor) -> Tensor:
        values = values.reshape(1, -1)
        if self.all_gather is not None:
            return self.all_gather(values)
        return self.all_reduce(ops.where(self.own_row, values, ops.zeros_like(values)))


def after(values: Tensor, done: Any) -> Tensor:
    """Return ``values`` once ``done`` is there: all ranks must send their messages in one order."""
    return values if done is None else ops.depend(values, done)
