"""A process of the semi-auto-parallel tests: build our steps and MindSpore's, compile, count, run, report."""

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, lazy_inline, nn, ops
from mindspore.common.initializer import Constant
from mindspore.nn.utils import no_init_parameters
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel
from quick_mindspore import eagerly
from scenarios import norm_of
from simulation.cpu_program import CpuProgram, own_part, own_parts, whole_values
from simulation.partition import collectives_of, connect, gpu_target, operator_names, partition
from step_probe import Around

from ms_gradaccum import (
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    MixedPrecision,
    Model,
    TrainOneStepCell,
)

ROWS = 64
# Each update sees another batch.
BATCHES = [
    (rng.randn(ROWS, 8).astype(np.float32), rng.randn(ROWS, 4).astype(np.float32))
    for rng in (np.random.RandomState(1), np.random.RandomState(2))
]


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    micro_size: int
    level: str | None = None
    optimizer: str = "momentum"
    weighted: bool = False
    max_norm: float | None = None
    limit: float | None = None
    loss_scale: float | None = None
    half: bool = False  # All layers but the first compute in float16.
    strategy: Any = "data_parallel"
    shard_size: int = -1
    no_init: bool = False
    lazy: bool = False
    recompute: bool = False
    # Operators that are sharded: the rows over dp, the columns of the first layer and rows of the second over mp.
    dp: int = 0
    mp: int = 1


class Network(nn.Cell):
    """Four parameters, which ``constant`` lets MindSpore make without their values."""

    def __init__(self, dp: int = 0, mp: int = 1, constant: bool = False) -> None:
        super().__init__()
        rng = np.random.RandomState(0)

        def values(*shape: int) -> Any:
            return Constant(0.05) if constant else Tensor(rng.randn(*shape).astype(np.float32) * 0.3)

        self.first = nn.Dense(8, 16, weight_init=values(16, 8), bias_init=values(16))
        self.second = nn.Dense(16, 4, weight_init=values(4, 16), bias_init=values(4))
        self.relu = ops.ReLU()
        if dp:
            self.relu.shard(((dp, mp),))
            self.first.matmul.shard(((dp, 1), (mp, 1)))
            self.first.bias_add.shard(((dp, mp), (mp,)))
            self.second.matmul.shard(((dp, mp), (1, mp)))
            self.second.bias_add.shard(((dp, 1), (1,)))

    def construct(self, x):
        return self.second(self.relu(self.first(x)))


class LazyNetwork(Network):
    """The same, compiled once for all micro batches."""

    @lazy_inline
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


