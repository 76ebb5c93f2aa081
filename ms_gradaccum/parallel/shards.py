"""Shards: each rank of a group holds its rows of each tensor that can be divided, and all of the other tensors.

The optimizer is sharded, too, inside a group, and replicated over groups.
"""

from collections.abc import Callable, Sequence

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Initializer, initializer
from mindspore.nn.learning_rate_schedule import LearningRateSchedule
from mindspore.nn.utils import no_init_parameters

from ms_gradaccum._checks import require, warn
from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.optimizers import all_parameters, optimizers_in
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.tensors import Array, Done, map_tensors, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, zeros
from ms_gradaccum.parallel.collectives import AllGather, AssignParts, Group, cut, in_buckets, reduce_each
from ms_gradaccum.parallel.kinds import HSDP, DataParallel
from ms_gradaccum.parallel.layout import Layout
from ms_gradaccum.parallel.reducer import DataParallelReducer

_HSDP = "HSDP"
# Names in an optimizer's code which show that it combines several elements.
_WHOLE = frozenset(
    "clip_by_global_norm clip_by_norm clip_grad_norm clip_grad_norm_ ClipByNorm norm Norm LpNorm L2Loss L2Normalize "
    "sum ReduceSum reduce_sum mean ReduceMean reduce_mean matmul MatMul mm bmm svd qr".split()
)


