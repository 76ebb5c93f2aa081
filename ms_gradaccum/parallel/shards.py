"""Shards: each rank of a group holds its rows of the tensors that can be divided, and the others whole.

HSDP shards the optimizer, too, inside a group, and replicates it over groups.
"""

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.tensors import Array, Done, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, reciprocal, zeros
from ms_gradaccum.parallel.collectives import (
    AllGather,
    AllReduce,
    Group,
    ReduceScatter,
    Runs,
    after,
    assign_runs,
    cut,
    in_buckets,
    in_runs,
    rounded,
    runs_of,
)
from ms_gradaccum.parallel.kinds import HSDP, Kind
from ms_gradaccum.parallel.layout import ReducerLayout, ShardLayout
from ms_gradaccum.parallel.reducer import DataParallelReducer

_HSDP = "HSDP"


class Shards(nn.Cell):
    """Convert a tuple of tensors, one per parameter, between whole and sharded, in few fused messages."""

    def __init__(self, layout: ShardLayout, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.in_float32 = layout.dtype == ms.float32
        self.like = Tensor(0.0, layout.dtype)
        size = layout.group.size
        group = Group(layout.group, rank, rank // size * size)
        self.size, self.index, self.groups = size, group.index, layout.replicas.size
        self.is_sharded, self.sharded, self.shapes = layout.is_sharded, layout.sharded, layout.shapes
        self.is_part = Tensor(layout.is_sharded)
        # Copied because a graph can only read attributes of a cell.
        self.buckets, self.cuts = layout.buckets, layout.cuts
        # The run and the place in it of each tensor. The runs of moved tensors come first, then one of all tensors.
        runs = [run for bucket, cuts in zip(layout.buckets, layout.cuts) for run in runs_of(bucket, cuts)]
        places = {i: (number, place) for number, run in enumerate(runs) for place, i in enumerate(run)}
        self.runs_and_places = tuple(zip(*(places.get(i, (len(runs), i)) for i in range(len(layout.sizes)))))
        self.map = ops.HyperMap()
        self.reduce_scatter_rows, self.all_gather_rows = ReduceScatter(group), AllGather(group)
        self.all_reduce_replicas = AllReduce(Group(layout.replicas, rank, group.index, size))
        self.all_reduce_world = AllReduce(Group(layout.world, rank))

    def scatter_bucket(self, wholes: tuple[Tensor, ...], weight: Tensor, last: Done) -> Tensor:
        """Return the shards of the sums over all ranks, in float32, of a bucket, in one tensor of one row.

        In 16 bits they are sent divided by ``weight``.
        """
        rows = self.map(ops.partial(_as_rows, self.size), wholes)
        if not self.in_float32:
            rows = self.map(ops.partial(rounded, reciprocal(weight), self.like), rows)
        total = self.all_reduce_replicas(self.reduce_scatter_rows(after(ops.concat(rows, 1), last)))
        if not self.in_float32:
            total = ops.cast(total, ms.float32) * weight
        return total.reshape(1, -1)

    def gather_bucket(self, shards: tuple[Tensor, ...], last: Done) -> Tensor:
        """Gather the whole tensors of these shards in one tensor with a row per rank."""
        return self.all_gather_rows(after(ops.concat(self.map(_as_flat, shards)), last))

    def reduce_scatter(self, wholes: tuple[Tensor, ...], likes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the shards of the sums over all ranks, in float32, and the tensors that are kept whole unchanged.

        They have the shapes of ``likes``, since computing shapes in a graph would dominate the compile time.
        """
        last: Done = None
        runs: Runs = ()
        for number, bucket in enumerate(self.buckets):
            # The weight here is 1: a micro batch has another weight on each rank, so its sums are sent undivided.
            last = self.scatter_bucket(pick(wholes, bucket), Tensor(1.0, ms.float32), last)
            runs += cut(last, self.cuts[number])
        return self._in_order(runs, wholes, likes)

    def all_gather(self, shards: tuple[Tensor, ...], likes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the whole tensors of which each rank of the group has a shard, in float32; others as they are.

        They have the shapes of ``likes``.
        """
        last: Done = None
        runs: Runs = ()
        for number, bucket in enumerate(self.buckets):
            last = self.gather_bucket(pick(shards, bucket), last)
            runs += cut(last, self.cuts[number])
        return self._in_order(runs, shards, likes)

    def _in_order(self, runs: Runs, others: tuple[Tensor, ...], likes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the communicated tensors and, of ``others``, those that were not communicated, in order."""
        moved = self.map(ops.partial(_pick_part, (*runs, others)), *self.runs_and_places)
        in_shape: tuple[Tensor, ...] = self.map(_shaped, moved, likes)
        return in_shape

    def reduce_scatter_into(
        self, targets: tuple[Runs, ...], wholes: tuple[ParameterTuple, ...], weight: Tensor, done: Done
    ) -> Done:
        """Assign the shards of the sums over all ranks, after ``done``. See `in_runs` and `in_buckets`."""
        last, assigned = done, ()
        for number, bucket in enumerate(wholes):
            last = self.scatter_bucket(tuple(bucket), weight, last)
            assigned += assign_runs(targets[number], cut(last, self.cuts[number]))
        return assigned

    def all_gather_into(self, targets: tuple[Runs, ...], shards: tuple[ParameterTuple, ...], done: Done) -> Done:
        """Assign the whole tensors of which each rank of the group has a shard, after ``done``."""
        last, assigned = done, ()
        for number, bucket in enumerate(shards):
            last = self.gather_bucket(tuple(bucket), last)
            assigned += assign_runs(targets[number], cut(last, self.cuts[number]))
        return assigned

    def assign_own(self, shards: ParameterTuple, wholes: ParameterTuple) -> Done:
        """Assign this rank's rows of the whole tensors."""
        done: Done = ()
        if len(shards) > 0:
            done = self.map(ops.partial(_assign_rows, self.index), tuple(shards), tuple(wholes))
        return done

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        """Return the sum of the squares of each whole tensor for those of the shards, a float32 tensor."""
        # Reduced over all ranks, although each group has all shards, so that every rank gets the same bits.
        wholes = self.all_reduce_world(ops.select(self.is_part, squares, ops.zeros_like(squares))) / self.groups
        return ops.select(self.is_part, wholes, squares)

    def cut(self, values: Array) -> Array:
        """Return this rank's rows of a whole array or tensor."""
        rows = values.shape[0] // self.size
        return values[self.index * rows : (self.index + 1) * rows]

    def whole_view(self, shard: Parameter) -> Parameter:
        """Return the stand-in of a shard in checkpoints: a parameter of the whole shape without memory.

        Loading into it loads the shard; to save it, `gather_values` is called instead.
        """
        with no_init_parameters():
            zeros = initializer("zeros", self._whole_shape(shard), shard.dtype)
            view = Parameter(zeros, shard.name, requires_grad=shard.requires_grad)

        def set_data(data: Tensor, slice_shape: bool = False) -> Parameter:
            assign_in_place(shard, Tensor(self.cut(data.asnumpy()), shard.dtype))
            return view

        view.set_data = set_data
        view.init_data = lambda *_, **__: view
        return view

    def gather_values(self, shard: Parameter) -> Tensor:
        """Gather the whole values of a sharded parameter. Collective."""
        with graph_mode():
            rows = self.all_gather_rows(ops.cast(shard, ms.float32).reshape(-1))
        return ops.cast(rows.reshape(self._whole_shape(shard)), shard.dtype)

    def _whole_shape(self, shard: Parameter) -> tuple[int, ...]:
        return (shard.shape[0] * self.size, *shard.shape[1:])


def _as_rows(size: int, whole: Tensor) -> Tensor:
    return ops.cast(whole, ms.float32).reshape(size, -1)


def _as_flat(shard: Tensor) -> Tensor:
    # Sent as float32, which every backend supports and which represents 16-bit values exactly.
    return ops.cast(shard, ms.float32).reshape(-1)


def _pick_part(runs: Runs, run: int, place: int) -> Tensor:
    return runs[run][place]


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    return part if part.shape == like.shape else part.reshape(like.shape)


def _assign_rows(index: int, shard: Parameter, whole: Tensor) -> Tensor:
    rows = shard.shape[0]
    return ops.assign(shard, whole[index * rows : (index + 1) * rows])


class ShardedReducer(DataParallelReducer):
    """Reducer that shards the sums of each window or micro batch, for an optimizer that takes whole gradients."""

    takes_sums = False

    def __init__(
        self,
        shards: Shards,
        optimizer: nn.Cell,
        buffer: GradientBuffer,
        layout: ReducerLayout,
        rank: int,
        settings: Kind,
    ) -> None:
        super().__init__(optimizer, buffer, layout, rank, settings)
        self.shards = shards
        self.every_batch = settings.sync_each_batch
        # The stand-ins of parameters in checkpoints, by id, and the parameters that checkpoints do not see.
        self.views: dict[int, Parameter] = {}
        self.hidden: set[int] = set()
        if self.every_batch:
            # The buffer has only shards.
            for i in shards.sharded:
                self.show_whole(buffer.sums[i])
            return
        # The sums of sharded gradients are reduced into separate shards, the others in place.
        self.sums = ParameterTuple(
            zeros(f"accu_grads.shard.{total.name}", shards.shapes[i]) if shards.is_sharded[i] else total
            for i, total in enumerate(buffer.sums)
        )
        self.hidden |= {id(self.sums[i]) for i in shards.sharded}
        self.sums_in_buckets = in_buckets(buffer.sums, shards.buckets)
        self.shards_in_runs = in_runs(self.sums, shards.buckets, shards.cuts)

    def show_whole(self, shard: Parameter) -> None:
        """Make checkpoints see the whole tensor of ``shard``."""
        self.views[id(shard)] = self.shards.whole_view(shard)
        self.gathers[shard.name] = lambda _: self.shards.gather_values(shard)

    def saved(self, parameter: Parameter) -> Parameter | None:
        return None if id(parameter) in self.hidden else self.views.get(id(parameter), parameter)

    def max_micro_batches(self, micro_batches: int) -> int:
        return self.most(micro_batches) if self.every_batch else micro_batches

    def reduce_scatter_micro_batch(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.shards.reduce_scatter(grads, tuple(self.buffer.sums)) if self.every_batch else grads

    def reduce(self, added: Done = ()) -> Done:
        done = self.bucketed_all_reduce()
        if self.every_batch:
            return done
        weight = ops.depend(self.buffer.weight + 0.0, done)
        return done + self.shards.reduce_scatter_into(self.shards_in_runs, self.sums_in_buckets, weight, done)

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        return self.shards.all_reduce_squares(squares)

    def for_optimizer(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.shards.all_gather(grads, tuple(self.parameters))


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
        self.own_in_buckets = in_buckets(self.parameters, shards.buckets)
        self.wholes_in_runs = in_runs(whole, shards.buckets, shards.cuts)
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
        raise ValueError(argument_error(_HSDP, "optimizer", "one that works element by element", got, remedy))
    shapes = [parameter.shape for parameter in optimizer.parameters]
    known = {id(item) for value in _matching(optimizer, shapes) for item in value}
    for item in optimizer.get_parameters():
        if id(item) not in known and item.size > 1:
            got = f"{type(optimizer).__name__} with the state {item.name!r} of shape {tuple(item.shape)}"
            raise ValueError(
                argument_error(_HSDP, "optimizer", "one whose state has its parameters' shapes", got, remedy)
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