class PositiveTokens(nn.Cell):
    """Sum of the squared errors where the label is positive, and how many these are."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        valid = ops.cast(y > 0, ms.float32)
        return (ops.square(self.network(x) - y) * valid).sum(), valid.sum()


def network_of(variant: Variant) -> nn.Cell:
    """Return a network that starts with the same values every time."""
    with no_init_parameters() if variant.no_init else nullcontext():
        network = (LazyNetwork if variant.lazy else Network)(variant.dp, variant.mp, variant.no_init)
    if variant.recompute:
        network.first.recompute()
    if variant.half:
        network.second.to_float(ms.float16)
    return network


def optimizer_of(variant: Variant, network: nn.Cell) -> nn.Cell:
    with no_init_parameters() if variant.no_init else nullcontext():
        if variant.optimizer == "adam":
            return nn.Adam(network.trainable_params(), 0.01)
        return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def settings_of(variant: Variant, network: nn.Cell) -> AutoParallel:
    parallel = AutoParallel(network)
    parallel.dataset_strategy(((variant.dp, 1),) * 2 if variant.dp else variant.strategy)
    if variant.level is not None:
        parallel.hsdp(shard_size=variant.shard_size, threshold=0, optimizer_level=variant.level)
    return parallel


def loss_of(variant: Any, network: nn.Cell) -> nn.Cell:
    """Return the network with its loss: a mean, or a sum and its weight."""
    return PositiveTokens(network) if variant.weighted else nn.WithLossCell(network, nn.MSELoss())


def loss_cell_of(variant: Variant, network: nn.Cell) -> GradAccumulation:
    return GradAccumulation(loss_of(variant, network), variant.micro_size, weighted=variant.weighted)


def our_step(variant: Variant) -> TrainOneStepCell:
    network = network_of(variant)
    settings: dict[str, Any] = {}
    if variant.max_norm is not None:
        settings["clip"] = ClipByGlobalNorm(variant.max_norm)
    if variant.limit is not None:
        settings["clip"] = ClipByValue(variant.limit)
    if variant.loss_scale is not None:
        settings["mixed_precision"] = MixedPrecision(level="O0", init_scale=variant.loss_scale, growth_interval=2)
    cell = settings_of(variant, loss_cell_of(variant, network))
    return TrainOneStepCell(cell, optimizer_of(variant, network), **settings)


# Where numbers are compared; each names what it adds to the plain path.
NUMBERS = {
    2: {
        "plain-1-no_init": Variant(1, no_init=True),
        "plain-2-tokens-clip-scale": Variant(2, weighted=True, max_norm=0.3, loss_scale=1024.0),
        "level1-1-tokens-limit": Variant(1, "level1", weighted=True, limit=0.05),
        "level1-4-adam-tokens-clip-scale": Variant(
            4, "level1", optimizer="adam", weighted=True, max_norm=0.3, loss_scale=1024.0
        ),
        "level1-2-overflow": Variant(2, "level1", loss_scale=3e38),
        "level1-2-half-full": Variant(2, "level1", loss_scale=64.0, half=True, max_norm=0.3, strategy="full_batch"),
    },
    4: {
        "level1-2-adam-tokens-clip": Variant(
            2, "level1", optimizer="adam", weighted=True, max_norm=0.3, strategy=((4, 1), (4, 1))
        ),
        "2x2-level1-four-clip-scale": Variant(4, "level1", max_norm=0.3, loss_scale=1024.0, dp=2, mp=2),
        "1x4-one-tokens-clip-adam": Variant(1, optimizer="adam", weighted=True, max_norm=0.3, dp=1, mp=4),
        "2x2-level2-clip-recompute": Variant(2, "level2", lazy=True, recompute=True, max_norm=0.3, dp=2, mp=2),
        "4x1-level3-tokens-adam": Variant(2, "level3", "adam", weighted=True, lazy=True, dp=4),
    },
}
# Where communication is compared with that of the stock cells.
COUNTS = {
    2: {
        f"{level or 'plain'}-{size}": Variant(size, level, lazy=level in ("level2", "level3"))
        for level, sizes in ((None, (1, 4)), ("level1", (2,)), ("level2", (2,)), ("level3", (2,)))
        for size in sizes
    },
    4: {
        # By the first rank, with which a group begins: the others would wait for it.
        "level1-2-groups": Variant(2, "level1", shard_size=2),
    },
}


def local_batch(variant: Variant, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return what ``rank`` loads of a batch. Of sharded operators the compiler uses only its shape."""
    x, y = BATCHES[number]
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    if variant.dp:
        rows = slice(ROWS // variant.dp)
    elif variant.strategy == "full_batch":
        rows = slice(None)
    return Tensor(x[rows]), Tensor(y[rows])


def own_batch(variant: Variant, number: int, layouts: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return what ``rank`` trains on of a batch."""
    if not variant.dp:
        return local_batch(variant, number, rank, size)
    x, y = BATCHES[number]
    return Tensor(own_part(x, layouts["inputs0"], rank)), Tensor(own_part(y, layouts["inputs1"], rank))


def run_whole(variant: Variant) -> tuple[list[Any], dict[str, Any]]:
    """Train on the whole batches in one process; return loss and norms of each update and the parameters."""
    network = network_of(replace(variant, lazy=False, dp=0))
    network.init_parameters_data()
    optimizer, loss_cell, printed = optimizer_of(variant, network), loss_of(variant, network), []

    def mean_loss(x: Tensor, y: Tensor) -> Any:
        loss = loss_cell(x, y)
        return loss[0] / loss[1] if variant.weighted else loss

    gradients_of = ops.value_and_grad(mean_loss, None, optimizer.parameters)
    with eagerly():
        for batch in BATCHES:
            loss, grads = gradients_of(*map(Tensor, batch))
            arrays = [grad.asnumpy() for grad in grads]
            norm = norm_of(arrays)
            if variant.max_norm is not None:
                arrays = [array * np.float32(min(1.0, variant.max_norm / norm)) for array in arrays]
            if variant.limit is not None:
                arrays = [array.clip(-variant.limit, variant.limit) for array in arrays]
            optimizer(tuple(map(Tensor, arrays)))
            printed.append([float(loss.asnumpy()), norm, norm_of(arrays)])
    return printed, {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}


def largest_difference(ours: dict[str, Any], whole: dict[str, Any], step: Any, rank: int) -> float:
    """Return by how much this rank's part of the weights differs from the whole ones at most."""
    own = own_parts(whole, step.parameter_layout_dict, rank)
    return max(float(np.abs(ours[name] - value).max()) for name, value in own.items())


def numbers_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    printed, whole = run_whole(variant)
    with gpu_target():
        step = our_step(variant)
    # The compiler cuts the parameters; without values, there is nothing to cut.
    start = {} if variant.no_init else whole_values(step)
    with gpu_target():
        model = partition(step, *local_batch(variant, 0, rank, size))
    start = start or whole_values(step)
    layouts = step.parameter_layout_dict
    program = CpuProgram(model, start, layouts, rank)
    outputs = [program(*own_batch(variant, number, layouts, rank, size)) for number in range(len(BATCHES))]
    ours, weights = program.values(), {name: start[name] for name in whole}
    return {
        "whole": printed,
        "items": [[float(item.asnumpy()) for item in output] for output in outputs],
        "difference": largest_difference(ours, whole, step, rank),
        "moved": largest_difference(ours, weights, step, rank),
        "scale": float(ours.get("mixed_precision.loss_scale", 1.0)),
        "sums": max(float(np.abs(value).max()) for name, value in ours.items() if name.startswith("accu_grads.")),
        "parts": sum(ours[name].shape != value.shape for name, value in whole.items()),
        "purposes": purposes_of(model),
    }


def purposes_of(model: Any) -> dict[str, int]:
    return Counter(f"{message.operator} of {message.purpose}" for message in collectives_of(model))


def counts_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    batch = local_batch(variant, 0, rank, size)
    network = network_of(variant)
    stock = parallel_nn.GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), variant.micro_size)

    def partition_stock() -> Any:
        return partition(_TrainGradAccuStepCell(stock, optimizer_of(variant, network)).set_train(), *batch)

    with gpu_target():
        # MindSpore's Model has the settings of its own step in force while it trains.
        models = {"ours": partition(our_step(variant), *batch)}
        models["stock"] = _in_context(settings_of(variant, stock), partition_stock)
    return {name: count_operators(model) | purposes_of(model) for name, model in models.items()}


