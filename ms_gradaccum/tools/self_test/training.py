r"""A training in windows, its comparison with MindSpore's own step on the whole batch, and the tolerance.

Both add up the same products. A sum of `n` terms in float32 is off by about :math:`\sqrt{n} u`, :math:`u = 2^{-24}`.
On the way to a gradient there are `d` roundings to the dtype of the layers, :math:`\sqrt{d} u'` with :math:`u'` of
:math:`2^{-24}`, :math:`2^{-11}` or :math:`2^{-8}`; matrix units of GPUs and NPUs round the factors of float32 products
to 11 bits. The tolerance is :math:`4 (\sqrt{n} u + \sqrt{d} u')`, relative to losses, to norms and to the way that the
parameters have gone. Wrong windows are off by a factor.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
MICRO_SIZE = 3
RATE = 0.1
# Below the norms that the gradients of the MLP have: 0.8 and more.
MAX_NORM = 0.25
_DEVIATIONS = 4.0
FLOAT32 = 2.0**-24
_ROUNDING = {ms.float32: FLOAT32, ms.float16: 2.0**-11, ms.bfloat16: 2.0**-8}
_MATRIX_UNIT = {"CPU": FLOAT32, "GPU": 2.0**-11, "Ascend": 2.0**-11}
_UPDATES = 2
_INPUTS, _HIDDEN, _OUTPUTS = 12, 32, 4
_TOKENS, _LENGTH, _WIDTH = 24, 8, 16
_IGNORED = -100

Arrays = tuple[np.ndarray[Any, Any], ...]
Values = dict[str, np.ndarray[Any, Any]]


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
    """A network, its loss as a window and as MindSpore's step takes it, its data, and what is rounded."""

    build: Callable[[], nn.Cell]
    loss: Callable[[nn.Cell], nn.Cell]
    mean_loss: Callable[[nn.Cell], nn.Cell]
    batch: Callable[[int, int], Arrays]
    # The length of the longest sum, and the number of roundings that follow each other, forth and back.
    width: int
    roundings: int

    def new(self) -> nn.Cell:
        """Return the network, which starts with the same parameters each time."""
        network = self.build()
        for number, parameter in enumerate(network.trainable_params()):
            shape = parameter.shape
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            values = parameter.name.endswith("gamma") + spread * np.random.default_rng(number).normal(size=shape)
            parameter.set_data(Tensor(values.astype(np.float32)))
        return network


@dataclass
class Run:
    """The numbers of a training: its parameters at the start and at the end, and the reports of its updates."""

    start: Values
    weights: Values = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Training:
    """A network with the step that trains it in windows, and what it reports."""

    def __init__(self, place: Place, workload: Workload, **settings: Any) -> None:
        self.place, self.workload, self.network = place, workload, workload.new()
        self.run = Run(values_of(self.network))
        # Before the step, which may rewrite the network for half precision.
        optimizer = nn.Momentum(self.network.trainable_params(), RATE, 0.9)
        self.step = TrainOneStepCell(
            GradAccumulation(workload.loss(self.network), MICRO_SIZE), optimizer, **settings
        ).set_train()

    def feed(self, number: int) -> Any:
        """Train this process's rows of a batch. Return the output of the step, and keep it if it made an update."""
        output = self.step(*self.place.share(self.workload.batch(number, self.place.rows)))
        if bool(output.updated.asnumpy()):
            self.note(output.loss, output.grad_norm)
        return output

    def note(self, loss: Tensor, norm: Tensor) -> None:
        """Keep what was reported on an update."""
        self.run.losses.append(float(loss.asnumpy()))
        self.run.norms.append(float(norm.asnumpy()))

    def compared(self, windows: Sequence[Sequence[int]], dtype: str = "float32", clip: bool = False) -> Found:
        """Return how far it is from MindSpore's own step, to which the batches of each window are one.

        Of losses and norms those of the last updates are compared, as many as were reported.
        """
        workload, rows, network = self.workload, self.place.rows, self.workload.new()
        parameters = network.trainable_params()
        optimizer = _Clipped(parameters, RATE, 0.9) if clip else nn.Momentum(parameters, RATE, 0.9)
        batches = [[workload.batch(number, rows) for number in numbers] for numbers in windows]
        whole = Run(values_of(network))
        joined = [[np.concatenate(arrays) for arrays in zip(*each)] for each in batches]
        run_stock_step(whole, workload.mean_loss(network), optimizer, joined)
        whole.weights, self.run.weights = values_of(network), values_of(self.network)
        first = len(windows) - len(self.run.losses)
        whole.losses, whole.norms = whole.losses[first:], whole.norms[first:]
        terms = rows * len(windows[0]) * workload.width
        return difference_of(self.run, whole, tolerance(self.place.device, DTYPES[dtype], terms, workload.roundings))


