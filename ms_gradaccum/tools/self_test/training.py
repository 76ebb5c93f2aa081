"""A training in windows, compared with MindSpore's own step. docs/self_test.md derives the tolerance."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.device import product_dtype
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.kinds import HSDP, DataParallel, ParallelChoice
from ms_gradaccum.tools.whole_batch import ClippedOptimizer, Values, compare, train_whole, values_of, worst
from ms_gradaccum.training.grad_accumulation import GradAccumulation

ALONE = "one process"
_KINDS: dict[str, ParallelChoice] = {
    "data parallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}
_FLOAT32 = TOLERANCES[ms.float32].rounding
_MICRO_SIZE, _RATE, _MOMENTUM = 3, 0.1, 0.9
_DEVIATIONS = 4.0
_INPUTS, _HIDDEN, _OUTPUTS = 12, 32, 4
# The number of consecutive roundings in the forward and the backward pass of the MLP.
_ROUNDINGS = 10

Arrays = tuple[np.ndarray[Any, Any], ...]


class SkippedCell(Exception):
    """Raised if a cell cannot run here."""


class Found(NamedTuple):
    """The largest of several relative differences, its tolerance, and the name of the compared value."""

    difference: float
    tolerance: float
    what: str


@dataclass(frozen=True)
class Cell:
    """One test, with its process in a job. ``function``, as ``module:function``, takes the cell and returns a Found."""

    name: str
    function: str
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
    def partitioned(self) -> bool:
        """True if MindSpore's compiler partitions the step."""
        return self.parallel.startswith("semi-auto")

    @property
    def rows(self) -> int:
        """Rows of a batch, not divisible by micro batches or processes, except in semi-auto-parallel."""
        return 6 * self.workers + (not self.partitioned)

    def share(self, arrays: Arrays) -> list[Tensor]:
        return [Tensor(np.ascontiguousarray(np.array_split(array, self.size)[self.rank])) for array in arrays]


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
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(size=(rows, _OUTPUTS)).astype(np.float32)


def labelled_rows(number: int, rows: int) -> Arrays:
    """Return rows with labels. Most labels of the first half are ignored."""
    inputs, outputs = rows_of(number, rows)
    labels = outputs.argmax(-1).astype(np.int32)
    labels[1 : rows // 2] = -100
    return inputs, labels


class Training:
    """A network with the step that trains it in windows, and the losses and norms of its updates."""

    def __init__(
        self,
        cell: Cell,
        loss: Callable[[nn.Cell], nn.Cell] = lambda network: nn.WithLossCell(network, nn.MSELoss()),
        whole_loss: nn.Cell | None = None,
        batch: Callable[[int, int], Arrays] = rows_of,
        around: Callable[[nn.Cell], nn.Cell] = lambda cell: cell,
        **settings: Any,
    ) -> None:
        self.cell, self.whole_loss, self.batch = cell, whole_loss or nn.MSELoss(), batch
        self.network, self.settings = perceptron(), settings
        self.reports: list[tuple[float, float]] = []
        # Built before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), _RATE, _MOMENTUM)
        network = around(GradAccumulation(loss(self.network), _MICRO_SIZE))
        parallel = _KINDS.get(cell.parallel, "auto")
        self.step = TrainOneStepCell(network, optimizer, parallel=parallel, **settings).set_train()

    def feed(self, *numbers: int) -> "Training":
        """Train this process's rows of batches, and record the reports of the updates."""
        for number in numbers:
            output = self.step(*self.cell.share(self.batch(number, self.cell.rows)))
            if bool(output.updated.asnumpy()):
                self.note(output)
        return self

    def note(self, output: Any) -> None:
        """Record the loss and the norm of an update, from a StepOutput or the plain tuple of a graph."""
        norm = output.grad_norm if hasattr(output, "grad_norm") else output[4]
        self.reports.append((float(output[0].asnumpy()), float(norm.asnumpy())))

    def compared(
        self, values: Values | None = None, part: Callable[[str, Any], Any] = lambda name, value: value
    ) -> Found:
        """Compare two updates with MindSpore's own step, which gets each window as one batch."""
        batches, clip = self.settings.get("accumulation_steps", 1), self.settings.get("clip")
        network, rows = perceptron(), self.cell.rows
        optimizer = ClippedOptimizer(nn.Momentum(network.trainable_params(), _RATE, _MOMENTUM), clip)
        data = [self.batch(number, rows) for number in range(2 * batches)]
        joined = [map(np.concatenate, zip(*window)) for window in (data[:batches], data[batches:])]
        start, loss_cell = values_of(network), nn.WithLossCell(network, self.whole_loss).set_train()
        with op_by_op():
            reports = train_whole(loss_cell, optimizer, [tuple(map(Tensor, arrays)) for arrays in joined])
        start, whole = ({key: part(key, value) for key, value in each.items()} for each in (start, values_of(network)))
        apart = compare(values or values_of(self.network), whole, start)
        allowed = tolerance(self.cell.device, getattr(ms, self.cell.dtype), rows * batches * _HIDDEN, _ROUNDINGS)
        # The parameters are rounded in each of two updates.
        largest = max(float(np.abs(value).max()) for value in whole.values())
        allowed += _DEVIATIONS * math.sqrt(2) * _FLOAT32 * largest / apart.moved
        found = {"parameters": apart.difference / apart.moved}
        if self.reports:
            theirs = np.array(reports[-len(self.reports) :])
            # NumPy's maximum of numbers with a NaN is NaN.
            losses, norms = (np.abs(np.array(self.reports) - theirs) / theirs).max(0)
            found |= {"losses": float(losses), "norms": float(norms)}
        return Found(found[worst(found)], allowed, worst(found))


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains."""
    of_layers = max(TOLERANCES[each].rounding for each in (dtype, product_dtype(device)))
    return _DEVIATIONS * (math.sqrt(terms) * _FLOAT32 + math.sqrt(roundings) * of_layers)
