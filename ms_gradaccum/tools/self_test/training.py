"""A training beside that of MindSpore's own step on the whole batch: how far their numbers are from each other."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum.backend.compiled import execution_mode, op_by_op
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.gradients.mixed_precision import MixedPrecision
from ms_gradaccum.tools.self_test.networks import WORKLOADS, Arrays, ClippedMomentum, Workload
from ms_gradaccum.tools.self_test.tolerances import rounding_of, tolerance
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
MICRO_SIZE = 3
# Below the norms that the gradients of the MLP have: 0.8 and more.
MAX_NORM = 0.25
# In float16 the gradients of these networks bear it.
LOSS_SCALE = 1024.0
# Of a training here.
_MOST_UPDATES = 2

Windows = tuple[tuple[int, ...], ...]
Values = dict[str, np.ndarray[Any, Any]]


class SkippedCell(Exception):
    """Why something cannot be tried here."""


class Found(NamedTuple):
    """What a cell has found. It has passed if the difference is within the tolerance.

    Attributes:
        difference: The largest of several differences, each relative. None where there is nothing to compare.
        tolerance: How large it may be.
        what: What differs most.
        figures: What is only reported.
    """

    difference: float | None = None
    tolerance: float | None = None
    what: str = ""
    figures: dict[str, float] = {}


@dataclass(frozen=True)
class Place:
    """Where a cell runs.

    Attributes:
        rank: Number of this process.
        size: Number of processes of its job.
        workers: Number of processes of the jobs of several.
        device: The kind of device.
        folder: Where cells leave something for others.
    """

    rank: int
    size: int
    workers: int
    device: str
    folder: Path

    @property
    def rows(self) -> int:
        """Rows of a batch, which neither the micro batches nor the processes divide."""
        return 6 * self.workers + 1

    def share(self, arrays: Arrays) -> list[Tensor]:
        """Return the rows of this process."""
        return [Tensor(np.ascontiguousarray(np.array_split(array, self.size)[self.rank])) for array in arrays]


@dataclass
class Run:
    """The numbers of a training: its parameters at the start and at the end, and what was reported on each update."""

    start: Values
    weights: Values = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Training:
    """A network with the step that trains it in windows, and what it reports."""

    def __init__(self, place: Place, name: str, **settings: Any) -> None:
        self.place = place
        self.workload = WORKLOADS[name]
        self.network = self.workload.new()
        self.run = Run(values_of(self.network))
        # Before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), self.workload.rate, 0.9)
        loss_cell = GradAccumulation(self.workload.loss(self.network), MICRO_SIZE)
        self.step = TrainOneStepCell(loss_cell, optimizer, **settings).set_train()

    def feed(self, number: int) -> Any:
        """Train this process's rows of a batch. Return what the step says, and keep it if it made an update."""
        output = self.step(*self.place.share(self.workload.batch(number, self.place.rows)))
        if bool(output.updated.asnumpy()):
            self.note(output.loss, output.grad_norm)
        return output

    def note(self, loss: Tensor, norm: Tensor) -> None:
        """Keep what was reported on an update."""
        self.run.losses.append(float(loss.asnumpy()))
        self.run.norms.append(float(norm.asnumpy()))
        self.run.weights = values_of(self.network)


def compared(
    run: Run,
    place: Place,
    name: str,
    dtype: str,
    windows: Windows,
    clip: bool = False,
    updates_before: int = 0,
    reported: bool = True,
) -> Found:
    """Return how far a training is from that of the whole batch.

    ``updates_before`` is how many updates another training has made before. Losses and norms are only looked at where
    they were ``reported``.
    """
    workload = WORKLOADS[name]
    whole = whole_batch(name, windows, place.rows, clip)
    first = updates_before if reported else len(windows)
    whole = replace(whole, losses=whole.losses[first:], norms=whole.norms[first:])
    rows = place.rows * max(map(len, windows))
    allowed = tolerance(place.device, DTYPES[dtype], rows * workload.width, workload.roundings)
    return difference_of(run, whole, allowed)


