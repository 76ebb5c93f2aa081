r"""A training in windows, its comparison with MindSpore's own step on the whole batch, and the tolerance.

Both add up the same products. A sum of `n` terms in float32 is off by about :math:`\sqrt{n} u`, :math:`u = 2^{-24}`.
On the way to a gradient there are `d` roundings to the dtype of the layers, :math:`\sqrt{d} u'` with :math:`u'` of
:math:`2^{-24}`, :math:`2^{-11}` or :math:`2^{-8}`; matrix units of GPUs and NPUs round the factors of float32 products
to 11 bits. The tolerance is :math:`4 (\sqrt{n} u + \sqrt{d} u')`, relative to losses, to norms and to the distance
that the parameters have moved. Wrong windows are off by a factor.
"""

import math
from collections.abc import Callable, Sequence
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
FLOAT32 = 2.0**-24
# It is below the norms of the MLP's gradients, 0.8 and more.
MAX_NORM = 0.25
_MICRO_SIZE, _RATE, _MOMENTUM = 3, 0.1, 0.9
_DEVIATIONS = 4.0
_ROUNDING = {ms.float32: FLOAT32, ms.float16: 2.0**-11, ms.bfloat16: 2.0**-8}
_MATRIX_UNIT = {"CPU": FLOAT32, "GPU": 2.0**-11, "Ascend": 2.0**-11}
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
        self.place, self.workload, self.network = place, workload, network or perceptron()
        self.reports: list[tuple[float, float]] = []
        # It is built before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), _RATE, _MOMENTUM)
        cell = around(GradAccumulation(workload.loss(self.network), _MICRO_SIZE))
        self.step = TrainOneStepCell(cell, optimizer, **settings).set_train()

    def feed(self, number: int) -> Any:
        """Train this process's rows of a batch, note the report of an update, and return the step's output."""
        output = self.step(*self.place.share(self.workload.batch(number, self.place.rows)))
        if bool(output.updated.asnumpy()):
            self.note(output)
        return output

    def note(self, output: Any) -> None:
        """Note the loss and the norm of an update, from a StepOutput or the plain tuple of a graph."""
        loss, norm = (output.loss, output.grad_norm) if hasattr(output, "loss") else (output[0], output[4])
        self.reports.append((float(loss.asnumpy()), float(norm.asnumpy())))

    def compared(
        self,
        windows: Sequence[Sequence[int]],
        dtype: str = "float32",
        clip: bool = False,
        rows: int | None = None,
        values: Values | None = None,
        part: Callable[[str, Any], Any] = lambda name, value: value,
    ) -> Found:
        """Return the difference from MindSpore's own step, to which the batches of each window are one batch.

        Losses and norms are compared of the last updates, as many as were noted. ``values`` are the parameters after
        the training, by their indices, if the network does not have them; ``part`` is this process's part of one.
        """
        workload, rows, network = self.workload, rows or self.place.rows, perceptron()
        optimizer: nn.Cell = nn.Momentum(network.trainable_params(), _RATE, _MOMENTUM)
        optimizer = ClippedOptimizer(optimizer, max_norm=MAX_NORM) if clip else optimizer
        batches = [[workload.batch(number, rows) for number in numbers] for numbers in windows]
        joined = [[Tensor(np.concatenate(arrays)) for arrays in zip(*each)] for each in batches]
        start = values_of(network)
        with op_by_op():
            whole = train_whole(workload.mean_loss(network).set_train(), optimizer, joined)[-len(self.reports) :]
        ours, theirs = (
            {name: part(name, value) for name, value in each.items()} for each in (start, values_of(network))
        )
        apart = compare(values or values_of(self.network), theirs, ours)
        allowed = tolerance(self.place.device, DTYPES[dtype], rows * len(windows[0]) * _HIDDEN, _ROUNDINGS)
        # The parameters are rounded in each update.
        largest = max(float(np.abs(value).max()) for value in theirs.values())
        allowed += _DEVIATIONS * math.sqrt(len(windows)) * FLOAT32 * largest / apart.moved
        found = {
            "parameters": apart.difference / apart.moved,
            "losses": _apart([loss for loss, _ in self.reports], [loss for loss, _ in whole]),
            "norms": _apart([norm for _, norm in self.reports], [norm for _, norm in whole]),
        }
        # A NaN is the largest of all.
        what = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
        return Found(found[what], allowed, what)


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains."""
    of_layers = max(_ROUNDING[dtype], _MATRIX_UNIT[device])
    return _DEVIATIONS * (math.sqrt(terms) * FLOAT32 + math.sqrt(roundings) * of_layers)


def values_of(network: nn.Cell) -> Values:
    """Return the trainable parameters of a network by their indices, since a step may rename them."""
    return {str(i): parameter.asnumpy().copy() for i, parameter in enumerate(network.trainable_params())}


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    differences = [abs(our - their) / abs(their) for our, their in zip(ours, theirs, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
