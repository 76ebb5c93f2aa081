"""Build the gradient reducers for the argument ``parallel``, after the processes of the job have compared settings."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.ops import Primitive
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import listed, warn
from ms_gradaccum.backend.device import can_partition, sends_bfloat16
from ms_gradaccum.backend.network_code import NetworkCode, is_user
from ms_gradaccum.backend.optimizers import inner_optimizer, keeps_absent_rows
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals, looks_rows_up, sparse_lookup
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.gradients.mixed_precision import reduce_dtypes
from ms_gradaccum.parallel import reduced
from ms_gradaccum.parallel.kinds import (
    HSDP,
    DataParallel,
    Kind,
    ParallelChoice,
    Reduced,
    World,
    choose_kind,
)
from ms_gradaccum.parallel.layout import layout_of, shard_size_of
from ms_gradaccum.parallel.reducer import DataParallelReducer, GradientReducer
from ms_gradaccum.parallel.semi_auto import SemiAuto, in_semi_auto, is_semi_auto
from ms_gradaccum.parallel.shards import BatchShards, WindowShards, check_shardable
from ms_gradaccum.parallel.world import (
    broadcast_parameters,
    check_agreement,
    current_world,
    differing_ranks,
    tell_peers,
)

_ALIKE = "a network with the same parameters on all processes"
_EXPERTS = "For experts of single processes use AutoParallel or HyperParallel."
# Attributes of every cell, those that this package sets, and what a weight decay implies.
_SKIPPED = frozenset((*vars(nn.Cell()), "claim_number", "exec_weight_decay"))


def check_parallel(
    owner: str, parallel: ParallelChoice, network: nn.Cell
) -> Kind | SemiAuto | None:
    """Return the kind of parallelism, or None for a single process. Raise if it is not possible here."""
    if isinstance(network, nn.Cell):
        _check_not_reduced(owner, network)
    if in_semi_auto() and not can_partition():
        raise ValueError(
            f"For '{owner}', semi-auto-parallel mode does not train on CPU, but got a context in "
            f"that mode. Call mindspore.reset_auto_parallel_context() first."
        )
    world = current_world(owner)
    schedulers = reduced.schedulers_of(network)
    if schedulers:
        return reduced.check_reducing(owner, parallel, network, schedulers)
    if world.size == 1:
        return None
    tell_peers(owner, world)
    if is_semi_auto(network):
        if parallel != "auto":
            raise ValueError(
                f"For '{owner}', the argument 'parallel' must be 'auto' in semi-auto-parallel, but "
                f"got {parallel!r}. The compiler partitions the step here; give the cell inside "
                f"AutoParallel for another kind."
            )
        return SemiAuto(network if isinstance(network, AutoParallel) else None)
    if isinstance(network, AutoParallel):
        if network._pipeline_stages > 1:
            raise ValueError(
                f"For '{owner}', the argument 'network' must be in one pipeline stage, but got "
                f"{network._pipeline_stages} pipeline stages. Do not call pipeline()."
            )
        # On CPU an AutoParallel cannot run, so its settings choose the kind.
        if parallel == "auto" and network._enable_parallel_optimizer:
            level = network._optimizer_level
            parallel = HSDP(
                network._optimizer_weight_shard_size, network._parallel_optimizer_threshold, level
            )
    _warn_of_a_sum(owner, world.size)
    return choose_kind(parallel, world.size)


def _check_not_reduced(owner: str, network: nn.Cell) -> None:
    """Raise if something in the network adds up gradients over the processes, or has its own shards."""
    for _, cell in network.cells_and_names():
        if type(cell).__name__ == "DistributedDataParallel":
            raise ValueError(
                f"For '{owner}', the argument 'network' must not reduce its gradients itself, but "
                f"got a DistributedDataParallel. Give the network inside it: parallel='auto' "
                f"reduces them."
            )
    dtensors = [
        parameter.name for parameter in network.get_parameters() if hasattr(parameter, "placements")
    ]
    if dtensors:
        raise ValueError(
            f"For '{owner}', networks with DTensors are not supported, but got "
            f"{listed(dtensors, 3)}. Use hsdp() in place of fully_shard() and shard_module(), or "
            f"HSDP of this package."
        )


def build_reducers(
    owner: str,
    kind: Kind | None,
    network: nn.Cell,
    optimizers: Sequence[nn.Cell],
    agreed: dict[str, object],
    clip: Clip | None = None,
    drop_non_finite: bool = False,
    dtype: ms.Type | Mapping[str, ms.Type] = ms.float32,
) -> list[GradientReducer]:
    """Return the reducer of each optimizer, with its buffer, after all ranks have agreed on settings. Collective."""
    world = current_world(owner)
    if kind is not None and world.size > 1:
        _agree(owner, network, optimizers, agreed | {"parallel": repr(kind)})
    if drop_non_finite:
        _check_can_drop(owner, network)
    totals = WindowTotals(drop_non_finite, network.weighted_loss.room)
    names: list[str] = []
    for optimizer in optimizers:
        names += [parameter.name for parameter in optimizer.parameters]
    each_dtype = iter(reduce_dtypes(dtype, names))
    reducers: list[GradientReducer] = []
    for optimizer in optimizers:
        _warn_of_decay(owner, network, optimizer)
        dtypes = list(islice(each_dtype, len(optimizer.parameters)))
        if kind is not None:
            _check_sent(owner, kind, network, optimizer, dtypes)
            _check_clip(owner, kind, optimizer, clip)
            if world.size > 1:
                # Its `step` may be that of an Accumulator, which reduces over the ranks.
                own = [
                    each
                    for each in vars(optimizer).values()
                    if not isinstance(each, functools.partial)
                ]
                warn_of_reductions(owner, "the optimizer", [type(optimizer), own], network)
                _start_alike(owner, kind, network, optimizer)
        reducers.append(_reducer_of(kind, world, network, optimizer, totals, dtypes))
    return reducers


def _reducer_of(
    kind: Kind | None,
    world: World,
    network: nn.Cell,
    optimizer: nn.Cell,
    totals: WindowTotals,
    dtypes: Sequence[ms.Type],
) -> GradientReducer:
    layout = layout_of(kind or DataParallel(), optimizer.parameters, world, totals.sizes, dtypes)
    buffer = GradientBuffer(
        optimizer.parameters, keeps_absent_rows(optimizer), layout.buffer_shapes, totals
    )
    if kind is None:
        return GradientReducer(optimizer.parameters, buffer)
    if isinstance(kind, Reduced):
        return reduced.ReducedReducer(optimizer, buffer, layout, kind, network)
    if layout.shard_size == 1:
        return DataParallelReducer(optimizer, buffer, layout)
    sharded = BatchShards if layout.every_batch else WindowShards
    return sharded(optimizer, buffer, layout)


def _warn_of_a_sum(owner: str, ranks: int) -> None:
    """Warn if MindSpore's own step would add up the mean gradients of the ranks."""
    is_data_parallel = ms.get_auto_parallel_context("parallel_mode") == "data_parallel"
    if is_data_parallel and not ms.get_auto_parallel_context("gradients_mean"):
        warn(
            f"For '{owner}', an update uses the mean gradient of all processes, but MindSpore's "
            f"own step without gradients_mean=True uses {ranks} times that. Call "
            f"set_auto_parallel_context(gradients_mean=True) for the same in both."
        )