# What is refused, and the ways in which a user can put the cells together.

_PLAIN = Variant(2)
_MANAGER = amp.DynamicLossScaleManager()


class _Given(NamedTuple):
    """A batch, and a step inside an AutoParallel, built while there is no GPU: data parallel communicates then."""

    batch: tuple[Tensor, Tensor]
    inside: TrainOneStepCell
    around: AutoParallel


# Settings that cannot work, and the words that say so.
REFUSED: dict[str, tuple[Callable[[_Given], Any], str]] = {
    "pipeline": (
        lambda given: _step(lambda cell: cell.pipeline(2)),
        "in one pipeline stage, but got 2 pipeline stages",
    ),
    "gradients_mean": (lambda given: _step(lambda cell: cell.enable_gradients_mean()), "without gradients_mean"),
    "loss_repeated_mean": (
        lambda given: _step(lambda cell: cell.disable_loss_repeated_mean()),
        "with loss_repeated_mean",
    ),
    "accumulation_steps": (lambda given: _step(accumulation_steps=2), "1 in semi-auto-parallel, but got 2"),
    "parallel": (lambda given: _step(parallel=DataParallel()), "'auto' in semi-auto-parallel, but got DataParallel("),
    "clip": (lambda given: _step(clip=ClipByGroupNorm({"*": 1.0})), "one limit for all parameters"),
    "reduce_dtype": (
        lambda given: _step(mixed_precision=MixedPrecision(reduce_dtype="fp16")),
        "one with float32 messages in semi-auto-parallel, but got reduce_dtype=Float16",
    ),
    "bad_micro_batch": (lambda given: _step(bad_micro_batch="drop"), "'skip_window' in semi-auto-parallel"),
    "rule in Python": (
        lambda given: partition(_step(mixed_precision=_MANAGER), *given.batch),
        "must be compilable, but got a DynamicLossScaleManager",
    ),
    "part": (lambda given: _step(part=True), "but got 2 parameters without it, first 'first.weight'"),
    "rows": (
        lambda given: partition(_step(variant=Variant(7)), *given.batch),
        "must divide the 64 rows of the batch of all devices",
    ),
    "cast first": (
        lambda given: partition(_step(mixed_precision="fp16_apex"), *given.batch),
        "in semi-auto-parallel, but got a cast to 16 bits",
    ),
    "late": (lambda given: partition(_changed(_step()), *given.batch), "without gradients_mean"),
    "larger graph": (lambda given: partition(Around(_step()), *given.batch), "compiled as the outermost cell"),
    "around": (
        lambda given: _in_context(given.around, lambda: partition(given.inside, *given.batch)),
        "AutoParallel around it all",
    ),
    "Model around": (lambda given: Model(given.around), "AutoParallel around a TrainOneStepCell"),
}


