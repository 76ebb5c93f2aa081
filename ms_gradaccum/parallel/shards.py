"""Shards: each rank of a group holds its rows of each tensor that can be divided, and all of the other tensors.

The optimizer is sharded, too, inside a group, and replicated over groups.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.arithmetic import ONE, as_flat
from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.optimizers import all_parameters, optimizers_in
from ms_gradaccum.backend.tensors import Done, map_tensors, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, zeros
from ms_gradaccum.parallel.collectives import (
    AllGather,
    AssignParts,
    BucketedReduce,
    Group,
    SumMessage,
    of_bucket,
    split_message,
)
from ms_gradaccum.parallel.layout import Layout
from ms_gradaccum.parallel.reducer import DataParallelReducer
from ms_gradaccum.parallel.saved_shards import stand_in

_HSDP = "HSDP"
# Names in an optimizer's code which show that it combines several elements, as the gradient clipping does that model
# zoos put into subclasses of Adam and AdamWeightDecay.
_WHOLE = frozenset(
    "clip_by_global_norm clip_by_norm clip_grad_norm clip_grad_norm_ ClipByNorm norm Norm LpNorm "
    "L2Loss L2Normalize sum ReduceSum reduce_sum mean ReduceMean reduce_mean matmul MatMul mm bmm "
    "svd qr".split()
)


class WindowShards(DataParallelReducer):
    """Reducer that shards an optimizer built for whole parameters. It reduces the sums to shards in each window."""

    def __init__(self, optimizer: nn.Optimizer, buffer: GradientBuffer, layout: Layout) -> None:
        world = layout.world
        size = layout.shard_size
        group = Group(size, world, world.rank // size * size)
        whole = tuple(optimizer.parameters)
        sharded = [i for i, part in enumerate(layout.is_sharded) if part]
        own_rows = partial(_rows_of, size, group.index)
        state = _shard_optimizer(optimizer, sharded, own_rows)
        super().__init__(optimizer, buffer, layout)
        # The ranks that have one copy of the shards together, and those that have the same ones.
        self.groups = (group, Group(world.size // size, world, group.index, size))
        self.index = group.index
        self.num_groups = world.size // size
        self.is_part = Tensor(layout.is_sharded)
        self.all_gather_rows = AllGather(group)
        # The network's parameters: all of them, and those of which the optimizer has shards, with the shards.
        self.whole = ParameterTuple(whole)
        self.wholes = ParameterTuple(whole[i] for i in sharded)
        self.own = ParameterTuple(self.parameters[i] for i in sharded)
        self.own_in_buckets = tuple(of_bucket(self.parameters, bucket) for bucket in layout.sharded)
        self.assign_wholes = nn.CellList(
            [AssignParts(whole, bucket) for bucket in layout.sharded], auto_prefix=False
        )
        # Checkpoints leave out the slices of parameters, which are copied from the network's before each update.
        self.stand_ins = dict.fromkeys(map(id, self.own))
        gather_rows = Compiled(
            lambda: self.all_gather_rows, "TrainOneStepCell", "a message", needs_fixed=True
        )
        for shard in (*state, *self.share_sums(sharded)):
            self.stand_ins[id(shard)] = stand_in(shard, size, gather_rows, own_rows)

    def share_sums(self, sharded: Sequence[int]) -> list[Parameter]:
        """Prepare the shards of the sums. Return those of an open window, which a checkpoint saves."""
        # The sums of sharded gradients are reduced into separate shards, the other sums in place.
        sums = list(self.buffer.sums)
        for i in sharded:
            sums[i] = zeros(f"accu_grads.shard.{sums[i].name}", self.layout.parts[i])
            self.stand_ins[id(sums[i])] = None  # They have values only during an update.
        self.sums = ParameterTuple(sums)
        for bucket in self.layout.sharded:
            self.messages.append(SumMessage(self.buffer.sums, sums, bucket, *self.groups))
        return []

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        # Reduced over all ranks, although each group has all shards, so that every rank gets the same bits.
        wholes = (
            self.all_reduce_world(ops.select(self.is_part, squares, ops.zeros_like(squares)))
            / self.num_groups
        )
        return ops.select(self.is_part, wholes, squares)

    def before_update(self) -> Done:
        # The network's parameters take precedence: a checkpoint may have been loaded since the last update.
        if len(self.own) == 0:
            return ()
        return map_tensors(ops.partial(_assign_rows, self.index), self.own, self.wholes)

    def after_update(self, updated: Done) -> Done:
        last = updated
        done: Done = ()
        for number, bucket in enumerate(self.own_in_buckets):
            last = self.all_gather_rows(ops.depend(ops.concat(map_tensors(as_flat, bucket)), last))
            done += self.assign_wholes[number](last)
        return done, updated

    def replicas(self) -> tuple[Parameter, ...]:
        return tuple(self.whole)


class BatchShards(WindowShards):
    """Reduce the gradients of each micro batch to shards, so that the buffer has only these."""

    every_batch = True

    def share_sums(self, sharded: Sequence[int]) -> list[Parameter]:
        self.sharded = tuple(bucket.indices for bucket in self.layout.sharded)
        messages = [BucketedReduce(*self.groups, bucket.dtype) for bucket in self.layout.sharded]
        self.reduce_shards = nn.CellList(messages, auto_prefix=False)
        # The index of each tensor in a list of the parts, in the order of their messages, and then all tensors.
        order = [*itertools.chain(*self.sharded)]
        self.picked = tuple(
            order.index(i) if i in order else len(order) + i for i in range(len(self.whole))
        )
        return [self.buffer.sums[i] for i in sharded]

    def max_micro_batches(self, micro_batches: int) -> int:
        return self.most("begins a batch", micro_batches)

    def reduce_scatter_micro_batch(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        last: Done = ()
        parts: tuple[Tensor, ...] = ()
        for number, bucket in enumerate(self.sharded):
            # Sums of a micro batch are sent undivided (weight 1), because its weight differs between ranks.
            last = self.reduce_shards[number](pick(grads, bucket), ONE, last)
            for run in split_message(last, self.assign_wholes[number].runs):
                parts += run
        # Computing shapes in a graph would dominate the compile time.
        return map_tensors(_shaped, pick((*parts, *grads), self.picked), self.buffer.sums)


def _rows_of(ranks: int, index: int, whole: Array) -> Array:
    """Return the rows of a whole array that one of the ranks of a group holds."""
    rows = whole.shape[0] // ranks
    return whole[index * rows : (index + 1) * rows]


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    return part if part.shape == like.shape else part.reshape(like.shape)


def _assign_rows(index: int, shard: Parameter, whole: Tensor) -> Tensor:
    rows = shard.shape[0]
    return ops.assign(shard, whole[index * rows : (index + 1) * rows])


def check_shardable(optimizer: nn.Cell) -> None:
    """Raise unless each row of a parameter can be updated from the same row of the gradient and the state."""
    name = type(optimizer).__name__
    remedy = (
        "Use an optimizer that works element by element, or DataParallel() without sync_each_batch."
    )
    *outer, last = optimizers_in(optimizer)
    problem = f"has {type(last).__name__} inside" if outer else ""
    if isinstance(optimizer, (nn.Lamb, nn.LARS, nn.AdaFactor)):
        problem = "looks at whole parameters"
    if problem:
        raise ValueError(
            f"For '{_HSDP}', the argument 'optimizer' must be an optimizer that works element by "
            f"element, but got {name}, which {problem}. {remedy}"
        )
    known = set(map(id, itertools.chain(*_matching(optimizer))))
    for _, cell in optimizer.cells_and_names():
        if isinstance(cell, LearningRateSchedule):
            known |= {id(item) for item in cell.get_parameters()}
    for item in all_parameters(optimizer):
        if id(item) not in known and item.size > 1:
            raise ValueError(
                f"For 'HSDP', the argument 'optimizer' must have states of its parameters' shapes, "
                f"but got {name} with the state {item.name!r} of shape {tuple(item.shape)}. "
                f"{remedy}"
            )
    whole = sorted(NetworkCode(optimizer).names & _WHOLE)
    if whole:
        warn(
            f"For '{_HSDP}', the optimizer must work element by element, but the code of {name} "
            f"has {', '.join(whole)}, which sees only this rank's rows of sharded parameters. Clip "
            f"with the step's clip, or use DataParallel() without sync_each_batch."
        )


def _matching(optimizer: nn.Cell) -> list[ParameterTuple]:
    """Return the tuples of an optimizer's parameters, and of its state that has their shapes."""
    shapes = [parameter.shape for parameter in optimizer.parameters]
    matching = []
    for value in vars(optimizer).values():
        if isinstance(value, ParameterTuple) and [item.shape for item in value] == shapes:
            matching.append(value)
    return matching


def _shard_optimizer(
    optimizer: nn.Optimizer, sharded: Sequence[int], own_rows: Callable[[Array], Array]
) -> list[Parameter]:
    """Replace the ``sharded`` parameters and their optimizer state by slices. Return the slices of the state."""
    parameters = {id(parameter) for parameter in optimizer.parameters}
    # A parameter can be in several tuples and must have one slice.
    slices: dict[int, Parameter] = {}
    for value in _matching(optimizer):
        for whole in [value[i] for i in sharded]:
            if id(whole) not in slices:
                # The network's parameter already has that name; the names of the state are unique.
                name = f"shard.{whole.name}" if id(whole) in parameters else whole.name
                rows = Tensor(own_rows(whole.asnumpy()))
                slices[id(whole)] = Parameter(rows, name, requires_grad=whole.requires_grad)
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
