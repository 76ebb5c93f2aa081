"""HSDP: optimizer state and reduced gradients exist once per shard group, replicated over groups.

The name and the arguments are those of ``AutoParallel.hsdp``; the idea is that of ZeRO (Rajbhandari et al., 2020),
stage 1, with the hybrid groups of PyTorch's HSDP.
"""

from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum._checks import sentence
from ms_gradaccum.grad_buffer import GradBuffer, zeros
from ms_gradaccum.grad_clip import sum_of_squares
from ms_gradaccum.parallel.collectives import Gather, Group, ScatterSum, Sum, after, fill_buckets
from ms_gradaccum.parallel.data_parallel import SumOverRanks
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.parallel.world import World

_OWNER = "HSDP"


@dataclass(frozen=True)
class HSDP:
    """Hybrid sharded data parallelism: each rank of a shard group keeps and updates its rows of every parameter.

    Optimizer state and reduced gradients are sharded on axis 0; the weights that the network uses and the float32
    buffer are whole on each rank. An update costs a reduce-scatter of the gradients and an all-gather of the weights
    inside each group and, if there are several groups, an all-reduce of the shards across them.

    Args:
        shard_size (int): Number of ranks that share one copy. It divides the number of ranks. ``-1``: all ranks.
            Default: ``-1``.
        threshold (int): Parameters smaller than this stay whole on each rank. Unit: KB. Default: ``64``.
        optimizer_level (str): ``"level1"``, the only one that this path has. Default: ``"level1"``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import HSDP
        >>> print(HSDP(shard_size=2, threshold=0))
        HSDP(shard_size=2, threshold=0, optimizer_level='level1')
    """

    shard_size: int = -1
    threshold: int = 64
    optimizer_level: str = "level1"

    def __post_init__(self) -> None:
        for name, lowest, remedy in (("shard_size", 1, "-1 means all ranks."), ("threshold", 0, "It is in KB.")):
            value = getattr(self, name)
            rule = f"an int of at least {lowest}" + (" or -1" if name == "shard_size" else "")
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(sentence(_OWNER, name, rule, f"{value!r} of type {type(value).__name__}", remedy))
            if value < lowest and not (name == "shard_size" and value == -1):
                raise ValueError(sentence(_OWNER, name, rule, value, remedy))
        if self.optimizer_level != "level1":
            remedy = "The gradient buffer and the weights stay whole here; level2 and level3 need the compiler's HSDP."
            raise ValueError(sentence(_OWNER, "optimizer_level", "'level1'", repr(self.optimizer_level), remedy))


