"""The test cells. Each trains in windows and compares with MindSpore's own step on the whole batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, lazy_inline, nn
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
    ROWS,
    TOKENS,
    Found,
    Place,
    SkippedCell,
    Training,
    perceptron,
    values_of,
)
from ms_gradaccum.tools.simulation.cpu_program import CpuProgram, own_part, whole_values
from ms_gradaccum.tools.simulation.partition import gpu_target, partition
from ms_gradaccum.training.train_step import TrainOneStepCell

# The gradients of these networks do not overflow with it in float16.
_SCALE = 1024.0
# It is below the norms of the gradients, 0.8 and more.
_MAX_NORM = 0.25
_STATE = "state_of_one"
_KINDS: dict[str, Any] = {
    "one process": "auto",
    "data parallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}


@dataclass(frozen=True)
class Cell:
    """One test, run in processes of its own.

    Attributes:
        name: Its name in the table.
        function: ``module:function``. It is called with a Place, `parallel` and `dtype`, and returns a Found.
        mode: ``"GRAPH"`` or ``"PYNATIVE"``.
        parallel: How several processes train together.
        dtype: The dtype in which the layers compute.
    """

    name: str
    function: str
    mode: str = "GRAPH"
    parallel: str = "one process"
    dtype: str = "float32"

    @property
    def title(self) -> str:
        """Its line in the table, before the result."""
        kind = "" if self.parallel == "one process" else f"{self.parallel}: "
        return f"{kind}{self.name}, {self.dtype}, {self.mode}"

    @property
    def partitioned(self) -> bool:
        """True if MindSpore's compiler partitions the step."""
        return self.parallel.startswith("semi-auto")


def all_cells() -> list[Cell]:
    """Return all cells. One job loads the state that an earlier process has saved."""
    rows = (
        ("clip, windows of 2 batches", "clipped"),
        ("mean over tokens", "tokens"),
        ("loss scale, an overflow", "overflow", "GRAPH", "one process", "float16"),
        ("MLP", "plain", "PYNATIVE", "one process", "bfloat16"),
        ("state saved in mid-window, resumed", "resume", "PYNATIVE"),
        ("data sink mode, on CPU a larger graph", "one_graph"),
        ("clip, windows of 2 batches", "clipped", "GRAPH", "data parallel"),
        ("loss scale, an overflow on one process", "overflow", "PYNATIVE", "data parallel", "float16"),
        ("state of one process resumed", "resume_other", "PYNATIVE", "HSDP level1"),
        ("clip, windows of 2 batches", "clipped", "GRAPH", "HSDP level2"),
        ("two layers", "semi_auto", "GRAPH", "semi-auto, sharded operators, level3"),
    )
    return [Cell(name, f"{__name__}:{function}", *settings) for name, function, *settings in rows]


def plain(place: Place, parallel: str, dtype: str) -> Found:
    """Two updates in the dtype."""
    training = Training(place, mixed_precision=_precision(place, dtype), parallel=_KINDS[parallel])
    return training.feed(0, 1).compared()


def clipped(place: Place, parallel: str, dtype: str) -> Found:
    """Two updates of two batches each, clipped."""
    settings = {"accumulation_steps": 2, "clip": ClipByGlobalNorm(_MAX_NORM), "parallel": _KINDS[parallel]}
    return Training(place, **settings).feed(0, 1, 2, 3).compared()


def tokens(place: Place, parallel: str, dtype: str) -> Found:
    """A mean over the labels that are not ignored, of which each micro batch has another number."""
    return Training(place, TOKENS, parallel=_KINDS[parallel]).feed(0, 1).compared()


def overflow(place: Place, parallel: str, dtype: str) -> Found:
    """An Inf in a row of the last process: no parameter changes anywhere, the scale is halved, and training goes on."""
    training = Training(place, mixed_precision=_precision(place, dtype), parallel=_KINDS[parallel])
    before = values_of(training.network)
    inputs, labels = ROWS.batch(9, place.rows)
    inputs[-1, 0] = np.inf
    output = training.step(*place.share((inputs, labels)))
    changed = any((value != before[name]).any() for name, value in values_of(training.network).items())
    if changed or bool(output.updated.asnumpy()):
        raise ValueError("a window with an Inf in its gradient made an update")
    output = training.step(*place.share(ROWS.batch(0, place.rows)))
    training.note(output)
    if float(output.loss_scale.asnumpy()) != _SCALE / 2:
        raise ValueError(f"after an overflow the scale {_SCALE:g} is {output.loss_scale} where its half is right")
    return training.feed(1).compared()


