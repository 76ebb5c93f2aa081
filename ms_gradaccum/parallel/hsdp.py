"""HSDP: optimizer state and reduced gradients exist once per shard group, replicated over groups.

The name and the arguments are those of ``AutoParallel.hsdp``; the idea is that of ZeRO (Rajbhandari et al., 2020),
stage 1, with the hybrid groups of PyTorch's HSDP.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_gradaccum._checks import check_bool, check_choice, sentence, typed
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.parallel.layout import ReducerLayout
from ms_gradaccum.parallel.shards import ShardedReducer, Shards

_OWNER = "HSDP"
_Level = Literal["level1", "level2", "level3"]


@dataclass(frozen=True)
class HSDP:
    """Hybrid sharded data parallelism: each rank of a shard group keeps and updates its rows of every parameter.

    ==========  ===============  ===================  ====================
    level       optimizer state  sums of a window     weights
    ==========  ===============  ===================  ====================
    ``level1``  sharded          whole, then sharded  whole
    ``level2``  sharded          sharded              whole
    ``level3``  sharded          sharded              whole (with a warning)
    ==========  ===============  ===================  ====================

    Shards are rows of axis 0. With ``level1`` micro batches communicate nothing; an update costs a reduce-scatter of
    the sums and an all-gather of the weights inside each group and, if there are several groups, an all-reduce of
    the shards across them. With ``level2`` each micro batch costs the reduce-scatter, and no rank ever holds the
    whole sums. Sharding the weights too (``level3``) takes the compiler's HSDP, inside ``AutoParallel`` on Ascend or
    GPU.

    Args:
        shard_size (int): Number of ranks that share one copy. It divides the number of ranks. ``-1``: all ranks.
            Default: ``-1``.
        threshold (int): Parameters smaller than this stay whole on each rank. Unit: KB. Default: ``64``.
        optimizer_level (str): ``"level1"``, ``"level2"`` or ``"level3"``. Default: ``"level1"``.
        check_weights (bool): Whether to compare a hash of the weights over the ranks after each update and raise a
            RuntimeError if they differ; for debugging. Default: ``False``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import HSDP
        >>> print(HSDP(shard_size=2, threshold=0).optimizer_level)
        level1
    """

    shard_size: int = -1
    threshold: int = 64
    optimizer_level: _Level = "level1"
    check_weights: bool = False

    def __post_init__(self) -> None:
        for name, lowest, remedy in (("shard_size", 1, "-1 means all ranks."), ("threshold", 0, "It is in KB.")):
            value = getattr(self, name)
            rule = f"an int of at least {lowest}" + (" or -1" if name == "shard_size" else "")
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(sentence(_OWNER, name, rule, typed(value), remedy))
            if value < lowest and not (name == "shard_size" and value == -1):
                raise ValueError(sentence(_OWNER, name, rule, value, remedy))
        remedy = "Higher levels shard more and communicate more."
        check_choice(_OWNER, "optimizer_level", self.optimizer_level, get_args(_Level), remedy)
        check_bool(_OWNER, "check_weights", self.check_weights, "True is for debugging.")

    @property
    def sync_each_batch(self) -> bool:
        """Whether the ranks add up the gradients of each micro batch, and keep nothing but their shards."""
        return self.optimizer_level != "level1"


class HSDPReducer(ShardedReducer):
    """HSDP: the optimizer and its state are sharded too. It was built for whole parameters and is taken over."""

    def __init__(
        self,
        shards: Shards,
        optimizer: nn.Optimizer,
        buffer: GradientBuffer,
        layout: ReducerLayout,
        rank: int,
        settings: HSDP,
    ) -> None:
        whole = tuple(optimizer.parameters)
        state = shard_optimizer(optimizer, shards)
        super().__init__(shards, optimizer.parameters, buffer, layout, rank, settings)
        self.whole = ParameterTuple(whole)
        self.own = ParameterTuple(self.parameters[i] for i in shards.sharded)
        self.wholes = ParameterTuple(whole[i] for i in shards.sharded)
        self.own_in_buckets, self.wholes_in_runs = shards.in_buckets(self.parameters), shards.in_runs(whole)
        for item in state:
            self.show_whole(item)
        # The network's own weights are saved and loaded; their slices follow them before each update.
        self.hidden |= {id(self.parameters[i]) for i in shards.sharded}

    def replicas(self) -> tuple[Parameter, ...]:
        return tuple(self.whole)

    def before_update(self) -> Done:
        # The network's weights are the truth: a checkpoint may have been loaded into them since the last update.
        return self.shards.assign_own(self.own, self.wholes)

    def after_update(self, updated: Done) -> Done:
        return self.shards.all_gather_into(self.wholes_in_runs, self.own_in_buckets, updated), updated


def check_shardable(optimizer: nn.Cell) -> None:
    """Raise unless each row of a parameter can be updated from that row of the gradient and of the state."""
    remedy = "Use an optimizer that works element by element, or DataParallel()."
    if isinstance(optimizer, (nn.Lamb, nn.LARS, nn.AdaFactor)):
        got = f"{type(optimizer).__name__}, which looks at whole parameters"
        raise ValueError(sentence(_OWNER, "optimizer", "one that works element by element", got, remedy))
    shapes = [parameter.shape for parameter in optimizer.parameters]
    known = {id(item) for value in _matching(optimizer, shapes) for item in value}
    for item in optimizer.get_parameters():
        if id(item) not in known and item.size > 1:
            got = f"{type(optimizer).__name__} with the state {item.name!r} of shape {tuple(item.shape)}"
            raise ValueError(sentence(_OWNER, "optimizer", "one whose state has its parameters' shapes", got, remedy))


def _matching(optimizer: nn.Cell, shapes: list[Any]) -> list[ParameterTuple]:
    tuples = [value for value in vars(optimizer).values() if isinstance(value, ParameterTuple)]
    return [value for value in tuples if [item.shape for item in value] == shapes]


def shard_optimizer(optimizer: nn.Optimizer, shards: Shards) -> list[Parameter]:
    """Replace the parameters that are sharded, and the state that belongs to them, by slices. Return the state's."""
    shapes = [parameter.shape for parameter in optimizer.parameters]
    parameters = {id(parameter) for parameter in optimizer.parameters}
    # A parameter can be in several tuples and must stay one.
    slices: dict[int, Parameter] = {}
    for value in _matching(optimizer, shapes):
        for i in shards.sharded:
            if id(value[i]) not in slices:
                # The network has a weight of that name; nothing else has the state's.
                name = f"shard.{value[i].name}" if id(value[i]) in parameters else value[i].name
                values = Tensor(shards.cut(value[i].asnumpy()))
                slices[id(value[i])] = Parameter(values, name, requires_grad=value[i].requires_grad)
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, ParameterTuple) and any(id(item) in slices for item in value):
            # Past Cell.__setattr__, which takes the second name of a tuple for another one of the same names.
            vars(optimizer)[name] = ParameterTuple(slices.get(id(item), item) for item in value)
    for group in getattr(optimizer, "param_groups", []):
        group["params"] = [slices.get(id(item), item) for item in group["params"]]
    for name, item in list(optimizer._params.items()):
        if id(item) in slices:
            # The whole state must go, or nothing is saved.
            del optimizer._params[name]
            optimizer._params[slices[id(item)].name] = slices[id(item)]
    return [item for key, item in slices.items() if key not in parameters]
