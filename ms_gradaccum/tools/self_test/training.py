r"""A training in windows, its comparison with MindSpore's own step on the whole batch, and the tolerance.

Both add up the same products. A sum of `n` terms in float32 is off by about :math:`\sqrt{n} u`, :math:`u = 2^{-24}`,
and `d` roundings to the dtype of the layers by :math:`\sqrt{d} u'`; matrix units of GPUs and NPUs round float32 factors
to 11 bits. The tolerance is :math:`4 (\sqrt{n} u + \sqrt{d} u')`, relative to losses, norms and the distance that the
parameters have moved. Wrong windows are off by a factor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.tools.whole_batch import ClippedOptimizer, Values, compare, train_whole
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
_FLOAT32 = 2.0**-24
_MICRO_SIZE, _RATE, _MOMENTUM = 3, 0.1, 0.9
_DEVIATIONS = 4.0
_ROUNDING = {ms.float32: _FLOAT32, ms.float16: 2.0**-11, ms.bfloat16: 2.0**-8}
_MATRIX_UNIT = {"CPU": _FLOAT32, "GPU": 2.0**-11, "Ascend": 2.0**-11}
_INPUTS, _HIDDEN, _OUTPUTS = 12, 32, 4
# The number of roundings in a row, in the forward and the backward pass of the MLP.
_ROUNDINGS = 10
_IGNORED = -100

Arrays = tuple[np.ndarray[Any, Any], ...]


class SkippedCell(Exception):
    """Raised if a cell cannot run here."""


class Found(NamedTuple):
    """The largest of several relative differences, its tolerance, and the name of the compared value."""

    difference: float
    tolerance: float
    what: str


@dataclass(frozen=True)
class Place:
    """The surroundings of a test cell: its process, its job, and a folder to exchange files with other cells."""

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


class Workload(NamedTuple):
    """The loss of the MLP as a window and as MindSpore's step takes it, and its data."""

    loss: Callable[[nn.Cell], nn.Cell]
    mean_loss: Callable[[nn.Cell], nn.Cell]
    batch: Callable[[int, int], Arrays]


def perceptron() -> nn.SequentialCell:
    """Return an MLP, with the same parameters each time."""
    network = nn.SequentialCell(nn.Dense(_INPUTS, _HIDDEN), nn.Tanh(), nn.Dense(_HIDDEN, _OUTPUTS))
    for number, parameter in enumerate(network.trainable_params()):
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        values = spread * np.random.default_rng(number).normal(size=parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))
    return network


class _MeanOverTokens(nn.Cell):
    """Cross-entropy, the mean over all labels of the batch that are not ignored."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(logits, labels, ignore_index=_IGNORED)


def _rows(number: int, rows: int) -> Arrays:
    rng = np.random.default_rng(100 + number)
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(size=(rows, _OUTPUTS)).astype(np.float32)


def _labelled(number: int, rows: int) -> Arrays:
    """Return rows with labels, of which the first half of the rows has few."""
    inputs, outputs = _rows(number, rows)
    labels = outputs.argmax(-1).astype(np.int32)
    labels[1 : rows // 2] = _IGNORED
    return inputs, labels


def _squares(network: nn.Cell) -> nn.Cell:
    return nn.WithLossCell(network, nn.MSELoss())


ROWS = Workload(_squares, _squares, _rows)
TOKENS = Workload(TokenMeanLoss, lambda network: nn.WithLossCell(network, _MeanOverTokens()), _labelled)


class Training:
    """A network with the step that trains it in windows, and the losses and norms of its updates.

    Args:
        place: The surroundings.
        workload: Its loss and its data.
        network: The MLP, if it is not a new one.
        around: A function that wraps the GradAccumulation.
        settings: Further arguments of the TrainOneStepCell.
    """

    def __init__(
        self,
        place: Place,
        workload: Workload = ROWS,
        network: nn.Cell | None = None,
        around: Callable[[nn.Cell], nn.Cell] = lambda cell: cell,
        **settings: Any,
    ) -> None:
        self.place, self.workload, self.network, self.settings = place, workload, network or perceptron(), settings
        self.reports: list[tuple[float, float]] = []
        # It is built before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), _RATE, _MOMENTUM)
        cell = around(GradAccumulation(workload.loss(self.network), _MICRO_SIZE))
        self.step = TrainOneStepCell(cell, optimizer, **settings).set_train()

    def feed(self, *numbers: int) -> "Training":
        """Train this process's rows of batches, and note the reports of the updates."""
        for number in numbers:
            output = self.step(*self.place.share(self.workload.batch(number, self.place.rows)))
            if bool(output.updated.asnumpy()):
                self.note(output)
        return self

    def note(self, output: Any) -> None:
        """Note the loss and the norm of an update, from a StepOutput or the plain tuple of a graph."""
        loss, norm = (output.loss, output.grad_norm) if hasattr(output, "loss") else (output[0], output[4])
        self.reports.append((float(loss.asnumpy()), float(norm.asnumpy())))

    def compared(
        self, values: Values | None = None, part: Callable[[str, Any], Any] = lambda name, value: value
    ) -> Found:
        """Return the difference after two updates from MindSpore's own step, for which each window is one batch.

        Losses and norms are compared of the last updates, as many as were noted. ``values`` are the parameters after
        the training, by their indices, if the network does not have them; ``part`` is this process's part of one.
        """
        batches, clip = self.settings.get("accumulation_steps", 1), self.settings.get("clip")
        network, rows = perceptron(), self.place.rows
        optimizer: nn.Cell = nn.Momentum(network.trainable_params(), _RATE, _MOMENTUM)
        optimizer = ClippedOptimizer(optimizer, max_norm=clip.max_norm) if clip else optimizer
        data = [self.workload.batch(number, rows) for number in range(2 * batches)]
        joined = [map(np.concatenate, zip(*window)) for window in (data[:batches], data[batches:])]
        loss_cell = self.workload.mean_loss(network).set_train()
        start = {name: part(name, value) for name, value in values_of(network).items()}
        with op_by_op():
            whole = train_whole(loss_cell, optimizer, [tuple(map(Tensor, arrays)) for arrays in joined])
        theirs = {name: part(name, value) for name, value in values_of(network).items()}
        apart = compare(values or values_of(self.network), theirs, start)
        precision = self.settings.get("mixed_precision")
        dtype = precision.dtype if precision else ms.float32
        allowed = tolerance(self.place.device, dtype, rows * batches * _HIDDEN, _ROUNDINGS)
        # The parameters are rounded in each of two updates.
        largest = max(float(np.abs(value).max()) for value in theirs.values())
        allowed += _DEVIATIONS * math.sqrt(2) * _FLOAT32 * largest / apart.moved
        ours, whole_reports = np.array(self.reports), np.array(whole[-len(self.reports) :])
        # The largest of numbers with a NaN is a NaN.
        losses, norms = (np.abs(ours - whole_reports) / whole_reports).max(0)
        found = {"parameters": apart.difference / apart.moved, "losses": float(losses), "norms": float(norms)}
        what = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
        return Found(found[what], allowed, what)


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains."""
    of_layers = max(_ROUNDING[dtype], _MATRIX_UNIT[device])
    return _DEVIATIONS * (math.sqrt(terms) * _FLOAT32 + math.sqrt(roundings) * of_layers)


def values_of(network: nn.Cell) -> Values:
    """Return the trainable parameters of a network by their indices, since a step may rename them."""
    return {str(i): parameter.asnumpy().copy() for i, parameter in enumerate(network.trainable_params())}