def _warn_of_decay(owner: str, network: nn.Cell, optimizer: nn.Cell) -> None:
    """Warn if the weight decay goes into the gradient of a sparse lookup, which has only some rows."""
    optimizer = inner_optimizer(optimizer)
    if not isinstance(optimizer, nn.Adam) or not optimizer.exec_weight_decay:
        return
    tables = set()
    for _, cell in network.cells_and_names():
        if looks_rows_up(cell):
            tables |= {id(each) for each in cell.get_parameters(expand=False) if each.ndim > 1}
    for parameter, is_decayed in zip(optimizer.parameters, optimizer.decay_flags):
        if is_decayed and id(parameter) in tables:
            warn(
                f"For '{owner}', the weight decay of {parameter.name!r} acts on all its rows, but "
                f"MindSpore's own step decays only the rows that a batch reads. Give it a group "
                f"with 'weight_decay': 0.0."
            )


def _check_can_drop(owner: str, network: nn.Cell) -> None:
    """Raise if micro batches of a GradAccumulation cannot be left out."""
    # The compiler cannot use a sparse gradient twice.
    lookup = sparse_lookup(network)
    if lookup is not None:
        raise ValueError(
            f"For '{owner}', the argument 'bad_micro_batch' must be 'skip_window' for sparse "
            f"gradients, but got 'drop' and a sparse lookup in {lookup}. Use nn.Embedding."
        )


