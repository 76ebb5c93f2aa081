"""What is tried in semi-auto-parallel: MindSpore's compiler partitions the step over all processes.

CPU has no semi-auto-parallel. There the step is compiled for GPUs, and what the compiler has made of it runs on CPU
processes, as `simulate` does it.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.tools.self_test.tolerances import tolerance
from ms_gradaccum.tools.self_test.training import Found, Place, Run, SkippedCell, Values, difference_of, run_stock_step
from ms_gradaccum.tools.simulation.cpu_program import CpuProgram, own_part, whole_values
from ms_gradaccum.tools.simulation.partition import gpu_target, partition
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

_INPUTS, _HIDDEN, _OUTPUTS = 8, 16, 4
# Of each process, so that micro batches and shards divide it.
_ROWS = 4
_MICRO_SIZE = 2
_UPDATES = 2
# Two layers and the loss, forth and back.
_ROUNDINGS = 8
_RATE = 0.1


class TwoLayers(nn.Cell):
    """The columns of the first layer are on ``mp`` devices, and the rows of the second."""

    def __init__(self, dp: int, mp: int) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(_INPUTS, _HIDDEN), nn.Dense(_HIDDEN, _OUTPUTS)
        self.relu = ops.ReLU()
        for number, parameter in enumerate(self.trainable_params()):
            values = np.random.default_rng(number).normal(size=parameter.shape) * 0.3
            parameter.set_data(Tensor(values.astype(np.float32)))
        if mp > 1:
            self.relu.shard(((dp, mp),))
            self.first.matmul.shard(((dp, 1), (mp, 1)))
            self.first.bias_add.shard(((dp, mp), (mp,)))
            self.second.matmul.shard(((dp, mp), (1, mp)))
            self.second.bias_add.shard(((dp, 1), (1,)))

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))


class LazyTwoLayers(TwoLayers):
    """The same, compiled once for all micro batches, which ``level2`` and ``level3`` need."""

    @lazy_inline
    def __init__(self, dp: int, mp: int) -> None:
        super().__init__(dp, mp)


def semi_auto(place: Place, level: str, sharded: bool, mode: str, parallel: str, dtype: str) -> Found:
    """Train two updates, and compare this process's parts with one process that trains on the whole batch."""
    if sharded and place.size % 2:
        raise SkippedCell(f"sharded operators take an even number of processes, not {place.size}")
    mp = 2 if sharded else 1
    dp = place.size // mp
    # Processes of one row of the mesh have the same rows of the data.
    part = place.rank // mp
    batches = [_batch(number, dp) for number in range(_UPDATES)]
    parts = [[Tensor(np.split(array, dp)[part]) for array in batch] for batch in batches]
    run, layouts = (_on_stand_ins if place.device == "CPU" else _on_devices)(place, dp, mp, level, parts)
    whole = _whole(batches)
    # The parts that this process has of the other's parameters.
    for values in (whole.start, whole.weights):
        values.update({name: own_part(value, layouts.get(name), place.rank) for name, value in values.items()})
    rows = batches[0][0].shape[0]
    allowed = tolerance(place.device, ms.float32, rows * _HIDDEN, _ROUNDINGS)
    return difference_of(run, whole, allowed)


def _on_stand_ins(place: Place, dp: int, mp: int, level: str, parts: Any) -> tuple[Run, Any]:
    """Compile for GPUs that are not there, and run the program on the CPU."""
    with built_for("GPU"):
        step = _step(dp, mp, level)
    start = whole_values(step)
    with gpu_target():
        model = partition(step, *parts[0])
    layouts = step.parameter_layout_dict
    program = CpuProgram(model, start, layouts, place.rank)
    run = Run({})
    for batch in parts:
        _note(run, program(*batch))
    run.weights = program.values()
    return run, layouts


def _on_devices(place: Place, dp: int, mp: int, level: str, parts: Any) -> tuple[Run, Any]:
    """Train as users do."""
    with graph_mode():
        step = _step(dp, mp, level)
        run = Run({})
        for batch in parts:
            _note(run, step(*batch))
    run.weights = {parameter.name: parameter.asnumpy() for parameter in step.network.trainable_params()}
    return run, step.parameter_layout_dict


def _step(dp: int, mp: int, level: str) -> TrainOneStepCell:
    network = (LazyTwoLayers if level in ("level2", "level3") else TwoLayers)(dp, mp)
    cell = AutoParallel(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), _MICRO_SIZE))
    cell.dataset_strategy(((dp, 1), (dp, 1)))
    if level != "plain":
        cell.hsdp(threshold=0, optimizer_level=level)
    return TrainOneStepCell(cell, nn.Momentum(network.trainable_params(), _RATE, 0.9)).set_train()


def _note(run: Run, output: Any) -> None:
    run.losses.append(float(output[0].asnumpy()))
    run.norms.append(float(output[4].asnumpy()))


def _batch(number: int, dp: int) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(300 + number)
    rows = dp * _ROWS
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(size=(rows, _OUTPUTS)).astype(np.float32)


def _whole(batches: Any) -> Run:
    """Train with MindSpore's own step in this process alone."""
    network = TwoLayers(1, 1)
    run = Run(_named(network))
    optimizer = nn.Momentum(network.trainable_params(), _RATE, 0.9)
    run_stock_step(run, nn.WithLossCell(network, nn.MSELoss()), optimizer, batches)
    run.weights = _named(network)
    return run


def _named(network: nn.Cell) -> Values:
    return {parameter.name: parameter.asnumpy().copy() for parameter in network.trainable_params()}
