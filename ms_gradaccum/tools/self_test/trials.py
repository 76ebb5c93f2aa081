"""The trials. Each function trains in windows and compares with MindSpore's own step on the whole batch."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.backend.device import built_for, multiply
from ms_gradaccum.checkpoint.load import load_state
from ms_gradaccum.checkpoint.save import save_state
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.gradients.mixed_precision import MixedPrecision
from ms_gradaccum.loops.model import Model
from ms_gradaccum.parallel.kinds import HSDP, DataParallel
from ms_gradaccum.tools.self_test.training import (
    DTYPES,
    FLOAT32,
    MAX_NORM,
    MLP,
    RATE,
    TRANSFORMER,
    Found,
    Place,
    Run,
    SkippedCell,
    Training,
    difference_of,
    run_stock_step,
    tolerance,
    values_of,
)
from ms_gradaccum.tools.simulation.cpu_program import CpuProgram, own_part, whole_values
from ms_gradaccum.tools.simulation.partition import gpu_target, partition
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

_PAIRS = ((0, 1), (2, 3))
_SINGLE = ((0,), (1,))
# In float16 the gradients of these networks bear it.
_SCALE = 1024.0
# The toy's weight after one update, and how far float32 rounds it: a loss, its mean, its gradient, the update.
_TOY_ROWS, _TOY_WEIGHT, _TOY_TOLERANCE = 8, 2.04, 8 * FLOAT32
_STATE = "state_of_one"
_KINDS: dict[str, Any] = {
    "one process": "auto",
    "data parallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}


def toy(place: Place, parallel: str, dtype: str) -> Found:
    """One weight that starts at 0 and is 2.04 after one update: x = 1..8, y = 2x, mean squared error, SGD 0.02."""
    rows = np.arange(1, _TOY_ROWS + 1, dtype=np.float32).reshape(-1, 1)
    network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
    step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.02), parallel=_KINDS[parallel])
    loss = float(step(*place.share((rows, 2 * rows))).loss.asnumpy())
    reached = network.weight.asnumpy().item()
    # The mean of (2x)**2 is 102.
    differences = {"weight": abs(reached - _TOY_WEIGHT) / _TOY_WEIGHT, "loss": abs(loss - 102.0) / 102.0}
    what = max(differences, key=lambda name: differences[name])
    return Found(differences[what], _TOY_TOLERANCE, what)


def plain(place: Place, parallel: str, dtype: str) -> Found:
    """Two updates in the dtype."""
    training = Training(place, MLP, mixed_precision=_precision(place, dtype), parallel=_KINDS[parallel])
    for number in (0, 1):
        training.feed(number)
    return training.compared(_SINGLE, dtype)


def clipped(place: Place, parallel: str, dtype: str) -> Found:
    """Two updates of two batches each, clipped."""
    settings = {"accumulation_steps": 2, "clip": ClipByGlobalNorm(MAX_NORM), "parallel": _KINDS[parallel]}
    training = Training(place, MLP, **settings)
    for number in range(4):
        training.feed(number)
    return training.compared(_PAIRS, clip=True)


def tokens(place: Place, parallel: str, dtype: str) -> Found:
    """A mean over tokens, of which each row has another number."""
    training = Training(place, TRANSFORMER, parallel=_KINDS[parallel])
    for number in (0, 1):
        training.feed(number)
    return training.compared(_SINGLE)


def overflow(place: Place, parallel: str, dtype: str) -> Found:
    """An Inf in a row of the last process: no parameter changes anywhere, the scale is halved, and training goes on."""
    training = Training(place, MLP, mixed_precision=_precision(place, dtype), parallel=_KINDS[parallel])
    before = values_of(training.network)
    inputs, labels = MLP.batch(9, place.rows)
    inputs[-1, 0] = np.inf
    output = training.step(*place.share((inputs, labels)))
    changed = any((value != before[name]).any() for name, value in values_of(training.network).items())
    if changed or bool(output.updated.asnumpy()):
        raise ValueError("a window with an Inf in its gradient made an update")
    output = training.feed(0)
    if float(output.loss_scale.asnumpy()) != _SCALE / 2:
        raise ValueError(f"after an overflow the scale {_SCALE:g} is {output.loss_scale} where its half is right")
    training.feed(1)
    return training.compared(_SINGLE, dtype)


def resume(place: Place, parallel: str, dtype: str) -> Found:
    """Save a state in mid-window, load it into a training that is built anew, and go on."""
    first = Training(place, MLP, accumulation_steps=2, parallel=_KINDS[parallel])
    for number in range(3):
        first.feed(number)
    save_state(first.step, place.folder / _STATE)
    return resume_other(place, parallel, dtype)


def resume_other(place: Place, parallel: str, dtype: str) -> Found:
    """Go on from the state that one process has saved in mid-window."""
    if not (place.folder / _STATE).exists():
        raise SkippedCell("one process has saved no state")
    training = Training(place, MLP, accumulation_steps=2, parallel=_KINDS[parallel])
    load_state(training.step, place.folder / _STATE)
    training.feed(3)
    return training.compared(_PAIRS)


def one_graph(place: Place, parallel: str, dtype: str) -> Found:
    """The whole window inside a larger graph: that of data sink mode, or of a cell on CPU, which has no such mode."""
    training = Training(place, MLP)
    if place.device == "CPU":
        graph = _InLargerGraph(training.step).set_train()
        for number in (0, 1):
            output = graph(*place.share(MLP.batch(number, place.rows)))
            # A graph returns a plain tuple.
            training.note(*((output.loss, output.grad_norm) if hasattr(output, "loss") else (output[0], output[4])))
    else:
        arrays = tuple(map(np.concatenate, zip(*(MLP.batch(number, place.rows) for number in (0, 1)))))
        data = NumpySlicesDataset(arrays, shuffle=False).batch(place.rows)
        Model(training.step.network, optimizer=training.step.optimizer).train(1, data, dataset_sink_mode=True)
    return training.compared(_SINGLE)


def semi_auto(place: Place, parallel: str, dtype: str) -> Found:
    """Let MindSpore's compiler partition the step over all processes: rows over half of them, layers over two.

    CPU has no semi-auto-parallel. There the step is compiled for GPUs, and the program runs on CPU processes.
    """
    if place.size % 2:
        raise SkippedCell(f"sharded operators take an even number of processes, not {place.size}")
    dp = place.size // 2
    arrays = [_small_batch(number, dp) for number in (0, 1)]
    # The two processes of one row of the mesh have the same rows of the data.
    parts = [[Tensor(np.split(array, dp)[place.rank // 2]) for array in batch] for batch in arrays]
    on_stand_ins = place.device == "CPU"
    with built_for("GPU" if on_stand_ins else place.device), graph_mode():
        step = _partitioned_step(dp)
    start, program = whole_values(step), None
    if on_stand_ins:
        with gpu_target():
            model = partition(step, *parts[0])
        program = CpuProgram(model, start, step.parameter_layout_dict, place.rank)
    run = Run({})
    for batch in parts:
        output = step(*batch) if program is None else program(*batch)
        run.losses.append(float(output[0].asnumpy()))
        run.norms.append(float(output[4].asnumpy()))
    weights = step.network.trainable_params()
    run.weights = {each.name: each.asnumpy() for each in weights} if program is None else program.values()
    network = _TwoLayers(1, 1)
    whole = Run(_named(network))
    optimizer = nn.Momentum(network.trainable_params(), RATE, 0.9)
    run_stock_step(whole, nn.WithLossCell(network, nn.MSELoss()), optimizer, arrays)
    whole.weights = _named(network)
    # The parts that this process has.
    for values in (whole.start, whole.weights):
        layouts = step.parameter_layout_dict
        values.update({name: own_part(value, layouts.get(name), place.rank) for name, value in values.items()})
    return difference_of(run, whole, tolerance(place.device, ms.float32, 64 * dp, 8))


class _TwoLayers(nn.Cell):
    """The columns of the first layer are on ``mp`` devices, and the rows of the second."""

    @lazy_inline  # It is compiled once for all micro batches, which level2 and level3 need.
    def __init__(self, dp: int, mp: int) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Dense(8, 16), nn.Dense(16, 4), ops.ReLU()
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


def _partitioned_step(dp: int) -> TrainOneStepCell:
    network = _TwoLayers(dp, 2)
    cell = AutoParallel(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2))
    cell.dataset_strategy(((dp, 1), (dp, 1)))
    cell.hsdp(threshold=0, optimizer_level="level3")
    return TrainOneStepCell(cell, nn.Momentum(network.trainable_params(), RATE, 0.9)).set_train()


def _small_batch(number: int, dp: int) -> Any:
    rng = np.random.default_rng(300 + number)
    return rng.normal(size=(4 * dp, 8)).astype(np.float32), rng.normal(size=(4 * dp, 4)).astype(np.float32)


def _named(network: nn.Cell) -> Any:
    return {parameter.name: parameter.asnumpy().copy() for parameter in network.trainable_params()}


class _InLargerGraph(nn.Cell):
    """A cell of the user's that calls the step."""

    def __init__(self, step: TrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x: Tensor, y: Tensor) -> Any:
        return self.step(x, y)


def _precision(place: Place, dtype: str) -> MixedPrecision:
    """Return a loss scale with a dtype that the device multiplies in."""
    try:
        multiply(DTYPES[dtype])
    except Exception as error:
        raise SkippedCell(f"this {place.device} has no matrix product in {dtype}") from error
    return MixedPrecision(DTYPES[dtype], "O1", init_scale=_SCALE)