def _agree(
    owner: str, network: nn.Cell, optimizers: Sequence[nn.Cell], agreed: dict[str, object]
) -> None:
    """Raise on all ranks if settings differ, before one would wait forever. Collective."""
    mode = "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"
    settings: dict[str, object] = {"the training cell": owner, "mode": mode, **agreed}
    settings |= {"batch_axis": repr(network.batch_axis), "weighted": network.weighted}
    for number, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        settings[name] = type(optimizer).__name__
        for i, parameter in enumerate(optimizer.parameters):
            settings[f"{name}.parameters[{i}]"] = parameter.name
        for key, value in _numbers_of(optimizer).items():
            settings[f"{name}.{key}"] = value
    for name, cell in network.cells_and_names():
        where = f"network.{name}" if name else "network"
        settings[where] = type(cell).__name__
        for flag in ("fp16", "bf16", "fp32"):
            if cell.get_flags().get(flag):
                settings[f"{where}.to_float"] = flag
    for cell in (network, *optimizers):
        for each in cell.get_parameters():
            frozen = "" if each.requires_grad else ", frozen"
            settings[f"parameter {each.name}"] = f"{tuple(each.shape)} of {each.dtype}{frozen}"
    for name, each in network.named_buffers():
        settings[f"buffer {name}"] = f"{tuple(each.shape)} of {each.dtype}"
    check_agreement(owner, settings)


def _numbers_of(optimizer: nn.Cell) -> dict[str, object]:
    """Return the numbers among the attributes of an optimizer: with HSDP, no parameter would show other ones."""
    found: dict[str, object] = {}
    for name, value in vars(optimizer).items():
        # An optimizer may store its rank.
        if name.startswith("_") or name in _SKIPPED or "rank" in name:
            continue
        if isinstance(value, Tensor) and not isinstance(value, Parameter) and value.ndim == 0:
            found[name] = str(value.asnumpy())  # A float32 has other digits as a double.
        elif isinstance(value, (bool, int, float)):
            found[name] = value
    return found


def _check_sent(
    owner: str, kind: Kind, network: nn.Cell, optimizer: nn.Cell, dtypes: Sequence[ms.Type]
) -> None:
    """Raise if the ranks cannot reduce these gradients."""
    if ms.bfloat16 in dtypes and not sends_bfloat16():
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must have a reduce_dtype of float32 or "
            f"float16 on CPU, but got bfloat16. float16 halves the messages."
        )
    check_parameters_sent(owner, optimizer.parameters)
    if isinstance(kind, Reduced):
        reduced.check_state(owner, optimizer)
    lookup = sparse_lookup(network)
    if kind.sync_each_batch and lookup is not None:
        raise ValueError(
            f"For '{owner}', the argument 'network' must have dense gradients if the ranks share "
            f"them in each micro batch, but got a sparse lookup in {lookup}. Use nn.Embedding, "
            f"DataParallel() or HSDP(optimizer_level='level1')."
        )
    if kind.shard_size != 1:
        check_shardable(optimizer)
    if isinstance(kind, HSDP) and kind.optimizer_level == "level3":
        warn(
            f"For '{owner}', 'level3' behaves like 'level2' here: each rank keeps whole weights. "
            f"Only the compiler shards weights, inside AutoParallel on Ascend or GPU."
        )


def _check_clip(owner: str, kind: Kind, optimizer: nn.Cell, clip: Clip | None) -> None:
    """Raise if a clip of the program would get shards of the gradients."""
    has_shards = kind.shard_size != 1 or any(
        shard_size_of(item) > 1 for item in optimizer.parameters
    )
    if clip is not None and clip.is_own and has_shards:
        raise ValueError(
            f"For '{owner}', a clip of your own needs whole gradients, but got {clip!r} with "
            f"{kind!r}, where each rank has some rows. Use DataParallel() without sync_each_batch, "
            f"or a clip of this package."
        )


