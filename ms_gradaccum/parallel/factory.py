"""Build the gradient reducers for the argument ``parallel`` and the processes of the job."""

import math
from collections.abc import Iterable, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, warn
from ms_gradaccum.backend.optimizers import keeps_absent_rows
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals, sparse_lookup
from ms_gradaccum.gradients.non_finite import check_can_drop
from ms_gradaccum.parallel.agreement import settings_of, shapes_of, structure_of
from ms_gradaccum.parallel.collectives import check_sent
from ms_gradaccum.parallel.kinds import HSDP, DataParallel, Kind, ParallelChoice, Reduced, check_kind, choose_kind
from ms_gradaccum.parallel.layout import (
    Ranks,
    ReducedLayout,
    ReducerLayout,
    ShardedLayout,
    backwards,
    bucket_layout,
    shard_layout,
)
from ms_gradaccum.parallel.reduced import (
    ReducedReducer,
    check_reducing,
    check_state,
    schedulers_of,
    shard_size_of,
    whole,
)
from ms_gradaccum.parallel.reducer import DataParallelReducer, GradientReducer
from ms_gradaccum.parallel.semi_auto import SemiAuto, is_semi_auto
from ms_gradaccum.parallel.shards import HSDPReducer, ShardedReducer, Shards, check_shardable
from ms_gradaccum.parallel.world import broadcast_parameters, check_agreement, current_world, tell_peers_of_failure


def check_parallel(owner: str, parallel: ParallelChoice, network: nn.Cell) -> Kind | SemiAuto | None:
    """Return the kind of parallelism, or None for a single process. Raise if it is not possible here."""
    check_kind(owner, parallel)
    _check_not_wrapped(owner, network)
    world = current_world(owner)
    schedulers = schedulers_of(network)
    if schedulers:
        return check_reducing(owner, parallel, network, schedulers)
    if world.size == 1:
        return None
    tell_peers_of_failure(owner, world)
    if is_semi_auto(network):
        return _compilers_own(owner, parallel, network)
    if isinstance(network, AutoParallel):
        if network._pipeline_stages > 1:
            got = f"{network._pipeline_stages} pipeline stages"
            raise ValueError(argument_error(owner, "network", "in one pipeline stage", got, "Do not call pipeline()."))
        if parallel == "auto":
            parallel = _settings_of(network)
    return choose_kind(owner, parallel, world.size)


def _check_not_wrapped(owner: str, network: nn.Cell) -> None:
    cells = network.cells_and_names() if isinstance(network, nn.Cell) else ()
    # Checked by name, because MindSpore before 2.6 has no such class.
    if any(type(cell).__name__ == "DistributedDataParallel" for _, cell in cells):
        rule, got = "one whose gradients nothing else adds up over the processes", "a DistributedDataParallel in it"
        raise ValueError(
            argument_error(owner, "network", rule, got, "Give the network in it: parallel='auto' adds them up.")
        )


def _compilers_own(owner: str, parallel: object, network: nn.Cell) -> SemiAuto:
    if parallel != "auto":
        remedy = "The compiler partitions the step here; give the cell inside AutoParallel for another way."
        raise ValueError(argument_error(owner, "parallel", "'auto' in semi-auto-parallel", repr(parallel), remedy))
    return SemiAuto(network)


def _settings_of(network: AutoParallel) -> Kind:
    """Return the kind of parallelism for the settings of an AutoParallel on CPU, where it cannot run itself."""
    if not network._enable_parallel_optimizer:
        return DataParallel()
    level = network._optimizer_level
    return HSDP(network._optimizer_weight_shard_size, network._parallel_optimizer_threshold, level)


def build_reducers(
    owner: str,
    kind: Kind | None,
    network: nn.Cell,
    optimizers: Sequence[nn.Cell],
    agreed: dict[str, object],
    drop_non_finite: bool = False,
    dtype: ms.Type = ms.float32,
) -> list[GradientReducer]:
    """Return the reducer of each optimizer, with its buffer, after all ranks have agreed on settings. Collective.

    ``kind`` is None for one process. The settings in ``agreed`` must be equal on all ranks, which reduce gradients in
    ``dtype``.
    """
    world = current_world(owner)
    if kind is not None and world.size > 1:
        _agree(owner, kind, network, optimizers, agreed)
    if drop_non_finite:
        check_can_drop(owner, network)
    totals = WindowTotals(drop_non_finite, network.other_losses)
    if kind is None:
        return [GradientReducer(each.parameters, _buffer_of(each, None, totals)) for each in optimizers]
    ranks = Ranks(world.size, world.size, ms.get_context("device_target"))
    reducers = []
    for optimizer in optimizers:
        _check_sent(owner, kind, network, optimizer, dtype)
        if world.size > 1:
            _start_alike(owner, network, optimizer)
        layout = reducer_layout(kind, optimizer.parameters, ranks, totals.scalars, dtype)
        buffer = _buffer_of(optimizer, layout.buffer_shapes, totals)
        reducers.append(_build_reducer(kind, network, optimizer, buffer, layout, world.rank))
    return reducers


def _buffer_of(optimizer: nn.Cell, shapes: Sequence[tuple[int, ...]] | None, totals: WindowTotals) -> GradientBuffer:
    return GradientBuffer(optimizer.parameters, keeps_absent_rows(optimizer), shapes, totals)


