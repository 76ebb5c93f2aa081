"""The test cells. Each trains in windows and compares with MindSpore's own step on the whole batch."""

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum.backend.device import has_data_sink
from ms_gradaccum.backend.probes import multiply
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.checkpoint.state import load_state, save_state
from ms_gradaccum.gradients.mixed_precision import MixedPrecision
from ms_gradaccum.loops.model import Model
from ms_gradaccum.tools.self_test.training import (
    Cell,
    Outcome,
    SkippedCell,
    Training,
    labelled_rows,
    values_of,
)
from ms_gradaccum.training.step_output import StepOutput

_SCALE = 1024.0  # With it, these networks' gradients do not overflow in float16.
_MAX_NORM = 0.25  # Below the norms of the gradients, which are at least 0.8.
_STATE = "state_of_one"


def plain(cell: Cell) -> Outcome:
    """Make two updates in the dtype."""
    return Training(cell, mixed_precision=_precision(cell)).feed(0, 1).compared()


def clipped(cell: Cell) -> Outcome:
    """Make two updates of two batches each, clipped."""
    return Training(cell, window=2, max_norm=_MAX_NORM).feed(0, 1, 2, 3).compared()


def tokens(cell: Cell) -> Outcome:
    """Train a mean over the valid labels, whose number differs between micro batches."""
    return Training(cell, TokenMeanLoss, nn.CrossEntropyLoss, labelled_rows).feed(0, 1).compared()


def overflow(cell: Cell) -> Outcome:
    """Put an Inf in a row of the last process: nothing changes anywhere, the scale is halved, and training goes on."""
    training = Training(cell, mixed_precision=_precision(cell))
    before = values_of(training.network)
    inputs, labels = training.batch(9, cell.rows)
    inputs[-1, 0] = np.inf
    output = training.step(*cell.share((inputs, labels)))
    is_unchanged = all(map(np.array_equal, values_of(training.network), before))
    if not is_unchanged or output.is_updated:
        raise ValueError("a window with an Inf in its gradient made an update")
    for output in training.feed(0).outputs:
        if float(output.loss_scale) != _SCALE / 2:
            raise ValueError(
                f"after an overflow the scale {_SCALE:g} is {output.loss_scale} where its half is "
                f"right"
            )
    return training.feed(1).compared()


def resume(cell: Cell) -> Outcome:
    """Save a state in mid-window, load it into a newly built training, and continue."""
    save_state(Training(cell, window=2).feed(0, 1, 2).step, Path(cell.folder, _STATE))
    return resume_other(cell)


def resume_other(cell: Cell) -> Outcome:
    """Continue from the state that one process has saved in mid-window."""
    if not Path(cell.folder, _STATE).exists():
        raise SkippedCell("one process has saved no state")
    training = Training(cell, window=2)
    load_state(training.step, Path(cell.folder, _STATE))
    return training.feed(3).compared()


def one_graph(cell: Cell) -> Outcome:
    """Run the window inside a larger graph: in data sink mode, or in @jit on CPU, which has no such mode."""
    training = Training(cell)
    batches = [training.batch(number, cell.rows) for number in (0, 1)]
    if not has_data_sink():
        graph = ms.jit(training.step)
        for batch in batches:
            training.outputs.append(StepOutput(*graph(*cell.share(batch))))
        return training.compared()
    arrays = tuple(map(np.concatenate, zip(*batches)))
    data = NumpySlicesDataset(arrays, shuffle=False).batch(cell.rows)
    Model(training.step.network, optimizer=training.step.optimizer).train(
        1, data, dataset_sink_mode=True
    )
    return training.compared()


def _precision(cell: Cell) -> MixedPrecision:
    """Return the cell's dtype with a loss scale. Skip the cell if the device cannot multiply in this dtype."""
    dtype = getattr(ms, cell.dtype)
    try:
        multiply(dtype)
    except Exception as error:
        raise SkippedCell(f"this {cell.device} has no matrix product in {cell.dtype}") from error
    return MixedPrecision(dtype, "O1", init_scale=_SCALE)


# One job loads the state that an earlier process has saved.
CELLS = (
    Cell("clip, windows of 2 batches", clipped),
    Cell("mean over tokens", tokens),
    Cell("loss scale, an overflow", overflow, dtype="float16"),
    Cell("MLP", plain, dtype="bfloat16", mode="PYNATIVE"),
    Cell("state saved in mid-window, resumed", resume, mode="PYNATIVE"),
    Cell("data sink mode, on CPU a larger graph", one_graph),
    Cell("clip, windows of 2 batches", clipped, "data parallel"),
    Cell(
        "loss scale, an overflow on one process", overflow, "data parallel", "float16", "PYNATIVE"
    ),
    Cell("state of one process resumed", resume_other, "HSDP level1", mode="PYNATIVE"),
    Cell("clip, windows of 2 batches", clipped, "HSDP level2"),
)