def check_parameters_sent(owner: str, parameters: Iterable[Parameter]) -> None:
    """Raise for float64 parameters, which MindSpore cannot add up over processes, and for parameters of one process."""
    for parameter in parameters:
        if parameter.layerwise_parallel:
            raise ValueError(
                f"For '{owner}', the argument 'network' must be {_ALIKE}, but got "
                f"{parameter.name!r} with layerwise_parallel. {_EXPERTS}"
            )
        if parameter.dtype == ms.float64:
            raise ValueError(
                f"For '{owner}', the argument 'network' must have no float64 parameters in several "
                f"processes, but got {parameter.name!r} of float64. MindSpore's AllReduce does not "
                f"support float64: use float32, or one process."
            )


def warn_of_reductions(owner: str, what: str, value: object, network: nn.Cell) -> None:
    """Warn if ``value``, which gets gradients, reduces them over the ranks. A network inside it may do so."""
    found = NetworkCode(value).reductions()
    if found and found[0] not in NetworkCode(network.network).reductions():
        warn(
            f"For '{owner}', {what} calls {found[0]}, but the step reduces the gradients of all "
            f"ranks already. Remove that call: the gradients would be added up twice."
        )


def _start_alike(owner: str, kind: Kind, network: nn.Cell, optimizer: nn.Cell) -> None:
    """Give all ranks the parameters and buffers of rank 0. Warn if these or other tensors have differed."""
    for cell in (network, optimizer):
        cell.init_parameters_data()
    parameters = {
        item.name: item for item in (*network.get_parameters(), *optimizer.get_parameters())
    }
    if any(shard_size_of(item) > 1 for item in optimizer.parameters):
        # The optimizer's state belongs to shards, which differ by design.
        parameters = {
            item.name: item for item in network.get_parameters() if shard_size_of(item) == 1
        }
    tensors = [*parameters.values(), *network.buffers()]
    constants = _constants_of(network)
    have_other_tensors = differing_ranks(tensors)
    have_other_constants = differing_ranks(constants.values())
    if have_other_tensors:
        sent = _sent_forward(network)
        # Networks whose gradients come reduced have shards, which may differ.
        if sent and not isinstance(kind, Reduced):
            raise ValueError(
                f"For '{owner}', the argument 'network' must be {_ALIKE}, but got different "
                f"values, and {listed(sent, 1)} in its forward pass. If they should be equal, call "
                f"mindspore.set_seed() with the same seed on all ranks. {_EXPERTS}"
            )
        broadcast_parameters(tensors)
        warn(
            f"For '{owner}', the ranks started with different parameters or buffers: all ranks now "
            f"use those of rank 0. Call mindspore.set_seed() with the same seed on all ranks, or "
            f"load the same checkpoint."
        )
    if have_other_constants and not _sent_forward(network):
        warn(
            f"For '{owner}', the ranks have different values in a tensor of the network (one of "
            f"{listed(list(constants), 3)}), so each rank trains another network. Call "
            f"mindspore.set_seed() with the same seed on all ranks before the network is built, or "
            f"make the tensor a buffer."
        )


def _constants_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the floating-point tensors that are plain attributes of the user's cells, by their names."""
    found = {}
    for path, cell in network.cells_and_names():
        if not is_user(type(cell)):
            continue
        for name, value in vars(cell).items():
            if type(value) is Tensor and value.is_floating_point():
                found[f"{path}.{name}"] = value
    return found


def _sent_forward(network: nn.Cell) -> list[str]:
    """Return the names of operators that send tensors to other ranks: each rank may have its own experts."""
    code = NetworkCode(network)
    sent = []
    for each in code.of_kind(Primitive):
        if isinstance(each.attrs.get("group"), str):
            sent.append(each.name)
    functions = ("all_to_all", "all_gather", "reduce_scatter")
    return sent + [name for name in sorted(code.names) if name.startswith(functions)]
