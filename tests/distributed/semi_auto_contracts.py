"""Errors in semi-auto-parallel, and the ways in which a user can put the cells together."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mindspore import Tensor, amp, nn
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel
from semi_auto_cells import Network, Variant, loss_cell_of, optimizer_of, settings_of
from simulation.partition import gpu_target, operator_names, partition

from ms_gradaccum import ClipByGroupNorm, DataParallel, MixedPrecision, Model, TrainOneStepCell

_PLAIN = Variant(2)
_MANAGER = amp.DynamicLossScaleManager()


class _Outer(nn.Cell):
    def __init__(self, step: nn.Cell) -> None:
        super().__init__()
        self.step = step

    def construct(self, x, y):
        return self.step(x, y)


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
    "larger graph": (lambda given: partition(_Outer(_step()), *given.batch), "compiled as the outermost cell"),
    "around": (
        lambda given: _in_context(given.around, lambda: partition(given.inside, *given.batch)),
        "AutoParallel around it all",
    ),
    "Model around": (lambda given: Model(given.around), "AutoParallel around a TrainOneStepCell"),
}


def refusals(batch: tuple[Tensor, Tensor], rank: int, size: int) -> dict[str, str]:
    """Return the sentence about each setting that cannot work. Compiling needs no other rank: each takes its share."""
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


def said(function: Callable[[], Any]) -> str:
    """Return the first line of the error that ``function`` raises."""
    try:
        function()
    except Exception as error:
        return next(line for line in str(error).splitlines() if line.strip())
    return "nothing"


def count_operators(model: Any) -> dict[str, int]:
    """Count the operators of an inlined program by name."""
    names = operator_names(model)
    nodes = (node for graph in [model.graph, *model.functions] for node in graph.node)
    return Counter(names[node.op_type] for node in nodes if node.op_type in names)


def ways(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return what the compiler makes of our step inside Model and without AutoParallel, and whether eval compiles."""
    variant = Variant(2, "level1")
    with gpu_target():
        model = Model(settings_of(variant, loss_cell_of(variant, network := Network())), optimizer=_optimizer(network))
        in_model = _in_context(model._network, lambda: partition(model._train_network, *batch))
        settings = settings_of(variant, loss_cell_of(variant, network := Network()))
        alone = _in_context(settings, lambda: _alone(settings.network, network, batch))
        network.set_train(False)
        evaluated = said(lambda: _in_context(settings, lambda: partition(network, batch[0])))
    counts = {"in_model": count_operators(in_model), "alone": count_operators(alone)}
    return {**counts, "evaluated": evaluated}


def _optimizer(network: nn.Cell) -> nn.Cell:
    return optimizer_of(_PLAIN, network)


def _alone(loss_cell: nn.Cell, network: nn.Cell, batch: tuple[Tensor, Tensor]) -> Any:
    """Compile our step without an AutoParallel, whose settings are in MindSpore's context already."""
    return partition(TrainOneStepCell(loss_cell, _optimizer(network)), *batch)