def run_stock_step(run: Run, loss_cell: nn.Cell, optimizer: nn.Cell, batches: Iterable[Sequence[Any]]) -> None:
    """Train with MindSpore's own step in this process alone, op by op, and note the loss and the norm of each batch."""
    step = nn.TrainOneStepCell(loss_cell, optimizer, return_grad=True).set_train()
    with op_by_op():
        for batch in batches:
            loss, gradients = step(*map(Tensor, batch))
            run.losses.append(float(loss.asnumpy()))
            run.norms.append(math.hypot(*(np.linalg.norm(each.asnumpy().ravel()) for each in gradients.values())))


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains."""
    of_layers = max(_ROUNDING[dtype], _MATRIX_UNIT[device])
    return _DEVIATIONS * (math.sqrt(terms) * FLOAT32 + math.sqrt(roundings) * of_layers)


def difference_of(run: Run, whole: Run, allowed: float) -> Found:
    """Return the largest relative difference of two runs that began alike."""
    moved = max(float(np.abs(whole.weights[name] - whole.start[name]).max()) for name in whole.weights)
    apart = max(float(np.abs(run.weights[name] - whole.weights[name]).max()) for name in whole.weights)
    largest = max(float(np.abs(value).max()) for value in whole.weights.values())
    if moved:  # The parameters are rounded in each update.
        allowed += _DEVIATIONS * math.sqrt(_UPDATES) * FLOAT32 * largest / moved
    found = {
        "parameters": apart / moved if moved else math.inf,
        "losses": _apart(run.losses, whole.losses),
        "norms": _apart(run.norms, whole.norms),
    }
    # A NaN is the largest of all.
    what = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    return Found(found[what], allowed, what)


def values_of(network: nn.Cell) -> Values:
    """Return the trainable parameters of a network in their order, whatever the step has made of their names."""
    return {str(i): parameter.asnumpy().copy() for i, parameter in enumerate(network.trainable_params())}


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs):
        return math.inf
    differences = [abs(our - their) / abs(their) for our, their in zip(ours, theirs)]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


class _Clipped(nn.Momentum):
    """Momentum of a gradient that is clipped to a norm."""

    def construct(self, gradients: tuple[Tensor, ...]) -> Any:
        return super().construct(ops.clip_by_global_norm(gradients, MAX_NORM))


class _MeanOverTokens(nn.Cell):
    """Cross-entropy, the mean over all labels of the batch that are not ignored."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(ops.reshape(logits, (-1, _TOKENS)), ops.reshape(labels, (-1,)), ignore_index=_IGNORED)


def _perceptron() -> nn.Cell:
    return nn.SequentialCell(nn.Dense(_INPUTS, _HIDDEN), nn.Tanh(), nn.Dense(_HIDDEN, _OUTPUTS))


def _transformer() -> nn.Cell:
    layer = nn.TransformerEncoderLayer(_WIDTH, 2, 2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.SequentialCell(nn.Embedding(_TOKENS, _WIDTH), layer, nn.Dense(_WIDTH, _TOKENS))


def _rows(number: int, rows: int) -> Arrays:
    rng = np.random.default_rng(100 + number)
    return rng.normal(size=(rows, _INPUTS)).astype(np.float32), rng.normal(size=(rows, _OUTPUTS)).astype(np.float32)


def _sentences(number: int, rows: int) -> Arrays:
    """Return tokens and labels, of which each row has another number."""
    rng = np.random.default_rng(200 + number)
    tokens = rng.integers(0, _TOKENS, size=(rows, _LENGTH + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[np.arange(_LENGTH) >= rng.integers(1, _LENGTH + 1, size=(rows, 1))] = _IGNORED
    return tokens[:, :-1].copy(), labels


def _squares(network: nn.Cell) -> nn.Cell:
    return nn.WithLossCell(network, nn.MSELoss())


MLP = Workload(_perceptron, _squares, _squares, _rows, _HIDDEN, 10)
TRANSFORMER = Workload(
    _transformer,
    TokenMeanLoss,
    lambda network: nn.WithLossCell(network, _MeanOverTokens()),
    _sentences,
    2 * _WIDTH * _LENGTH,
    28,
)