class ShardedUpdate(SingleProcess):
    """What HSDP does at the end of a window. Takes over an optimizer that was built for whole parameters."""

    several = True

    def __init__(self, optimizer: nn.Optimizer, buffer: GradBuffer, settings: HSDP, world: World) -> None:
        size = world.size if settings.shard_size == -1 else settings.shard_size
        whole = tuple(optimizer.parameters)
        sharded = tuple(i for i, weight in enumerate(whole) if _is_sharded(weight, size, settings.threshold))
        group = Group(world.rank // size * size, size, 1, world.rank, world.size)
        shard_optimizer(optimizer, sharded, size, group.index)
        super().__init__(optimizer.parameters, buffer)
        self.whole = ParameterTuple(whole)
        self.sharded = sharded
        sizes = [weight.size for weight in whole]
        kept = [i for i in range(len(whole)) if i not in sharded]
        self.sum_whole = SumOverRanks(kept, sizes, world)
        self.buckets = fill_buckets(sharded, sizes)
        self.scatter_sum, self.gather = ScatterSum(group), Gather(group)
        self.sum_over_groups = Sum(Group(group.index, world.size // size, size, world.rank, world.size))
        self.sum_over_world = Sum(Group(0, world.size, 1, world.rank, world.size))
        self.size, self.index, self.groups = size, group.index, world.size // size
        self.is_sharded = tuple(i in sharded for i in range(len(whole)))
        # Where the sums of the sharded gradients go; those of the others stay where they are.
        self.sums = ParameterTuple(
            zeros(f"accu_grads.shard.{weight.name}", self.weights[i].shape) if i in sharded else buffer.sums[i]
            for i, weight in enumerate(whole)
        )

    def reduce(self) -> Any:
        done = self.sum_whole(self.buffer.sums, self.buffer.loss, self.buffer.weight)
        for bucket in self.buckets:
            rows: tuple[Tensor, ...] = ()
            for i in bucket:
                rows += (self.buffer.sums[i].reshape(self.size, -1),)
            total = self.sum_over_groups(self.scatter_sum(after(ops.concat(rows, 1), done)))
            done = self._put(self.sums, bucket, total)
        return done

    def norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        shards, whole = Tensor(0.0, ms.float32), Tensor(0.0, ms.float32)
        for i, grad in enumerate(grads):
            if self.is_sharded[i]:
                shards = shards + sum_of_squares(grad)
            else:
                whole = whole + sum_of_squares(grad)
        # Over all ranks, though each group has all shards: so every rank gets the same bits.
        return ops.sqrt(self.sum_over_world(shards.reshape(1)).reshape(()) / self.groups + whole)

    def before_update(self) -> Any:
        # The network's weights are the truth: a checkpoint may have been loaded into them since the last update.
        done: tuple[Any, ...] = ()
        for i in self.sharded:
            rows = self.weights[i].shape[0]
            done += (ops.assign(self.weights[i], self.whole[i][self.index * rows : (self.index + 1) * rows]),)
        return done

    def after_update(self, updated: Any) -> Any:
        done = updated
        for bucket in self.buckets:
            flat: tuple[Tensor, ...] = ()
            for i in bucket:
                # As float32, which every backend sends and which holds 16-bit weights exactly.
                flat += (ops.cast(self.weights[i].reshape(-1), ms.float32),)
            rows = self.gather(after(ops.concat(flat), done))
            done = ()
            begin = 0
            for i in bucket:
                size = self.weights[i].size
                full = rows[:, begin : begin + size].reshape(self.whole[i].shape)
                done += (ops.assign(self.whole[i], ops.cast(full, self.whole[i].dtype)),)
                begin += size
        return done

    def _put(self, targets: ParameterTuple, bucket: Any, values: Tensor) -> Any:
        done: tuple[Any, ...] = ()
        begin = 0
        for i in bucket:
            size = targets[i].size
            done += (ops.assign(targets[i], values[begin : begin + size].reshape(targets[i].shape)),)
            begin += size
        return done


def _is_sharded(weight: Parameter, size: int, threshold: int) -> bool:
    nbytes = weight.size * weight.itemsize
    return size > 1 and weight.ndim > 0 and weight.shape[0] % size == 0 and nbytes >= threshold * 1024


def check_shardable(optimizer: nn.Cell) -> None:
    """Raise unless each row of a parameter can be updated from that row of the gradient and of the state."""
    remedy = "Use an optimizer that works element by element, or DataParallel()."
    whole = (nn.Lamb, nn.LARS, nn.AdaFactor)
    if not isinstance(optimizer, nn.Optimizer) or isinstance(optimizer, whole):
        got = f"{type(optimizer).__name__}, which looks at whole parameters or keeps its state elsewhere"
        raise ValueError(sentence(_OWNER, "optimizer", "an elementwise optimizer of mindspore.nn", got, remedy))
    shapes = [weight.shape for weight in optimizer.parameters]
    known = {id(item) for value in _matching(optimizer, shapes) for item in value}
    for item in optimizer.get_parameters():
        if id(item) not in known and item.size > 1:
            got = f"{type(optimizer).__name__} with the state {item.name!r} of shape {tuple(item.shape)}"
            raise ValueError(sentence(_OWNER, "optimizer", "one whose state has its parameters' shapes", got, remedy))


def _matching(optimizer: nn.Cell, shapes: list[Any]) -> list[ParameterTuple]:
    tuples = [value for value in vars(optimizer).values() if isinstance(value, ParameterTuple)]
    return [value for value in tuples if [item.shape for item in value] == shapes]


def shard_optimizer(optimizer: nn.Optimizer, sharded: tuple[int, ...], size: int, index: int) -> None:
    """Replace the parameters ``sharded`` of the optimizer, and the state that belongs to them, by their slices."""
    shapes = [weight.shape for weight in optimizer.parameters]
    # A parameter can be in several tuples and must stay one.
    slices: dict[int, Parameter] = {}
    for value in _matching(optimizer, shapes):
        for i in sharded:
            if id(value[i]) not in slices:
                slices[id(value[i])] = _slice(value[i], size, index)
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, ParameterTuple) and any(id(item) in slices for item in value):
            # Past Cell.__setattr__, which takes the second name of a tuple for another one of the same names.
            vars(optimizer)[name] = ParameterTuple(slices.get(id(item), item) for item in value)
    for name, item in list(optimizer._params.items()):
        if id(item) in slices:
            # The whole state must go, or nothing is saved.
            del optimizer._params[name]
            optimizer._params[slices[id(item)].name] = slices[id(item)]


def _slice(parameter: Parameter, size: int, index: int) -> Parameter:
    rows = parameter.shape[0] // size
    values = parameter.asnumpy()[index * rows : (index + 1) * rows]
    return Parameter(Tensor(values), f"shard.{parameter.name}", requires_grad=parameter.requires_grad)