def resume(place: Place, parallel: str, dtype: str) -> Found:
    """Save a state in mid-window, load it into a training that is built anew, and go on."""
    first = Training(place, accumulation_steps=2, parallel=_KINDS[parallel]).feed(0, 1, 2)
    save_state(first.step, place.folder / _STATE)
    return resume_other(place, parallel, dtype)


def resume_other(place: Place, parallel: str, dtype: str) -> Found:
    """Go on from the state that one process has saved in mid-window."""
    if not (place.folder / _STATE).exists():
        raise SkippedCell("one process has saved no state")
    training = Training(place, accumulation_steps=2, parallel=_KINDS[parallel])
    load_state(training.step, place.folder / _STATE)
    return training.feed(3).compared()


def one_graph(place: Place, parallel: str, dtype: str) -> Found:
    """The whole window inside a larger graph: that of data sink mode, or of a cell on CPU, which has no such mode."""
    training = Training(place)
    if place.device == "CPU":
        graph = _LargerGraph(training.step).set_train()
        for number in (0, 1):
            training.note(graph(*place.share(ROWS.batch(number, place.rows))))
        return training.compared()
    arrays = tuple(map(np.concatenate, zip(*(ROWS.batch(number, place.rows) for number in (0, 1)))))
    data = NumpySlicesDataset(arrays, shuffle=False).batch(place.rows)
    Model(training.step.network, optimizer=training.step.optimizer).train(1, data, dataset_sink_mode=True)
    return training.compared()


def semi_auto(place: Place, parallel: str, dtype: str) -> Found:
    """Let MindSpore's compiler partition the step over all processes: rows over half of them, layers over two.

    CPU has no semi-auto-parallel. There the step is compiled for GPUs, and the program runs on CPU processes.
    """
    if place.size % 2:
        raise SkippedCell(f"sharded operators take an even number of processes, not {place.size}")
    dp, on_cpu = place.size // 2, place.device == "CPU"
    # A number of rows that the processes divide.
    workload = ROWS._replace(loss=_InlinedLoss, batch=lambda number, rows: ROWS.batch(number, rows - 1))

    def partitioned(cell: nn.Cell) -> AutoParallel:
        around = AutoParallel(cell)
        around.dataset_strategy(((dp, 1), (dp, 1)))
        around.hsdp(threshold=0, optimizer_level="level3")
        return around

    # The two processes of one row of the mesh have the same rows of the data.
    batches = (workload.batch(number, place.rows) for number in (0, 1))
    parts = [[Tensor(np.split(array, dp)[place.rank // 2]) for array in batch] for batch in batches]
    with built_for("GPU" if on_cpu else place.device), graph_mode():
        training = Training(place, workload, _sharded(dp), partitioned)
    step: Any = training.step
    start = whole_values(step)
    if on_cpu:
        with gpu_target():
            model = partition(step, *parts[0])
        step = CpuProgram(model, start, training.step.parameter_layout_dict, place.rank)
    for batch in parts:
        training.note(step(*batch))
    names = [parameter.name for parameter in training.step.network.trainable_params()]
    layouts = training.step.parameter_layout_dict
    return training.compared(
        {str(i): step.values()[name] for i, name in enumerate(names)} if on_cpu else None,
        lambda index, value: own_part(value, layouts.get(names[int(index)]), place.rank),
    )


class _InlinedLoss(nn.WithLossCell):
    """A loss cell that is compiled once for all micro batches, which level2 and level3 need."""

    @lazy_inline
    def __init__(self, network: nn.Cell) -> None:
        super().__init__(network, nn.MSELoss())


def _sharded(dp: int) -> nn.Cell:
    """Return the MLP with the columns of the first layer on two devices, and the rows of the second."""
    network = perceptron()
    first, tanh, second = network
    first.matmul.shard(((dp, 1), (2, 1)))
    first.bias_add.shard(((dp, 2), (2,)))
    tanh.tanh.shard(((dp, 2),))
    second.matmul.shard(((dp, 2), (1, 2)))
    second.bias_add.shard(((dp, 1), (1,)))
    return network


class _LargerGraph(nn.Cell):
    """A user's cell that calls the step."""

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