class ShardedReducer(DataParallelReducer):
    """Reducer that shards an optimizer built for whole parameters, and the sums of each window or micro batch."""

    def __init__(
        self, optimizer: nn.Optimizer, buffer: GradientBuffer, layout: Layout, rank: int, settings: DataParallel | HSDP
    ) -> None:
        size = layout.group.size
        group = Group(layout.group, rank, rank // size * size)
        whole, sharded = tuple(optimizer.parameters), [i for i, part in enumerate(layout.is_sharded) if part]
        state = _shard_optimizer(optimizer, sharded, lambda values: values[_rows(values, size, group.index)])
        super().__init__(optimizer, buffer, layout, rank, settings)
        self.every_batch = layout.every_batch
        self.size, self.index, self.groups = size, group.index, layout.replicas.size
        self.is_part = Tensor(layout.is_sharded)
        self.sharded = tuple(bucket.indices for bucket in layout.sharded)
        self.all_gather_rows = AllGather(group)
        self.run_gather = Compiled(lambda: self.all_gather_rows, "TrainOneStepCell", "a message", needs_fixed=True)
        replicas = Group(layout.replicas, rank, group.index, size)
        self.reduce_shards = reduce_each(layout.sharded, group, replicas)
        self.whole = ParameterTuple(whole)
        self.own = ParameterTuple(self.parameters[i] for i in sharded)
        self.wholes = ParameterTuple(whole[i] for i in sharded)
        self.own_in_buckets = in_buckets(self.parameters, layout.sharded)
        self.assign_wholes = AssignParts(whole, layout.sharded)
        # The stand-ins of parameters in checkpoints, by id, and the parameters that checkpoints leave out. The
        # network's whole parameters are saved and loaded, and the slices are copied from them before each update.
        self.views: dict[int, Parameter] = {}
        self.hidden = {id(self.parameters[i]) for i in sharded}
        for item in [*state, *(buffer.sums[i] for i in sharded if self.every_batch)]:
            self._show_whole(item)
        if self.every_batch:
            # The index of each tensor in a list of the parts, in the order of their messages, and then all tensors.
            places = {i: place for place, i in enumerate(i for bucket in self.sharded for i in bucket)}
            self.places = tuple(places.get(i, len(places) + i) for i in range(len(whole)))
            return
        # The sums of sharded gradients are reduced into separate shards, the other sums in place.
        self.sums = ParameterTuple(
            zeros(f"accu_grads.shard.{total.name}", part) if is_part else total
            for total, part, is_part in zip(buffer.sums, layout.parts, layout.is_sharded)
        )
        self.hidden |= {id(self.sums[i]) for i in sharded}
        self.sums_in_buckets = in_buckets(buffer.sums, layout.sharded)
        self.assign_shards = AssignParts(self.sums, layout.sharded)

    def max_micro_batches(self, micro_batches: int) -> int:
        return self.most("begins a batch", micro_batches) if self.every_batch else micro_batches

    def reduce_scatter_micro_batch(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.every_batch:
            return grads
        last: Done = ()
        parts: tuple[Tensor, ...] = ()
        for number, bucket in enumerate(self.sharded):
            # Sums of a micro batch are sent undivided (weight 1), because its weight differs between ranks.
            last = self.reduce_shards[number](pick(grads, bucket), ONE, last)
            for run in cut(last, self.assign_wholes.cuts[number]):
                parts += run
        # Computing shapes in a graph would dominate the compile time.
        return map_tensors(_shaped, pick((*parts, *grads), self.places), tuple(self.buffer.sums))

    def reduce(self) -> Done:
        done = self.reduce_kept()
        if self.every_batch:
            return done
        last, weight = done, ops.depend(self.buffer.weight + 0.0, done)
        for number, bucket in enumerate(self.sums_in_buckets):
            last = self.reduce_shards[number](tuple(bucket), weight, last)
            done += self.assign_shards(number, last)
        return done

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        # Reduced over all ranks, although each group has all shards, so that every rank gets the same bits.
        wholes = self.all_reduce_world(ops.select(self.is_part, squares, ops.zeros_like(squares))) / self.groups
        return ops.select(self.is_part, wholes, squares)

    def before_update(self) -> Done:
        # The network's parameters take precedence: a checkpoint may have been loaded since the last update.
        if len(self.own) == 0:
            return ()
        return map_tensors(ops.partial(_assign_rows, self.index), tuple(self.own), tuple(self.wholes))

    def after_update(self, updated: Done) -> Done:
        last, done = updated, ()
        for number, bucket in enumerate(self.own_in_buckets):
            last = self.all_gather_rows(ops.depend(ops.concat(map_tensors(_as_flat, tuple(bucket))), last))
            done += self.assign_wholes(number, last)
        return done, updated

    def replicas(self) -> tuple[Parameter, ...]:
        return tuple(self.whole)

    def saved(self, parameter: Parameter) -> Parameter | None:
        return None if id(parameter) in self.hidden else self.views.get(id(parameter), parameter)

    def _show_whole(self, shard: Parameter) -> None:
        """In checkpoints, replace ``shard`` by a parameter of the whole shape without memory."""
        # Loading it loads the shard. Saving, reading and copying it call `gather`, a collective.
        shape = (shard.shape[0] * self.size, *shard.shape[1:])

        def gather(_: object = None) -> Tensor:
            rows = self.run_gather(_as_flat(shard))
            return ops.cast(rows.reshape(shape), shard.dtype)

        def whole(*_: object, **__: object) -> Parameter:
            return Parameter(gather(), shard.name, shard.requires_grad)

        with no_init_parameters():
            view = Parameter(initializer(_Gathered(gather), shape, shard.dtype), shard.name, shard.requires_grad)

        def set_data(data: Tensor, slice_shape: bool = False) -> Parameter:
            values = data.asnumpy()
            assign_in_place(shard, Tensor(values[_rows(values, self.size, self.index)], shard.dtype))
            return view

        view.set_data, view.init_data, view.__deepcopy__ = set_data, whole, whole
        for name in ("asnumpy", "get_bytes", "tolist"):
            setattr(view, name, lambda name=name: getattr(gather(), name)())
        self.views[id(shard)] = view
        self.gathered.append((view, gather))


class _Gathered(Initializer):
    """Initializer of the copies of a stand-in: they begin with the gathered values."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        super().__init__()
        self.gather = gather

    def _initialize(self, arr: Array) -> None:
        arr[...] = self.gather().asnumpy()


def _rows(values: Array, size: int, index: int) -> slice:
    """Return the rows of a whole array that rank ``index`` of ``size`` holds."""
    rows = values.shape[0] // size
    return slice(index * rows, (index + 1) * rows)


def _as_flat(shard: Tensor) -> Tensor:
    # Sent as float32, which every backend supports and which represents 16-bit values exactly.
    return ops.cast(shard, ms.float32).reshape(-1)


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    return part if part.shape == like.shape else part.reshape(like.shape)


def _assign_rows(index: int, shard: Parameter, whole: Tensor) -> Tensor:
    rows = shard.shape[0]
    return ops.assign(shard, whole[index * rows : (index + 1) * rows])


def check_shardable(optimizer: nn.Cell) -> None:
    """Raise unless each row of a parameter can be updated from the same row of the gradient and the state."""
    name, rule = type(optimizer).__name__, "one that works element by element"
    remedy = "Use an optimizer that works element by element, or DataParallel() without sync_each_batch."
    sees_all = isinstance(optimizer, (nn.Lamb, nn.LARS, nn.AdaFactor))
    require(not sees_all, _HSDP, "optimizer", rule, f"{name}, which looks at whole parameters", remedy)
    *outer, last = optimizers_in(optimizer)
    require(not outer, _HSDP, "optimizer", rule, f"{name}, which has {type(last).__name__} inside", remedy)
    known = {id(item) for value in _matching(optimizer) for item in value}
    rates = [cell for _, cell in optimizer.cells_and_names() if isinstance(cell, LearningRateSchedule)]
    known |= {id(item) for cell in rates for item in cell.get_parameters()}
    for item in all_parameters(optimizer):
        got = f"{name} with the state {item.name!r} of shape {tuple(item.shape)}"
        fits = id(item) in known or item.size <= 1
        require(fits, _HSDP, "optimizer", "one whose state has its parameters' shapes", got, remedy)
    whole = sorted(NetworkCode(optimizer).names & _WHOLE)
    if whole:
        warn(
            f"For '{_HSDP}', the optimizer must work element by element, but the code of {name} has "
            f"{', '.join(whole)}, which sees only this rank's rows of sharded parameters. Clip with the step's clip, "
            f"or use DataParallel() without sync_each_batch."
        )


def _matching(optimizer: nn.Cell) -> list[ParameterTuple]:
    shapes = [parameter.shape for parameter in optimizer.parameters]
    tuples = [value for value in vars(optimizer).values() if isinstance(value, ParameterTuple)]
    return [value for value in tuples if [item.shape for item in value] == shapes]


def _shard_optimizer(
    optimizer: nn.Optimizer, sharded: Sequence[int], cut_rows: Callable[[Array], Array]
) -> list[Parameter]:
    """Replace the ``sharded`` parameters and their optimizer state by slices. Return the slices of the state."""
    parameters = {id(parameter) for parameter in optimizer.parameters}
    slices: dict[int, Parameter] = {}  # A parameter can be in several tuples and must have one slice.
    for whole in [value[i] for value in _matching(optimizer) for i in sharded]:
        if id(whole) not in slices:
            # The network's parameter already has that name; the names of the state are unique.
            name = f"shard.{whole.name}" if id(whole) in parameters else whole.name
            slices[id(whole)] = Parameter(Tensor(cut_rows(whole.asnumpy())), name, requires_grad=whole.requires_grad)
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, ParameterTuple) and any(id(item) in slices for item in value):
            # Bypass Cell.__setattr__, which takes a second attribute with the same tuple for duplicate names.
            vars(optimizer)[name] = ParameterTuple(slices.get(id(item), item) for item in value)
    for group in getattr(optimizer, "param_groups", []):
        group["params"] = [slices.get(id(item), item) for item in group["params"]]
    for name, item in list(optimizer._params.items()):
        if id(item) in slices:
            del optimizer._params[name]  # The whole state must be deleted, or no memory is saved.
            optimizer._params[slices[id(item)].name] = slices[id(item)]
    return [item for key, item in slices.items() if key not in parameters]
