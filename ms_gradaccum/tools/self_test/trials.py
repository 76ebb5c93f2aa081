"""The test cells. Each trains in windows and compares with MindSpore's own step on the whole batch."""

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.backend.device import has_data_sink
from ms_gradaccum.backend.mindspore_private import load_tensor_by_layout
from ms_gradaccum.backend.probes import multiply
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.checkpoint.state import load_state, save_state
from ms_gradaccum.gradients.mixed_precision import MixedPrecision
from ms_gradaccum.loops.model import Model
from ms_gradaccum.tools.self_test.training import ALONE, Cell, Found, SkippedCell, Training, labelled_rows, values_of

_SCALE = 1024.0  # With it, these networks' gradients do not overflow in float16.
_MAX_NORM = 0.25  # Below the norms of the gradients, which are at least 0.8.
_STATE = "state_of_one"


def all_cells() -> list[Cell]:
    """Return all cells. One job loads the state that an earlier process has saved."""
    rows = (
        ("clip, windows of 2 batches", "clipped"),
        ("mean over tokens", "tokens"),
        ("loss scale, an overflow", "overflow", ALONE, "float16"),
        ("MLP", "plain", ALONE, "bfloat16", "PYNATIVE"),
        ("state saved in mid-window, resumed", "resume", ALONE, "float32", "PYNATIVE"),
        ("data sink mode, on CPU a larger graph", "one_graph"),
        ("clip, windows of 2 batches", "clipped", "data parallel"),
        ("loss scale, an overflow on one process", "overflow", "data parallel", "float16", "PYNATIVE"),
        ("state of one process resumed", "resume_other", "HSDP level1", "float32", "PYNATIVE"),
        ("clip, windows of 2 batches", "clipped", "HSDP level2"),
        ("two layers", "semi_auto", "semi-auto, sharded operators, level3"),
    )
    return [Cell(name, f"{__name__}:{function}", *settings) for name, function, *settings in rows]


def plain(cell: Cell) -> Found:
    """Make two updates in the dtype."""
    return Training(cell, mixed_precision=_precision(cell)).feed(0, 1).compared()


def clipped(cell: Cell) -> Found:
    """Make two updates of two batches each, clipped."""
    return Training(cell, window=2, max_norm=_MAX_NORM).feed(0, 1, 2, 3).compared()


def tokens(cell: Cell) -> Found:
    """Train a mean over the valid labels, whose number differs between micro batches."""
    return Training(cell, TokenMeanLoss, nn.CrossEntropyLoss(), labelled_rows).feed(0, 1).compared()


def overflow(cell: Cell) -> Found:
    """Put an Inf in a row of the last process: nothing changes anywhere, the scale is halved, and training goes on."""
    training = Training(cell, mixed_precision=_precision(cell))
    before = values_of(training.network)
    inputs, labels = training.batch(9, cell.rows)
    inputs[-1, 0] = np.inf
    output = training.step(*cell.share((inputs, labels)))
    is_unchanged = all(map(np.array_equal, values_of(training.network), before))
    if not is_unchanged or bool(output.updated.asnumpy()):
        raise ValueError("a window with an Inf in its gradient made an update")
    output = training.step(*cell.share(training.batch(0, cell.rows)))
    training.note(output)
    if float(output.loss_scale.asnumpy()) != _SCALE / 2:
        raise ValueError(f"after an overflow the scale {_SCALE:g} is {output.loss_scale} where its half is right")
    return training.feed(1).compared()


def resume(cell: Cell) -> Found:
    """Save a state in mid-window, load it into a newly built training, and continue."""
    save_state(Training(cell, window=2).feed(0, 1, 2).step, Path(cell.folder, _STATE))
    return resume_other(cell)


def resume_other(cell: Cell) -> Found:
    """Continue from the state that one process has saved in mid-window."""
    if not Path(cell.folder, _STATE).exists():
        raise SkippedCell("one process has saved no state")
    training = Training(cell, window=2)
    load_state(training.step, Path(cell.folder, _STATE))
    return training.feed(3).compared()


def one_graph(cell: Cell) -> Found:
    """Run the window inside a larger graph: in data sink mode, or in @jit on CPU, which has no such mode."""
    training = Training(cell)
    batches = [training.batch(number, cell.rows) for number in (0, 1)]
    if not has_data_sink(cell.device):
        graph = ms.jit(training.step)
        for batch in batches:
            training.note(graph(*cell.share(batch)))
        return training.compared()
    arrays = tuple(map(np.concatenate, zip(*batches)))
    data = NumpySlicesDataset(arrays, shuffle=False).batch(cell.rows)
    Model(training.step.network, optimizer=training.step.optimizer).train(1, data, dataset_sink_mode=True)
    return training.compared()


def semi_auto(cell: Cell) -> Found:
    """Let MindSpore's compiler partition the step: rows over half of the processes, layers over two."""
    if cell.size % 2:
        raise SkippedCell(f"sharded operators take an even number of processes, not {cell.size}")
    dp = cell.size // 2

    def partitioned(network: nn.Cell) -> AutoParallel:
        around = AutoParallel(network)
        around.dataset_strategy(((dp, 1), (dp, 1)))
        around.hsdp(threshold=0, optimizer_level="level3")
        return around

    with graph_mode():
        training = Training(cell, _InlinedLoss, around=partitioned)
    # The columns of the first layer and the rows of the second are split over two devices.
    first, tanh, second = training.network
    first.matmul.shard(((dp, 1), (2, 1)))
    first.bias_add.shard(((dp, 2), (2,)))
    tanh.tanh.shard(((dp, 2),))
    second.matmul.shard(((dp, 2), (1, 2)))
    second.bias_add.shard(((dp, 1), (1,)))
    # The two processes of one row of the mesh have the same rows of the data.
    step = training.step
    for parameter in step.get_parameters():
        parameter.init_data()
    for number in (0, 1):
        batch = training.batch(number, cell.rows)
        training.note(step(*[Tensor(np.split(array, dp)[cell.rank // 2]) for array in batch]))
    names = [parameter.name for parameter in step.network.trainable_params()]
    return training.compared(lambda i, value: own_part(value, step.parameter_layout_dict.get(names[i]), cell.rank))


def own_part(value: np.ndarray[Any, Any], layout: Any, rank: int) -> np.ndarray[Any, Any]:
    """Return the part of a parameter that ``rank`` holds. The groups of its program must exist."""
    if layout is None:
        return value
    return np.ascontiguousarray(load_tensor_by_layout(Tensor(value), tuple(layout), rank).asnumpy())


class _InlinedLoss(nn.WithLossCell):
    """A loss cell that is compiled once for all micro batches, which level2 and level3 need."""

    @lazy_inline
    def __init__(self, network: nn.Cell) -> None:
        super().__init__(network, nn.MSELoss())


def _precision(cell: Cell) -> MixedPrecision:
    """Return the cell's dtype with a loss scale. Skip the cell if the device cannot multiply in this dtype."""
    dtype = getattr(ms, cell.dtype)
    try:
        multiply(dtype)
    except Exception as error:
        raise SkippedCell(f"this {cell.device} has no matrix product in {cell.dtype}") from error
    return MixedPrecision(dtype, "O1", init_scale=_SCALE)
