"""A training in windows, compared with MindSpore's own step. docs/self_test.md derives the tolerance."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.device import product_dtype
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.gradients.mixed_precision import MixedPrecision
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.kinds import HSDP, DataParallel, ParallelChoice
from ms_gradaccum.tools.whole_batch import Run, WholeBatch, relative_differences, total_norm
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.step_output import StepOutput

ALONE = "one process"
_KINDS: dict[str, ParallelChoice] = {
    "data parallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}
_FLOAT32 = TOLERANCES[ms.float32].rounding
_MICRO_SIZE = 3
_RATE = 0.1
_MOMENTUM = 0.9
_DEVIATIONS = 4.0
_INPUTS = 12
_HIDDEN = 32
_OUTPUTS = 4
# The number of consecutive roundings in the forward and the backward pass of the MLP.
_ROUNDINGS = 10

Arrays = tuple[Array, ...]


class SkippedCell(Exception):
    """Raised if a cell cannot run here."""


class Outcome(NamedTuple):
    """The outcome of a cell, in one of its processes or in all, and a line about it."""

    outcome: str
    said: str
    difference: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Cell:
    """One test, with its process in a job. The ``function`` takes the cell and returns an Outcome."""

    name: str
    function: "Callable[[Cell], Outcome]"
    parallel: str = ALONE
    dtype: str = "float32"
    mode: str = "GRAPH"
    _: KW_ONLY
    rank: int = 0
    size: int = 1
    workers: int = 2
    device: str = "CPU"
    folder: str = ""  # The folder for files that cells exchange.

    @property
    def title(self) -> str:
        """The start of the cell's line in the table."""
        kind = "" if self.parallel == ALONE else f"{self.parallel}: "
        return f"{kind}{self.name}, {self.dtype}, {self.mode}"

    @property
    def rows(self) -> int:
        """Rows of a batch, not divisible by micro batches or processes."""
        return 6 * self.workers + 1

    def share(self, arrays: Arrays) -> list[Tensor]:
        return [Tensor(np.array_split(array, self.size)[self.rank]) for array in arrays]


def perceptron() -> nn.SequentialCell:
    """Return an MLP with the same parameters in each call."""
    network = nn.SequentialCell(nn.Dense(_INPUTS, _HIDDEN), nn.Tanh(), nn.Dense(_HIDDEN, _OUTPUTS))
    for number, parameter in enumerate(network.trainable_params()):
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        values = spread * np.random.default_rng(number).normal(size=parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))
    return network


def rows_of(number: int, rows: int) -> Arrays:
    """Return the rows of a batch, the same in each call."""
    rng = np.random.default_rng(100 + number)
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(
        size=(rows, _OUTPUTS)
    ).astype(np.float32)


def labelled_rows(number: int, rows: int) -> Arrays:
    """Return rows with labels. Most labels of the first half are ignored."""
    inputs, outputs = rows_of(number, rows)
    labels = outputs.argmax(-1).astype(np.int32)
    labels[1 : rows // 2] = -100
    return inputs, labels


def values_of(network: nn.Cell) -> list[Array]:
    """Return the trainable parameters of a network in their order, since a step may rename them."""
    return [parameter.asnumpy().copy() for parameter in network.trainable_params()]


class Training:
    """A network with the step that trains it in windows, and the outputs of its updates, if known."""

    def __init__(
        self,
        cell: Cell,
        loss: Callable[[nn.Cell], nn.Cell] = lambda network: nn.WithLossCell(network, nn.MSELoss()),
        whole_loss: type[nn.Cell] = nn.MSELoss,
        batch: Callable[[int, int], Arrays] = rows_of,
        window: int = 1,
        max_norm: float | None = None,
        mixed_precision: MixedPrecision | None = None,
    ) -> None:
        self.cell = cell
        self.whole_loss = whole_loss()
        self.batch = batch
        self.window = window
        self.max_norm = max_norm
        self.network = perceptron()
        self.outputs: list[StepOutput] = []
        # Built before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), _RATE, _MOMENTUM)
        self.step = TrainOneStepCell(
            GradAccumulation(loss(self.network), _MICRO_SIZE),
            optimizer,
            accumulation_steps=window,
            clip=None if max_norm is None else ClipByGlobalNorm(max_norm),
            mixed_precision=mixed_precision,
            parallel=_KINDS.get(cell.parallel, "auto"),
        ).set_train()

    def feed(self, *numbers: int) -> "Training":
        """Train this process's rows of batches, and keep the outputs of the updates."""
        for number in numbers:
            output = self.step(*self.cell.share(self.batch(number, self.cell.rows)))
            if output.is_updated:
                self.outputs.append(output)
        return self

    def compared(self) -> Outcome:
        """Compare two updates with MindSpore's own step, which gets each window as one batch."""
        network = perceptron()
        start = values_of(network)
        parameters = network.trainable_params()
        optimizer = nn.Momentum(parameters, _RATE, _MOMENTUM)
        loss_cell = nn.WithLossCell(network, self.whole_loss).set_train()
        with op_by_op():
            step = WholeBatch("test", loss_cell, parameters, optimizer, self.max_norm)
            step.train(*self._joined(0))
            loss, grads = step.train(*self._joined(self.window))
        values = values_of(network)
        whole = Run([loss], list(map(np.subtract, values, start)), norms=[total_norm(grads)])
        changes = list(map(np.subtract, values_of(self.network), start))
        last = self.outputs[-1:]
        window = Run(
            list(map(float, last)), changes, norms=[float(output.grad_norm) for output in last]
        )
        found = relative_differences(window, whole)
        worst = max(found, key=lambda name: found[name])
        # The parameters are rounded in each of two updates.
        largest = max(float(np.abs(value).max()) for value in values)
        moved = max(float(np.abs(change).max()) for change in whole.changes)
        terms = self.cell.rows * self.window * _HIDDEN
        allowed = tolerance(self.cell.device, getattr(ms, self.cell.dtype), terms, _ROUNDINGS)
        allowed += _DEVIATIONS * math.sqrt(2) * _FLOAT32 * largest / moved
        return judge(found[worst], allowed, worst)

    def _joined(self, first: int) -> list[Tensor]:
        """Return the batches of a window as one."""
        batches = [
            self.batch(number, self.cell.rows) for number in range(first, first + self.window)
        ]
        return [Tensor(np.concatenate(arrays)) for arrays in zip(*batches)]


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains."""
    of_layers = max(TOLERANCES[dtype].rounding, TOLERANCES[product_dtype(device)].rounding)
    return _DEVIATIONS * (math.sqrt(terms) * _FLOAT32 + math.sqrt(roundings) * of_layers)


def judge(difference: float, allowed: float, what: str) -> Outcome:
    """Return the outcome of a comparison, from the largest relative difference, its tolerance, and what differs."""
    # JSON has no Inf and no NaN.
    numbers = [number if math.isfinite(number) else None for number in (difference, allowed)]
    # Not '>' for "failed", because a NaN must fail.
    if difference <= allowed:
        return Outcome("passed", f"{difference:.1e} of {allowed:.1e} ({what})", *numbers)
    said = f"{what}: a difference of {difference:.1e}, and {allowed:.1e} is rounding"
    return Outcome("failed", said, *numbers)