def refusals(batch: tuple[Tensor, Tensor], rank: int, size: int) -> dict[str, str]:
    inside = TrainOneStepCell(loss_cell_of(_PLAIN, network := Network()), optimizer_of(_PLAIN, network))
    given = _Given(batch, inside, AutoParallel(inside))
    with gpu_target():
        return {name: said(partial(REFUSED[name][0], given)) for name in list(REFUSED)[rank::size]}


def _step(
    change: Callable[[Any], Any] | None = None, variant: Variant = _PLAIN, part: bool = False, **settings: Any
) -> TrainOneStepCell:
    network = Network()
    cell = settings_of(variant, loss_cell_of(variant, network))
    if change is not None:
        change(cell)
    optimizer = nn.Momentum(network.second.trainable_params(), 0.1, 0.9) if part else optimizer_of(variant, network)
    return TrainOneStepCell(cell, optimizer, **settings)


def _changed(step: TrainOneStepCell) -> TrainOneStepCell:
    step.body.kind.auto_parallel.enable_gradients_mean()
    return step


def _in_context(cell: AutoParallel, function: Callable[[], Any]) -> Any:
    _init_auto_parallel_context(cell)
    try:
        return function()
    finally:
        _clear_auto_parallel_context(cell)
        ms.set_auto_parallel_context(grad_accumulation_step=1)  # MindSpore's own step has set it.


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return next(line for line in str(error).splitlines() if line.strip())
    return "nothing"


def count_operators(model: Any) -> dict[str, int]:
    names = operator_names(model)
    nodes = (node for graph in [model.graph, *model.functions] for node in graph.node)
    return Counter(names[node.op_type] for node in nodes if node.op_type in names)


def ways(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return what the compiler makes of our step inside Model and without AutoParallel, and whether eval compiles."""
    variant = Variant(2, "level1")
    with gpu_target():
        settings = settings_of(variant, loss_cell_of(variant, network := Network()))
        model = Model(settings, optimizer=optimizer_of(_PLAIN, network))
        in_model = _in_context(model._network, lambda: partition(model._train_network, *batch))
        settings = settings_of(variant, loss_cell_of(variant, network := Network()))
        # Without an AutoParallel, whose settings are in MindSpore's context already.
        optimizer = optimizer_of(_PLAIN, network)
        alone = _in_context(settings, lambda: partition(TrainOneStepCell(settings.network, optimizer), *batch))
        network.set_train(False)
        evaluated = said(lambda: _in_context(settings, lambda: partition(network, batch[0])))
    return {"in_model": count_operators(in_model), "alone": count_operators(alone), "evaluated": evaluated}


def attempt(function: Any, *args: Any) -> Any:
    """Return the result, or the error: one variant shall not hide the others."""
    try:
        return function(*args)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


def main() -> dict[str, Any]:
    rank, size = connect()
    result: dict[str, Any] = {"counts": {}}
    result["numbers"] = {name: attempt(numbers_of, variant, rank, size) for name, variant in NUMBERS[size].items()}
    # Compiling needs no other rank, and all have the same operators: each takes its share.
    for name in list(COUNTS[size])[rank::size]:
        result["counts"][name] = attempt(counts_of, COUNTS[size][name], rank, size)
    if size == 2:
        result["refusals"] = attempt(refusals, local_batch(Variant(1), 0, rank, size), rank, size)
        if rank == 1:  # The first one has more to count.
            result["ways"] = attempt(ways, local_batch(Variant(1), 0, rank, size))
    return result
