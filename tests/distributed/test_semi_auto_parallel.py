"""Semi-auto-parallel without a GPU: what the compiler makes of our cells, and what that computes."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from linear_toy import momentum, mse
from mindspore import Tensor, amp, lazy_inline, nn, ops
from mindspore.common.initializer import Constant
from mindspore.nn.utils import no_init_parameters
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel
from ranks import RANK, SIZE, on_ranks
from scenarios import BY_HAND, CLIPS, train_clipped
from simulation.cpu_program import CpuProgram, own_part, own_parts, whole_values
from simulation.cuda_stubs import why_not
from simulation.partition import collectives_of, connect, gpu_target, operator_names, partition
from step_probe import Around

from ms_gradaccum import ClipByGroupNorm, DataParallel, GradAccumulation, MixedPrecision, Model, TrainOneStepCell

FOR_GPU = True
if why_not() is not None:
    pytest.skip(f"cannot compile for GPU here: {why_not()}", allow_module_level=True)
if SIZE > 1:
    connect()

ROWS, PARAMETERS = 64, 4
# Each update sees another batch.
BATCHES = [
    (rng.randn(ROWS, 8).astype(np.float32), rng.randn(ROWS, 4).astype(np.float32))
    for rng in (np.random.RandomState(1), np.random.RandomState(2))
]


@dataclass(frozen=True)
class Variant:
    micro_size: int
    level: str | None = None
    optimizer: str = "momentum"
    weighted: bool = False
    clip: str = "none"
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


PLAIN = Variant(2)


class Network(nn.Cell):
    """Four parameters, which ``constant`` lets MindSpore make without their values."""

    def __init__(self, dp=0, mp=1, constant=False):
        super().__init__()
        rng = np.random.RandomState(0)

        def values(*shape):
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
    def __init__(self, *args):
        super().__init__(*args)


class PositiveTokens(nn.Cell):
    """Sum of the squared errors where the label is positive, and how many these are; or the mean of these."""

    def __init__(self, network, is_mean=False):
        super().__init__(auto_prefix=False)
        self.network, self.is_mean = network, is_mean

    def construct(self, x, y):
        valid = ops.cast(y > 0, ms.float32)
        total = (ops.square(self.network(x) - y) * valid).sum()
        return total / valid.sum() if self.is_mean else (total, valid.sum())


def network_of(variant):
    """Return a network that starts with the same values every time."""
    with no_init_parameters() if variant.no_init else nullcontext():
        network = (LazyNetwork if variant.lazy else Network)(variant.dp, variant.mp, variant.no_init)
    if variant.recompute:
        network.first.recompute()
    if variant.half:
        network.second.to_float(ms.float16)
    return network


def optimizer_of(variant, network):
    with no_init_parameters() if variant.no_init else nullcontext():
        if variant.optimizer == "adam":
            return nn.Adam(network.trainable_params(), 0.01)
        return momentum(network, 0.1)


def settings_of(variant, network):
    parallel = AutoParallel(network)
    parallel.dataset_strategy(((variant.dp, 1),) * 2 if variant.dp else variant.strategy)
    if variant.level is not None:
        parallel.hsdp(shard_size=variant.shard_size, threshold=0, optimizer_level=variant.level)
    return parallel


def loss_cell_of(variant, network):
    loss = PositiveTokens(network) if variant.weighted else mse(network)
    return GradAccumulation(loss, variant.micro_size, weighted=variant.weighted)


def our_step(variant=PLAIN, change=None, **settings):
    network = network_of(variant)
    cell = settings_of(variant, loss_cell_of(variant, network))
    if change is not None:
        change(cell)
    if variant.loss_scale is not None:
        settings["mixed_precision"] = MixedPrecision(level="O0", init_scale=variant.loss_scale, growth_interval=2)
    settings.setdefault("clip", CLIPS[variant.clip]())
    return TrainOneStepCell(cell, optimizer_of(variant, network), **settings)


def local_batch(variant, number=0):
    """Return what this rank loads of a batch. Of sharded operators the compiler uses only its shape."""
    rows = slice(RANK * ROWS // SIZE, (RANK + 1) * ROWS // SIZE)
    if variant.dp:
        rows = slice(ROWS // variant.dp)
    elif variant.strategy == "full_batch":
        rows = slice(None)
    return [Tensor(array[rows]) for array in BATCHES[number]]


def own_batch(variant, number, layouts):
    if not variant.dp:
        return local_batch(variant, number)
    return [Tensor(own_part(array, layouts[f"inputs{i}"], RANK)) for i, array in enumerate(BATCHES[number])]


def run_whole(variant):
    """Train on the whole batches in one process; return loss and norms of each update and the parameters."""
    network = network_of(replace(variant, lazy=False, dp=0))
    network.init_parameters_data()
    loss = PositiveTokens(network, is_mean=True) if variant.weighted else mse(network)
    clip = BY_HAND.get(variant.clip, lambda grads, norm: grads)
    reports = train_clipped(loss, optimizer_of(variant, network), BATCHES, clip)
    assert all((norm > clipped) == (variant.clip != "none") for _, norm, clipped in reports)
    return reports, {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}


def trained(variant):
    """Train on both batches with the program of the compiler. Return its reports and by how much weights are apart."""
    with gpu_target():
        step = our_step(variant)
    # The compiler cuts the parameters; without values, there is nothing to cut.
    start = {} if variant.no_init else whole_values(step)
    model = partition(step, *local_batch(variant))
    start = start or whole_values(step)
    layouts = step.parameter_layout_dict
    program = CpuProgram(model, start, layouts, RANK)
    outputs = [program(*own_batch(variant, number, layouts)) for number in range(len(BATCHES))]
    reports, whole = run_whole(variant)
    ours = program.values()

    def largest_difference(weights):
        own = own_parts({name: weights[name] for name in whole}, layouts, RANK)
        return max(float(np.abs(ours[name] - value).max()) for name, value in own.items())

    # The window is over: its sums are cleared.
    assert not any(value.any() for name, value in ours.items() if name.startswith("accu_grads."))
    return SimpleNamespace(
        whole=reports,
        items=[[float(item.asnumpy()) for item in output] for output in outputs],
        difference=largest_difference(whole),
        moved=largest_difference(start),
        scale=float(ours.get("mixed_precision.loss_scale", 1.0)),
        parts=sum(ours[name].shape != value.shape for name, value in whole.items()),
        purposes=purposes_of(model),
    )


def purposes_of(model):
    return Counter(f"{message.operator} of {message.purpose}" for message in collectives_of(model))


def count_operators(model):
    names = operator_names(model)
    nodes = (node for graph in [model.graph, *model.functions] for node in graph.node)
    return Counter(names[node.op_type] for node in nodes if node.op_type in names)


# Each names what it adds to the plain path.
ON_TWO = {
    "plain-1-no_init": Variant(1, no_init=True),
    "plain-2-tokens-clip-scale": Variant(2, weighted=True, clip="norm", loss_scale=1024.0),
    "level1-1-tokens-limit": Variant(1, "level1", weighted=True, clip="value"),
    "level1-4-adam-tokens-clip-scale": Variant(4, "level1", "adam", weighted=True, clip="norm", loss_scale=1024.0),
}
ON_FOUR = {
    "level1-2-adam-tokens-clip": Variant(2, "level1", "adam", weighted=True, clip="norm", strategy=((4, 1), (4, 1))),
    "2x2-level1-four-clip-scale": Variant(4, "level1", clip="norm", loss_scale=1024.0, dp=2, mp=2),
    "1x4-one-tokens-clip-adam": Variant(1, optimizer="adam", weighted=True, clip="norm", dp=1, mp=4),
    "2x2-level2-clip-recompute": Variant(2, "level2", clip="norm", lazy=True, recompute=True, dp=2, mp=2),
    "4x1-level3-tokens-adam": Variant(2, "level3", "adam", weighted=True, lazy=True, dp=4),
}


def train_as_one_process(variant):
    found = trained(variant)
    # Adam divides gradients that are near zero, and their rounding, by their size.
    is_rounded = variant.dp and variant.optimizer == "adam"
    assert found.difference < (2e-6 if is_rounded else 2e-7)
    assert found.moved > 5e-3
    for whole, (loss, overflow, scale, updated, *norms, _, weight) in zip(found.whole, found.items):
        assert [loss, *norms] == pytest.approx(whole, rel=1e-6)
        assert (overflow, updated, scale) == (0, 1, variant.loss_scale or 1)
        assert weight == 64 if not variant.weighted else weight in (128, 108)
    if variant.mp > 1:
        # Else it would be a data parallel program.
        assert found.purposes["AllReduce of forward of a sharded operator"] >= variant.micro_size
        assert found.parts > 0


test_weights_and_reports_are_those_of_one_process_on_the_whole_batch = on_ranks(2, cases=ON_TWO, compiled=True)(
    train_as_one_process
)
test_on_four_they_are = on_ranks(4, cases=ON_FOUR, compiled=True)(train_as_one_process)


@on_ranks(2, compiled=True)
def test_overflow_leaves_everything_as_it_was():
    found = trained(Variant(2, "level1", loss_scale=3e38))
    assert found.moved == 0
    assert [(items[1], items[3]) for items in found.items] == [(1, 0), (1, 0)]
    # The scale backs off after each, and is the same on all ranks.
    assert [*(items[2] for items in found.items), found.scale] == pytest.approx([3e38, 1.5e38, 0.75e38])


@on_ranks(2, compiled=True)
def test_half_precision_is_scaled_clipped_and_unscaled():
    found = trained(Variant(2, "level1", loss_scale=64.0, half=True, clip="norm", strategy="full_batch"))
    # 11 bits of a gradient, times the learning rate; and not float32.
    assert 1e-6 < found.difference < 1e-3 and found.moved > 1e-2
    for whole, (loss, overflow, scale, updated, *norms, _, weight) in zip(found.whole, found.items):
        assert [loss, *norms] == pytest.approx(whole, rel=2e-3)
        assert (overflow, scale, updated, weight) == (0, 64, 1, 64)
    # Two clean windows are its growth interval.
    assert found.scale == 128


# Compiling needs no other rank, and all have the same operators: each takes its share. The level, micro batches.
COUNTED = [(0, None, 1), (1, None, 4), (0, "level1", 2), (1, "level2", 2), (0, "level3", 2)]


def count_like_the_stock_cells(rank, level, micro_size, **settings):
    if RANK != rank:
        return
    shares = level in ("level2", "level3")
    variant = Variant(micro_size, level, lazy=shares, **settings)
    batch, network = local_batch(variant), network_of(variant)
    stock_cell = parallel_nn.GradAccumulation(mse(network), micro_size)

    def partition_stock():
        return partition(_TrainGradAccuStepCell(stock_cell, optimizer_of(variant, network)).set_train(), *batch)

    with gpu_target():
        # MindSpore's Model has the settings of its own step in force while it trains.
        models = [partition(our_step(variant), *batch), in_context(settings_of(variant, stock_cell), partition_stock)]
    ours, stock = [count_operators(model) + purposes_of(model) for model in models]
    for operator in ("AllGather", "ReduceScatter", "AllReduce of gradients", "AssignAdd", "MatMul"):
        assert ours[operator] == stock[operator], operator
    # One scalar more for the norm; with one micro batch, one more on the way back from the two sums.
    assert ours["AllReduce of norm"] == 1
    assert ours["AllReduce"] == stock["AllReduce"] + (2 if micro_size == 1 else 1)
    # One reduction for each parameter and window, or micro batch where the sums are sharded.
    operator = "AllReduce of gradients" if level is None else "ReduceScatter of gradients"
    assert ours[operator] == PARAMETERS * (micro_size if shares else 1)
    if not shares and micro_size > 1:
        # Each micro batch is added on the device, and one to the optimizer's count of updates.
        assert ours["AssignAdd"] == PARAMETERS * micro_size + 1


test_communication_is_that_of_the_stock_cells = on_ranks(2, cases=COUNTED, compiled=True)(count_like_the_stock_cells)


@on_ranks(4, compiled=True)
def test_in_groups_it_is():
    """By the first rank, with which a group begins: the others would wait for it."""
    count_like_the_stock_cells(0, "level1", 2, shard_size=2)


def in_context(cell, function):
    _init_auto_parallel_context(cell)
    try:
        return function()
    finally:
        _clear_auto_parallel_context(cell)
        ms.set_auto_parallel_context(grad_accumulation_step=1)  # MindSpore's own step has set it.


@on_ranks(2, compiled=True)
def test_in_model_and_without_auto_parallel_it_is_the_same_program_and_evaluation_compiles_afterwards():
    if RANK == 0:  # It has more to count.
        return
    variant = Variant(2, "level1")
    batch = local_batch(variant)
    with gpu_target():
        models = [partition(our_step(variant), *batch)]
        settings = settings_of(variant, loss_cell_of(variant, network := Network()))
        model = Model(settings, optimizer=optimizer_of(variant, network))
        models.append(in_context(model._network, lambda: partition(model._train_network, *batch)))
        settings = settings_of(variant, loss_cell_of(variant, network := Network()))
        optimizer = optimizer_of(variant, network)
        # Without an AutoParallel, whose settings are in MindSpore's context already.
        models.append(in_context(settings, lambda: partition(TrainOneStepCell(settings.network, optimizer), *batch)))
        network.set_train(False)
        in_context(settings, lambda: partition(network, batch[0]))
    ours, *others = map(count_operators, models)
    assert ours["ApplyMomentum"] == PARAMETERS
    for operator in ("AllGather", "AllReduce", "ReduceScatter", "AssignAdd", "MatMul", "ApplyMomentum"):
        assert [counts[operator] for counts in others] == [ours[operator]] * 2


def refused(words):
    return pytest.raises(Exception, match=rf"^\s*For '.*{re.escape(words)}")


def compiles(cell):
    partition(cell, *local_batch(PLAIN))


# Settings that cannot work, and the words that say so.
REFUSED = {
    "pipeline": ({"change": lambda cell: cell.pipeline(2)}, "in one pipeline stage, but got 2 pipeline stages"),
    "gradients_mean": ({"change": AutoParallel.enable_gradients_mean}, "without gradients_mean"),
    "loss_repeated_mean": ({"change": AutoParallel.disable_loss_repeated_mean}, "with loss_repeated_mean"),
    "accumulation_steps": ({"accumulation_steps": 2}, "1 in semi-auto-parallel, but got 2"),
    "parallel": ({"parallel": DataParallel()}, "'auto' in semi-auto-parallel, but got DataParallel("),
    "clip": ({"clip": ClipByGroupNorm({"*": 1.0})}, "one limit for all parameters"),
    "reduce_dtype": (
        {"mixed_precision": MixedPrecision(reduce_dtype="fp16")},
        "one with float32 messages in semi-auto-parallel, but got reduce_dtype=Float16",
    ),
    "bad_micro_batch": ({"bad_micro_batch": "drop"}, "'skip_window' in semi-auto-parallel"),
    "rule in Python": (
        {"mixed_precision": amp.DynamicLossScaleManager()},
        "must be compilable, but got a DynamicLossScaleManager",
    ),
    "rows": ({"variant": Variant(7)}, "must divide the 64 rows of the batch of all devices"),
    "cast first": ({"mixed_precision": "fp16_apex"}, "in semi-auto-parallel, but got a cast to 16 bits"),
}


@on_ranks(2, cases={name: (i, *case) for i, (name, case) in enumerate(REFUSED.items())}, compiled=True)
def test_what_would_go_wrong_is_refused(number, settings, words):
    if number % SIZE == RANK:
        with gpu_target(), refused(words):
            compiles(our_step(**settings))


@on_ranks(2, compiled=True)
def test_parameters_without_an_optimizer_late_changes_and_a_larger_graph_are_refused():
    network = Network()
    with gpu_target():
        with refused("but got 2 parameters without it, first 'first.weight'"):
            TrainOneStepCell(settings_of(PLAIN, loss_cell_of(PLAIN, network)), momentum(network.second, 0.1))
        step = our_step()
        step.body.kind.auto_parallel.enable_gradients_mean()
        with refused("without gradients_mean"):
            compiles(step)
        with refused("compiled as the outermost cell"):
            compiles(Around(our_step()))


@on_ranks(2, compiled=True)
def test_auto_parallel_around_a_step_is_refused():
    network = Network()
    # Built while there is no GPU: data parallel communicates then.
    inside = TrainOneStepCell(loss_cell_of(PLAIN, network), optimizer_of(PLAIN, network))
    around = AutoParallel(inside)
    with gpu_target():
        with refused("AutoParallel around it all"):
            in_context(around, partial(compiles, inside))
        with refused("AutoParallel around a TrainOneStepCell"):
            Model(around)
