"""What is tried in any number of processes, each for itself or together, without the compiler's partitioning."""

from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.backend.device import multiply
from ms_gradaccum.checkpoint.load import load_state
from ms_gradaccum.checkpoint.save import save_state
from ms_gradaccum.loops.model import Model
from ms_gradaccum.parallel.kinds import HSDP, DataParallel
from ms_gradaccum.tools.self_test.networks import WORKLOADS
from ms_gradaccum.tools.self_test.tolerances import TOY_TOLERANCE, TOY_WEIGHT
from ms_gradaccum.tools.self_test.training import (
    DTYPES,
    LOSS_SCALE,
    MODES,
    Found,
    Place,
    SkippedCell,
    Training,
    Windows,
    compared,
    scaled,
    train,
    values_of,
)
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

_TOY_ROWS = 8
_SINGLE: Windows = ((0,), (1,))
_PAIRS: Windows = ((0, 1), (2, 3))
# It is saved after so many batches, of which the last one is in the middle of a window.
_BEFORE = 3
_KINDS: dict[str, Any] = {
    "one process": "auto",
    "data parallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}


def toy(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """One weight that starts at 0 and is 2.04 after one update: x = 1..8, y = 2x, mean squared error, SGD 0.02."""
    if place.size > _TOY_ROWS:
        raise SkippedCell(f"it has {_TOY_ROWS} rows, and each of {place.size} processes needs one")
    rows = np.arange(1, _TOY_ROWS + 1, dtype=np.float32).reshape(-1, 1)
    network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    with execution_mode(MODES[mode]):
        loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
        step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.02), parallel=_KINDS[parallel])
        loss = float(step(*place.share((rows, 2 * rows))).loss.asnumpy())
    reached = network.weight.asnumpy().item()
    # The mean of (2x)**2 is 102.
    differences = {"weight": abs(reached - TOY_WEIGHT) / TOY_WEIGHT, "loss": abs(loss - 102.0) / 102.0}
    what = max(differences, key=lambda name: differences[name])
    return Found(differences[what], TOY_TOLERANCE, what)


def whole_batch(
    place: Place, network: str, mode: str, parallel: str, dtype: str, pairs: bool = False, clip: bool = False
) -> Found:
    """Two updates of Momentum, and MindSpore's own step on the whole batch."""
    _skip_without_products(place, dtype)
    return train(place, network, mode, dtype, _PAIRS if pairs else _SINGLE, clip, parallel=_KINDS[parallel])


def overflow(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """An Inf in a row of the last process: no parameter changes anywhere, the scale is halved, and training goes on."""
    _skip_without_products(place, dtype)
    with execution_mode(MODES[mode]):
        training = Training(place, "MLP", mixed_precision=scaled(dtype), parallel=_KINDS[parallel])
        before = values_of(training.network)
        inputs, labels = WORKLOADS["MLP"].batch(9, place.rows)
        inputs[-1, 0] = np.inf
        output = training.step(*place.share((inputs, labels)))
        changed = any((value != before[name]).any() for name, value in values_of(training.network).items())
        if changed or bool(output.updated.asnumpy()):
            raise ValueError("a window with an Inf in its gradient made an update")
        output = training.feed(0)
        if float(output.loss_scale.asnumpy()) != LOSS_SCALE / 2:
            raise ValueError(
                f"after an overflow the scale {LOSS_SCALE:g} is {output.loss_scale} where its half is right"
            )
        training.feed(1)
    return compared(training.run, place, "MLP", dtype, _SINGLE)


def resume(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """Save a state in mid-window, load it into a training that is built anew, and go on."""
    with execution_mode(MODES[mode]):
        first = _resumable(place, parallel)
        for number in range(_BEFORE):
            first.feed(number)
        save_state(first.step, place.folder / _state_of(place.size))
        return _resumed(place, parallel, place.size)


def resume_other(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """Go on from the state that another number of processes has saved in mid-window."""
    other = place.workers if place.size == 1 else 1
    if not (place.folder / _state_of(other)).exists():
        raise SkippedCell(f"{other} processes have saved no state" if other > 1 else "one process has saved no state")
    with execution_mode(MODES[mode]):
        return _resumed(place, parallel, other)


def as_one_graph(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """The whole window inside a larger graph, which is what data sink mode compiles."""
    with execution_mode(MODES[mode]):
        training = Training(place, "MLP")
        graph = _InLargerGraph(training.step).set_train()
        for number in (0, 1):
            output = graph(*place.share(training.workload.batch(number, place.rows)))
            # A graph returns a plain tuple.
            training.note(*((output.loss, output.grad_norm) if hasattr(output, "loss") else (output[0], output[4])))
    return compared(training.run, place, "MLP", dtype, _SINGLE)


def data_sink(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """Model.train with the data on the device."""
    if place.device == "CPU":
        raise SkippedCell("CPU has no data sink mode: Model feeds batches one by one")
    batches = [WORKLOADS["MLP"].batch(number, place.rows) for number in (0, 1)]
    dataset = NumpySlicesDataset(tuple(map(np.concatenate, zip(*batches))), shuffle=False).batch(place.rows)
    with execution_mode(MODES[mode]):
        training = Training(place, "MLP")
        Model(training.step.network, optimizer=training.step.optimizer).train(1, dataset, dataset_sink_mode=True)
        training.run.weights = values_of(training.network)
    return compared(training.run, place, "MLP", dtype, _SINGLE, reported=False)


class _InLargerGraph(nn.Cell):
    """A cell of the user's that calls the step."""

    def __init__(self, step: TrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x: Tensor, y: Tensor) -> Any:
        return self.step(x, y)


def _skip_without_products(place: Place, dtype: str) -> None:
    """Skip a cell in a dtype that the device does not multiply in."""
    if dtype == "float32":
        return
    try:
        multiply(DTYPES[dtype])
    except Exception as error:
        raise SkippedCell(f"this {place.device} has no matrix product in {dtype}") from error


def _resumable(place: Place, parallel: str) -> Training:
    return Training(place, "MLP", accumulation_steps=2, parallel=_KINDS[parallel])


def _resumed(place: Place, parallel: str, saved_by: int) -> Found:
    """Load a state and train the last batch."""
    training = _resumable(place, parallel)
    load_state(training.step, place.folder / _state_of(saved_by))
    training.feed(_BEFORE)
    return compared(training.run, place, "MLP", "float32", _PAIRS, updates_before=1)


def _state_of(size: int) -> str:
    return f"state_of_{size}"