def difference_of(run: Run, whole: Run, allowed: float) -> Found:
    """Return the largest relative difference of two runs that began alike."""
    moved = max(float(np.abs(whole.weights[name] - whole.start[name]).max()) for name in whole.weights)
    apart = max(float(np.abs(run.weights[name] - whole.weights[name]).max()) for name in whole.weights)
    largest = max(float(np.abs(value).max()) for value in whole.weights.values())
    allowed += rounding_of(largest, moved, _MOST_UPDATES)
    found = {
        "parameters": apart / moved if moved else math.inf,
        "losses": _apart(run.losses, whole.losses),
        "norms": _apart(run.norms, whole.norms),
    }
    # A NaN is the largest of all.
    what = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    return Found(found[what], allowed, what)


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of numbers."""
    if len(ours) != len(theirs):
        return math.inf
    differences = [abs(our - their) / abs(their) for our, their in zip(ours, theirs)]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


@functools.cache
def whole_batch(name: str, windows: Windows, rows: int, clip: bool = False) -> Run:
    """Train with MindSpore's own step in this process alone, in float32: all rows of a window are one batch.

    It runs op by op, for which nothing is compiled.
    """
    workload = WORKLOADS[name]
    network = workload.new()
    batches = [[workload.batch(number, rows) for number in numbers] for numbers in windows]
    whole = [[np.concatenate(arrays) for arrays in zip(*each)] for each in batches]
    run = Run(values_of(network))
    run_stock_step(run, workload.mean_loss(network), _optimizer(workload, network, clip), whole)
    run.weights = values_of(network)
    return run


def run_stock_step(run: Run, loss_cell: nn.Cell, optimizer: nn.Cell, batches: Iterable[Sequence[Any]]) -> None:
    """Train with MindSpore's own step, op by op, and note the loss and the norm of each batch."""
    step = nn.TrainOneStepCell(loss_cell, optimizer, return_grad=True).set_train()
    with op_by_op():
        for batch in batches:
            loss, gradients = step(*map(Tensor, batch))
            run.losses.append(float(loss.asnumpy()))
            run.norms.append(math.hypot(*(_norm_of(gradient.asnumpy()) for gradient in gradients.values())))


def _optimizer(workload: Workload, network: nn.Cell, clip: bool) -> nn.Cell:
    parameters = network.trainable_params()
    if clip:
        return ClippedMomentum(parameters, workload.rate, MAX_NORM)
    return nn.Momentum(parameters, workload.rate, 0.9)


def train(
    place: Place, name: str, mode: str, dtype: str, windows: Windows, clip: bool = False, **settings: Any
) -> Found:
    """Train in windows and compare with the whole batch."""
    with execution_mode(MODES[mode]):
        training = Training(
            place,
            name,
            accumulation_steps=len(windows[0]),
            clip=ClipByGlobalNorm(MAX_NORM) if clip else None,
            mixed_precision=None if dtype == "float32" else scaled(dtype),
            **settings,
        )
        for number in (number for numbers in windows for number in numbers):
            training.feed(number)
    return compared(training.run, place, name, dtype, windows, clip)


def scaled(dtype: str) -> MixedPrecision:
    """Return what has a loss scale and computes in 16 bits, if it is these."""
    if dtype == "float32":
        return MixedPrecision(level="O0", init_scale=LOSS_SCALE)
    return MixedPrecision(DTYPES[dtype], "O1", init_scale=LOSS_SCALE)


def _norm_of(array: np.ndarray[Any, Any]) -> float:
    """Return the norm of an array, in float64."""
    return float(np.linalg.norm(array.astype(np.float64).reshape(-1)))


def values_of(network: nn.Cell) -> Values:
    """Return the trainable parameters of a network in their order, whatever the step has made of their names."""
    return {str(i): parameter.asnumpy().copy() for i, parameter in enumerate(network.trainable_params())}
