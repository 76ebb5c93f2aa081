"""Build the gradient reducers for the argument ``parallel`` and the processes of the job."""

from collections.abc import Iterable, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, warn
from ms_gradaccum.backend.optimizers import keeps_absent_rows
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals, sparse_lookup
from ms_gradaccum.gradients.non_finite import check_can_drop
from ms_gradaccum.parallel import reduced
from ms_gradaccum.parallel.agreement import settings_of, shapes_of, structure_of
from ms_gradaccum.parallel.collectives import check_sent
from ms_gradaccum.parallel.kinds import HSDP, DataParallel, Kind, ParallelChoice, Reduced, check_kind, choose_kind
from ms_gradaccum.parallel.layout import Layout, Ranks, layout_of
from ms_gradaccum.parallel.reducer import DataParallelReducer, GradientReducer
from ms_gradaccum.parallel.semi_auto import SemiAuto, is_semi_auto
from ms_gradaccum.parallel.shards import ShardedReducer, check_shardable
from ms_gradaccum.parallel.world import broadcast_parameters, check_agreement, current_world, tell_peers_of_failure


def check_parallel(owner: str, parallel: ParallelChoice, network: nn.Cell) -> Kind | SemiAuto | None:
    """Return the kind of parallelism, or None for a single process. Raise if it is not possible here."""
    check_kind(owner, parallel)
    _check_not_wrapped(owner, network)
    world = current_world(owner)
    schedulers = reduced.schedulers_of(network)
    if schedulers:
        return reduced.check_reducing(owner, parallel, network, schedulers)
    if world.size == 1:
        return None
    tell_peers_of_failure(owner, world)
    if is_semi_auto(network):
        if parallel != "auto":
            remedy = "The compiler partitions the step here; give the cell inside AutoParallel for another way."
            raise ValueError(argument_error(owner, "parallel", "'auto' in semi-auto-parallel", repr(parallel), remedy))
        return SemiAuto(network)
    if isinstance(network, AutoParallel):
        if network._pipeline_stages > 1:
            got = f"{network._pipeline_stages} pipeline stages"
            raise ValueError(argument_error(owner, "network", "in one pipeline stage", got, "Do not call pipeline()."))
        # On CPU, where an AutoParallel cannot run itself, its settings choose the kind.
        if parallel == "auto" and network._enable_parallel_optimizer:
            level = network._optimizer_level
            parallel = HSDP(network._optimizer_weight_shard_size, network._parallel_optimizer_threshold, level)
    return choose_kind(owner, parallel, world.size)


def _check_not_wrapped(owner: str, network: nn.Cell) -> None:
    cells = network.cells_and_names() if isinstance(network, nn.Cell) else ()
    # Checked by name, because MindSpore before 2.6 has no such class.
    if any(type(cell).__name__ == "DistributedDataParallel" for _, cell in cells):
        rule, got = "one whose gradients nothing else adds up over the processes", "a DistributedDataParallel in it"
        remedy = "Give the network in it: parallel='auto' adds them up."
        raise ValueError(argument_error(owner, "network", rule, got, remedy))


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

    ``kind`` is None for one process. The ranks reduce gradients in ``dtype``.
    """
    world = current_world(owner)
    if kind is not None and world.size > 1:
        _agree(owner, network, optimizers, agreed | {"parallel": repr(kind)})
    if drop_non_finite:
        check_can_drop(owner, network)
    totals = WindowTotals(drop_non_finite, network.other_losses)
    ranks = Ranks(world.size, world.size, ms.get_context("device_target"))
    reducers: list[GradientReducer] = []
    for optimizer in optimizers:
        parameters, dense_only = optimizer.parameters, keeps_absent_rows(optimizer)
        if kind is None:
            reducers.append(GradientReducer(parameters, GradientBuffer(parameters, dense_only, None, totals)))
            continue
        _check_sent(owner, kind, network, optimizer, dtype)
        if world.size > 1:
            _start_alike(owner, network, optimizer)
        layout = reducer_layout(kind, parameters, ranks, totals.sizes, dtype)
        buffer = GradientBuffer(parameters, dense_only, layout.buffer_shapes, totals)
        if isinstance(kind, Reduced):
            reducers.append(reduced.ReducedReducer(optimizer, buffer, layout, world.rank, kind, network))
        else:
            reducer = DataParallelReducer if layout.group.size == 1 else ShardedReducer
            reducers.append(reducer(optimizer, buffer, layout, world.rank, kind))
    return reducers


def _agree(owner: str, network: nn.Cell, optimizers: Sequence[nn.Cell], agreed: dict[str, object]) -> None:
    """Raise on all ranks if their settings differ, before one waits for the others. Collective."""
    mode = "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"
    settings = {"the training cell": owner, "mode": mode, **agreed}
    settings |= {"batch_axis": repr(network.batch_axis), "weighted": network.weighted}
    for number, optimizer in enumerate(optimizers):
        settings |= settings_of("optimizer" if len(optimizers) == 1 else f"optimizer[{number}]", optimizer)
    check_agreement(owner, settings | structure_of(network) | shapes_of([network, *optimizers]))


def _check_sent(owner: str, kind: Kind, network: nn.Cell, optimizer: nn.Cell, dtype: ms.Type) -> None:
    """Raise if the ranks cannot reduce these gradients."""
    check_sent(owner, dtype)
    check_parameters_sent(owner, optimizer.parameters)
    if isinstance(kind, Reduced):
        reduced.check_state(owner, optimizer)
    lookup = sparse_lookup(network) if kind.sync_each_batch else None
    if lookup is not None:
        remedy = "Use nn.Embedding, DataParallel() or HSDP(optimizer_level='level1')."
        rule = "one of dense gradients where the ranks share them in each micro batch"
        raise ValueError(argument_error(owner, "network", rule, f"a sparse lookup in {lookup}", remedy))
    if kind.shard_size != 1:
        check_shardable(optimizer)
    if isinstance(kind, HSDP) and kind.optimizer_level == "level3":
        warn(
            f"For '{owner}', the weights stay whole on each rank: 'level3' shards what 'level2' does. Sharding weights "
            f"takes the compiler, inside AutoParallel on Ascend or GPU."
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
    if any(reduced.shard_size_of(item) > 1 for item in optimizer.parameters):
        # The state belongs to the shards, which differ by design.
        parameters = {item.name: item for item in reduced.whole(network.get_parameters())}
    if broadcast_parameters(parameters.values()):
        warn(
            f"For '{owner}', the ranks started with different parameters: those of rank 0 are used. "
            f"Call mindspore.set_seed() with the same seed on all ranks, or load the same checkpoint."
        )


def reducer_layout(
    kind: Kind | None,
    tensors: Sequence[Tensor],
    world: Ranks,
    scalars: Sequence[int] = WindowTotals().sizes,
    dtype: ms.Type = ms.float32,
) -> Layout:
    """Return the layout of the gradients of ``tensors``, of which only `shape` and `itemsize` are read.

    Scalars of these sizes are reduced besides the sums. ``kind`` is None for one process.
    """
    kind = DataParallel() if kind is None else kind
    shares = tuple(reduced.shard_size_of(each) / world.size for each in tensors) if isinstance(kind, Reduced) else ()
    size = world.size if kind.shard_size == -1 else kind.shard_size
    return layout_of(tensors, scalars, world, dtype, size, kind.threshold, kind.sync_each_batch, shares)