def _agree(
    owner: str, kind: Kind | None, network: nn.Cell, optimizers: Sequence[nn.Cell], agreed: dict[str, object]
) -> None:
    """Raise on all ranks if their settings differ, before one waits for the others. Collective."""
    settings = {
        "the training cell": owner,
        "mode": "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE",
        **agreed,
        "parallel": repr(kind),
        "batch_axis": repr(network.batch_axis),
        "weighted": network.weighted,
    }
    for number, optimizer in enumerate(optimizers):
        settings |= settings_of("optimizer" if len(optimizers) == 1 else f"optimizer[{number}]", optimizer)
    check_agreement(owner, settings | structure_of(network) | shapes_of([network, *optimizers]))


def _check_sent(owner: str, kind: Kind, network: nn.Cell, optimizer: nn.Cell, dtype: ms.Type) -> None:
    """Raise if the ranks cannot reduce these gradients."""
    check_sent(owner, dtype)
    check_parameters_sent(owner, optimizer.parameters)
    if isinstance(kind, Reduced):
        check_state(owner, optimizer)
    if kind.sync_each_batch:
        _check_shared_dense(owner, network)
    if isinstance(kind, HSDP):
        _check_hsdp(owner, kind, optimizer)


def _check_hsdp(owner: str, kind: HSDP, optimizer: nn.Cell) -> None:
    check_shardable(optimizer)
    if kind.optimizer_level == "level3":
        warn(
            f"For '{owner}', the weights stay whole on each rank: 'level3' shards what 'level2' does. Sharding weights "
            f"takes the compiler, inside AutoParallel on Ascend or GPU.",
        )


def check_parameters_sent(owner: str, parameters: Iterable[Parameter]) -> None:
    """Raise for float64 parameters, whose sums MindSpore cannot add up over processes."""
    for parameter in parameters:
        if parameter.dtype == ms.float64:
            rule, got = "one without float64 parameters in several processes", f"{parameter.name!r} of float64"
            remedy = "MindSpore's AllReduce knows no float64: use float32, or one process."
            raise ValueError(argument_error(owner, "network", rule, got, remedy))


def _start_alike(owner: str, network: nn.Cell, optimizer: nn.Cell) -> None:
    for cell in (network, optimizer):
        cell.init_parameters_data()
    parameters = {item.name: item for cell in (network, optimizer) for item in cell.get_parameters()}
    if any(shard_size_of(item) > 1 for item in optimizer.parameters):
        # The state belongs to the shards, which differ by design.
        parameters = {item.name: item for item in whole(network.get_parameters())}
    if broadcast_parameters(parameters.values()):
        warn(
            f"For '{owner}', the ranks started with different parameters: those of rank 0 are used. "
            f"Call mindspore.set_seed() with the same seed on all ranks, or load the same checkpoint.",
        )


def _check_shared_dense(owner: str, network: nn.Cell) -> None:
    lookup = sparse_lookup(network)
    if lookup is not None:
        remedy = "Use nn.Embedding, DataParallel() or HSDP(optimizer_level='level1')."
        rule = "one of dense gradients where the ranks share them in each micro batch"
        raise ValueError(argument_error(owner, "network", rule, f"a sparse lookup in {lookup}", remedy))


def reducer_layout(
    kind: Kind | None, tensors: Sequence[Tensor], world: Ranks, scalars: int = 2, dtype: ms.Type = ms.float32
) -> ReducerLayout:
    """Return the layout of the gradients of ``tensors``, of which only `shape` and `itemsize` are read.

    So many ``scalars`` are reduced besides the sums. ``kind`` is None for one process.
    """
    kind = DataParallel() if kind is None else kind
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    # Sums are float32, or float64 for float64 weights.
    itemsizes = tuple(max(4, tensor.itemsize) for tensor in tensors)
    sizes = [math.prod(shape) for shape in shapes]
    if isinstance(kind, Reduced):
        shares = tuple(shard_size_of(tensor) / world.size for tensor in tensors)
        return ReducedLayout(shapes, itemsizes, bucket_layout((), sizes, world, scalars, ms.float32), shares)
    if not (kind.sync_each_batch or isinstance(kind, HSDP)):
        all_reduced = bucket_layout(backwards(range(len(sizes))), sizes, world, scalars, dtype)
        return ReducerLayout(shapes, itemsizes, all_reduced)
    size = world.size if kind.shard_size == -1 else kind.shard_size
    shards = shard_layout(tensors, world, size, kind.threshold, dtype)
    all_reduced = bucket_layout(shards.kept, sizes, world, scalars, dtype)
    return ShardedLayout(shapes, itemsizes, all_reduced, shards, kind.sync_each_batch)


def _build_reducer(
    kind: Kind, network: nn.Cell, optimizer: nn.Cell, buffer: GradientBuffer, layout: ReducerLayout, rank: int
) -> GradientReducer:
    if isinstance(layout, ReducedLayout) and isinstance(kind, Reduced):
        return ReducedReducer(network, optimizer, buffer, layout, rank, kind)
    if not isinstance(layout, ShardedLayout):
        return DataParallelReducer(optimizer, buffer, layout, rank, kind)
    shards = Shards(layout.shards, rank)
    if isinstance(kind, HSDP):
        return HSDPReducer(shards, optimizer, buffer, layout, rank, kind)
    return ShardedReducer(shards, optimizer, buffer, layout, rank, kind)
