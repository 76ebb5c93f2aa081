"""Sums over groups of ranks in fused messages, with stand-ins where a device has no kernel."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group

from ms_gradaccum._checks import sentence
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.parallel.messages import Ranks


def check_sent(owner: str, dtype: Any) -> None:
    """Raise for a dtype that a device does not add up over ranks."""
    if dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        rule, remedy = "one whose reduce_dtype the device can send", "Use float32, or float16 to halve the messages."
        raise ValueError(sentence(owner, "mixed_precision", rule, "bfloat16 on CPU", remedy))


class Group:
    """Ranks that are connected: those from ``first`` on, ``stride`` apart. This ``rank`` is number ``index``."""

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
            # Add up what each rank writes into its own row.
            self.all_reduce = AllReduce(group)
            self.own_row = Tensor([[i == group.index] for i in range(group.ranks.size)])

    def construct(self, values: Tensor) -> Tensor:
        values = values.reshape(1, -1)
        if self.all_gather is not None:
            return self.all_gather(values)
        return self.all_reduce(ops.where(self.own_row, values, ops.zeros_like(values)))


def after(values: Tensor, done: Done) -> Tensor:
    """Return ``values`` once ``done`` is there: all ranks must send their messages in one order."""
    return values if done is None else ops.depend(values, done)
