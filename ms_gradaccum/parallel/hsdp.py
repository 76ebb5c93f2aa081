"""HSDP: optimizer state and reduced gradients are sharded inside a group and replicated over groups."""

from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.parallel.kinds import HSDP
from ms_gradaccum.parallel.layout import ReducerLayout
from ms_gradaccum.parallel.shards import ShardedReducer, Shards

_OWNER = "HSDP"


class HSDPReducer(ShardedReducer):
    """Reducer that also shards the optimizer, which was built for whole parameters, and its state."""

    takes_sums = True

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
        super().__init__(shards, optimizer, buffer, layout, rank, settings)
        self.whole = ParameterTuple(whole)
        self.own = ParameterTuple(self.parameters[i] for i in shards.sharded)
        self.wholes = ParameterTuple(whole[i] for i in shards.sharded)
        self.own_in_buckets, self.wholes_in_runs = shards.in_buckets(self.parameters), shards.in_runs(whole)
        for item in state:
            self.show_whole(item)
        # The network's whole parameters are saved and loaded; the slices are updated from them before each update.
        self.hidden |= {id(self.parameters[i]) for i in shards.sharded}

    def replicas(self) -> tuple[Parameter, ...]:
        return tuple(self.whole)

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return grads

    def before_update(self) -> Done:
        # The network's parameters take precedence: a checkpoint may have been loaded since the last update.
        return self.shards.assign_own(self.own, self.wholes)

    def after_update(self, updated: Done) -> Done:
        return self.shards.all_gather_into(self.wholes_in_runs, self.own_in_buckets, updated), updated


def check_shardable(optimizer: nn.Cell) -> None:
    """Raise unless each row of a parameter can be updated from the same row of the gradient and the state."""
    remedy = "Use an optimizer that works element by element, or DataParallel()."
    if isinstance(optimizer, (nn.Lamb, nn.LARS, nn.AdaFactor)):
        got = f"{type(optimizer).__name__}, which looks at whole parameters"
        raise ValueError(argument_error(_OWNER, "optimizer", "one that works element by element", got, remedy))
    shapes = [parameter.shape for parameter in optimizer.parameters]
    known = {id(item) for value in _matching(optimizer, shapes) for item in value}
    for item in optimizer.get_parameters():
        if id(item) not in known and item.size > 1:
            got = f"{type(optimizer).__name__} with the state {item.name!r} of shape {tuple(item.shape)}"
            raise ValueError(
                argument_error(_OWNER, "optimizer", "one whose state has its parameters' shapes", got, remedy)
            )


def _matching(optimizer: nn.Cell, shapes: list[object]) -> list[ParameterTuple]:
    tuples = [value for value in vars(optimizer).values() if isinstance(value, ParameterTuple)]
    return [value for value in tuples if [item.shape for item in value] == shapes]


def shard_optimizer(optimizer: nn.Optimizer, shards: Shards) -> list[Parameter]:
    """Replace sharded parameters and their optimizer state by slices. Return the slices of the state."""
    shapes = [parameter.shape for parameter in optimizer.parameters]
    parameters = {id(parameter) for parameter in optimizer.parameters}
    # A parameter can be in several tuples and must have one slice.
    slices: dict[int, Parameter] = {}
    for value in _matching(optimizer, shapes):
        for i in shards.sharded:
            if id(value[i]) not in slices:
                # The network has a parameter of that name; the names of the state are unique.
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
            # The whole state must be deleted, or no memory is saved.
            del optimizer._params[name]
            optimizer._params[slices[id(item)].name] = slices[id(item)]
    return [item for key, item in slices.items() if key not in parameters]
