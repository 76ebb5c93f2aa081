"""Shards: each rank of a group holds its rows of the tensors that divide, and all of the others."""

from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.backend.tensors import Done, pick
from ms_gradaccum.gradients.buffer import GradientBuffer, reciprocal, zeros
from ms_gradaccum.parallel.collectives import AllGather, AllReduce, Group, ReduceScatter, after
from ms_gradaccum.parallel.layout import ReducerLayout, ShardLayout
from ms_gradaccum.parallel.reducer import CollectiveReducer, part_of, rounded
from ms_gradaccum.parallel.world import gather_counts


class Shards(nn.Cell):
    """Moves a tuple of tensors, one per weight, between whole and sharded, in few fused messages.

    Args:
        layout: What is sharded over the ranks of a group, and in which messages.
        rank: Number of this rank.
    """

    def __init__(self, layout: ShardLayout, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.in_float32 = layout.dtype == ms.float32
        self.like = Tensor(0.0, layout.dtype)
        size = layout.group.size
        group = Group(layout.group, rank, rank // size * size)
        self.size, self.index, self.groups = size, group.index, layout.replicas.size
        # As its own, because a graph knows the attributes of a cell alone.
        self.is_sharded, self.sharded, self.shapes = layout.is_sharded, layout.sharded, layout.shapes
        self.is_part = Tensor(layout.is_sharded)
        self.buckets, self.begins = layout.buckets, layout.begins
        # Of each tensor, in a tuple of those that were moved and then all of them.
        order = [i for bucket in layout.buckets for i in bucket]
        self.places_among = tuple(
            order.index(i) if part else len(order) + i for i, part in enumerate(layout.is_sharded)
        )
        self.map = ops.HyperMap()
        self.reduce_scatter_rows, self.all_gather_rows = ReduceScatter(group), AllGather(group)
        self.all_reduce_replicas = AllReduce(Group(layout.replicas, rank, group.index, size))
        self.all_reduce_world = AllReduce(Group(layout.world, rank))

    def reduce_scatter(
        self, wholes: tuple[Tensor, ...], likes: tuple[Tensor, ...], weight: Tensor, done: Done
    ) -> tuple[Tensor, ...]:
        """Return the shards of the sums over all ranks, in float32; tensors that are kept whole as they are.

        They have the shapes of ``likes``: to compute these in a graph takes the compiler longer than all else. Sent in
        16 bits, the sums are divided by ``weight`` for so long.
        """
        factor = weight if self.in_float32 else reciprocal(weight)
        last: Done = done
        shards: tuple[Tensor, ...] = ()
        for number, bucket in enumerate(self.buckets):
            rows = self.map(ops.partial(_as_rows, self.size), pick(wholes, bucket))
            if not self.in_float32:
                rows = self.map(ops.partial(rounded, factor, self.like), rows)
            total = last = self.all_reduce_replicas(self.reduce_scatter_rows(after(ops.concat(rows, 1), last)))
            if not self.in_float32:
                total = ops.cast(total, ms.float32) * weight
            shards += self.map(ops.partial(_own_part, total), pick(likes, bucket), self.begins[number])
        return self._among(shards, wholes)

    def all_gather(self, shards: tuple[Tensor, ...], likes: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        """Return the whole tensors of which each rank of the group has a shard, with their dtypes.

        They have the shapes of ``likes``.
        """
        last: Done = done
        wholes: tuple[Tensor, ...] = ()
        for number, bucket in enumerate(self.buckets):
            bucket_shards = pick(shards, bucket)
            rows = last = self.all_gather_rows(after(ops.concat(self.map(_as_flat, bucket_shards)), last))
            wholes += self.map(ops.partial(_whole, rows), bucket_shards, pick(likes, bucket), self.begins[number])
        return self._among(wholes, shards)

    def _among(self, moved: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``others`` with the sharded ones replaced by ``moved``, which are in the order of the buckets."""
        return pick(moved + others, self.places_among)

    def assign_own(self, shards: tuple[Parameter, ...], wholes: tuple[Tensor, ...]) -> Done:
        """Assign this rank's rows of the whole tensors."""
        done: Done = ()
        if len(self.sharded) > 0:
            own = ops.partial(_assign_rows, self.index)
            done = self.map(own, pick(shards, self.sharded), pick(wholes, self.sharded))
        return done

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        """Return the sum of the squares of each whole tensor for those of the shards, a float32 tensor."""
        # Over all ranks, though each group has all shards: so every rank gets the same bits.
        wholes = self.all_reduce_world(ops.select(self.is_part, squares, ops.zeros_like(squares))) / self.groups
        return ops.select(self.is_part, wholes, squares)

    def cut(self, values: Any) -> Any:
        """Return this rank's rows of a whole array or tensor."""
        rows = values.shape[0] // self.size
        return values[self.index * rows : (self.index + 1) * rows]

    def whole_view(self, shard: Parameter) -> Parameter:
        """Return what a checkpoint sees in place of a shard: a parameter of the whole shape that holds nothing.

        What is loaded into it goes into the shard; to save it, `gather_values` is called in its place.
        """
        with no_init_parameters():
            zeros = initializer("zeros", self._whole_shape(shard), shard.dtype)
            view = Parameter(zeros, shard.name, requires_grad=shard.requires_grad)

        def set_data(data: Tensor, slice_shape: bool = False) -> Parameter:
            shard.set_data(Tensor(self.cut(data.asnumpy()), shard.dtype))
            return view

        view.set_data = set_data
        view.init_data = lambda *_, **__: view
        return view

    def gather_values(self, shard: Parameter) -> Tensor:
        """Return the whole values of a parameter of which each rank of the group has a shard. Collective."""
        with graph_mode():
            rows = self.all_gather_rows(ops.cast(shard, ms.float32).reshape(-1))
        return ops.cast(rows.reshape(self._whole_shape(shard)), shard.dtype)

    def _whole_shape(self, shard: Parameter) -> tuple[int, ...]:
        return (shard.shape[0] * self.size, *shard.shape[1:])


_as_rows = ops.MultitypeFuncGraph("as_rows")


@_as_rows.register("Number", "Tensor")
def _rows_of_one(size: int, whole: Tensor) -> Tensor:
    return ops.cast(whole, ms.float32).reshape(size, -1)


_own_part = ops.MultitypeFuncGraph("own_part")


@_own_part.register("Tensor", "Tensor", "Number")
def _own_part_of_one(message: Tensor, like: Tensor, begin: int) -> Tensor:
    return part_of(message, like, begin)


_as_flat = ops.MultitypeFuncGraph("as_flat")


@_as_flat.register("Tensor")
def _one_as_flat(shard: Tensor) -> Tensor:
    # As float32, which every backend sends and which holds 16-bit values exactly.
    return ops.cast(shard, ms.float32).reshape(-1)


_whole = ops.MultitypeFuncGraph("whole")


@_whole.register("Tensor", "Tensor", "Tensor", "Number")
def _whole_of_one(rows: Tensor, shard: Tensor, like: Tensor, begin: int) -> Tensor:
    # Not by an index, which takes the compiler twice as long.
    columns = ops.slice(rows, (0, begin), (rows.shape[0], shard.size))
    return ops.cast(columns.reshape(like.shape), shard.dtype)


_assign_rows = ops.MultitypeFuncGraph("assign_rows")


@_assign_rows.register("Number", "Tensor", "Tensor")
def _assign_rows_of_one(index: int, shard: Parameter, whole: Tensor) -> Tensor:
    rows = shard.shape[0]
    return ops.assign(shard, whole[index * rows : (index + 1) * rows])


_map = ops.HyperMap()


def assign_some(targets: tuple[Parameter, ...], values: tuple[Tensor, ...], indices: tuple[int, ...]) -> Done:
    """Assign those of ``values`` that have these indices."""
    done: Done = ()
    if len(indices) > 0:
        done = _map(ops.assign, pick(targets, indices), pick(values, indices))
    return done


class ShardedReducer(CollectiveReducer):
    """A window whose reduced sums are sharded, either when it ends or (``every_batch``) all the time.

    Args:
        shards: What shards them.
        weights, buffer, layout, rank, settings: See `CollectiveReducer`.
    """

    def __init__(
        self,
        shards: Shards,
        weights: ParameterTuple,
        buffer: GradientBuffer,
        layout: ReducerLayout,
        rank: int,
        settings: Any,
    ) -> None:
        super().__init__(weights, buffer, layout, rank, settings)
        self.shards = shards
        # What a checkpoint sees in place of a parameter, by its id, and what it does not see.
        self.views: dict[int, Parameter] = {}
        self.hidden: set[int] = set()
        if self.every_batch:
            for term in buffer.terms:
                for i in shards.sharded:
                    self.show_whole(term.sums[i])
            return
        # Where the sums of the sharded gradients go; those of the others stay where they are.
        self.sums = ParameterTuple(
            zeros(f"accu_grads.shard.{total.name}", shards.shapes[i]) if shards.is_sharded[i] else total
            for i, total in enumerate(buffer.sums)
        )
        self.hidden |= {id(self.sums[i]) for i in shards.sharded}

    def show_whole(self, shard: Parameter) -> None:
        """Let checkpoints see the whole of what ``shard`` is a part of."""
        self.views[id(shard)] = self.shards.whole_view(shard)
        self.gathers[shard.name] = lambda _: self.shards.gather_values(shard)

    def saved(self, parameter: Parameter) -> Parameter | None:
        return None if id(parameter) in self.hidden else self.views.get(id(parameter), parameter)

    def max_micro_batches(self, micro_batches: int) -> int:
        return max(gather_counts(micro_batches)) if self.every_batch else micro_batches

    def reduce_scatter_micro_batch(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.every_batch:
            # By no weight: that of a micro batch is its own on each rank.
            grads = self.shards.reduce_scatter(grads, tuple(self.buffer.sums), Tensor(1.0, ms.float32), None)
        return grads

    def reduce(self, added: Any = ()) -> Done:
        done = self.bucketed_all_reduce()
        if not self.every_batch:
            weight = ops.depend(self.buffer.weight + 0.0, done)
            shards = self.shards.reduce_scatter(tuple(self.buffer.sums), tuple(self.sums), weight, done)
            done += assign_some(tuple(self.sums), shards, self.shards.sharded)
        return done

    def all_reduce_squares(self, squares: Tensor) -> Tensor:
        return self.shards.all_reduce_squares(squares)
