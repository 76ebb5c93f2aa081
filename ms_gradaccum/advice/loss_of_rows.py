"""Forward passes that give the loss of rows, and how far the losses of parts are from that of the whole."""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.arithmetic import ONE
from ms_gradaccum.backend.compiled import Compiled, op_by_op, runs_eagerly
from ms_gradaccum.backend.snapshot import RandomNumbers, Snapshot, kept
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import IN_TRAINING_ONLY, evaluate
from ms_gradaccum.batch.structure import SequenceOf

# All losses that are multiples of a number have been rounded to it, and to some more in the operators before.
NUM_QUANTA = 16
# Losses of whole numbers have such a divisor, too, so that rounding explains no more than this.
MAX_OF_QUANTA = 2.0**-3
# The rounding of a loss that is a difference of numbers of size 1, as a divergence near its minimum is.
EPSILON = 2.0**-23
_OWNER = "GradAccumulation"


class Loss(NamedTuple):
    """The loss of some rows: the value that has been rounded, its weight, and the total that parts add up to."""

    value: float
    weight: float
    total: float


class LossOfRows:
    """The loss of a network as a function of rows, and the precision of its values."""

    # The state of the network from which `restore` lets a pass begin, and the random numbers of all passes.
    start: Snapshot
    random: RandomNumbers
    # Whether Dropout or BatchNorm was set to evaluation mode for the passes.
    has_evaluated = False
    # True once a loss was as expected from the very losses of the training: nothing random is in it.
    is_exact = False

    def __init__(
        self, network: nn.Cell, parameters: Sequence[Parameter], compiles: bool, half: bool
    ) -> None:
        self.network = network
        self.compiles = compiles
        dtypes = {ms.float32, *[each.dtype for each in parameters]}
        if half:
            dtypes.add(ms.float16)
        self.tolerance = max(TOLERANCES[dtype].loss for dtype in dtypes if dtype in TOLERANCES)
        self.programs: dict[Hashable, Compiled] = {}  # By the structure of the inputs.
        # The tensors that forward passes have changed so far, by their identity.
        self.moved: set[int] = set()

    @property
    def is_eager(self) -> bool:
        return runs_eagerly(self.compiles)

    @contextmanager
    def passes(self, start: Snapshot | None = None) -> Iterator[None]:
        """Context of passes from a state of the network, or from the present one, to which it returns."""
        with kept(self.network.network, self.moved) as now:
            self.start = start or now
            self.random = RandomNumbers(now.random.generators)
            self.restore()
            yield

    def restore(self) -> None:
        """Let the next pass begin as in training, but without Dropout and BatchNorm."""
        self.start.put_back()
        self.has_evaluated = evaluate(self.start.cells, IN_TRAINING_ONLY)

    def alone(self, rows: Rows) -> Loss:
        self.restore()
        return self.of(rows)

    def of(self, rows: Rows) -> Loss:
        """Return the loss of rows from a forward pass, always with the same random numbers."""
        self.random.put_back(1)
        if self.is_eager:
            cell = self._cell(rows.structure)
            with op_by_op():
                outputs = cell(ONE, *rows.tensors)
            return self.from_outputs(rows, outputs)
        if rows.structure not in self.programs:
            # Without Dropout and BatchNorm, the losses of the training tell nothing: one graph takes all lengths.
            axes = (None, *rows.axes) if self.has_evaluated else None
            make_cell = partial(self._cell, rows.structure)
            self.programs[rows.structure] = Compiled(
                make_cell, _OWNER, "the network", self.network.network, open_axes=axes
            )
        return self.from_outputs(rows, self.programs[rows.structure](ONE, *rows.tensors))

    def _cell(self, structure: SequenceOf) -> nn.Cell:
        loss: nn.Cell = self.network.loss_of(structure)
        loss.phase = "predict"
        return loss

    def from_outputs(self, rows: Rows, outputs: Sequence[Tensor]) -> Loss:
        """Return the loss of rows from the outputs of a micro step, or of a forward pass: a sum and a weight."""
        value = float(outputs[0].asnumpy())
        weight = float(outputs[1].asnumpy())
        if self.network.weighted:
            return Loss(value, weight, value)
        mean = float(np.divide(value, weight, dtype=np.float32))
        return Loss(mean, rows.weight, mean * rows.weight)

    def rounding(self, *losses: Loss) -> float:
        """Return the relative difference that rounding explains."""
        values = [abs(loss.value) for loss in losses if loss.value and math.isfinite(loss.value)]
        if not values:
            return self.tolerance
        of_quanta = NUM_QUANTA * min(map(_quantum, values)) / max(values)
        return max(self.tolerance, min(of_quanta, MAX_OF_QUANTA), EPSILON / max(values))


def error_of(both: Loss, a: Loss, b: Loss) -> float:
    """Return how far the losses of two micro batches are from that of both: their totals, or their weights."""
    if not math.isfinite(a.value + b.value):
        return math.inf
    of_weights = relative(both.weight - a.weight - b.weight, both.weight, a.weight, b.weight)
    of_totals = relative(both.total - a.total - b.total, both.total, a.total, b.total)
    return max(of_weights, of_totals, key=abs)


def relative(difference: float, *values: float) -> float:
    """Return a difference relative to the largest of the values."""
    return difference / (max(map(abs, values)) or 1.0)


def _quantum(value: float) -> float:
    """Return the largest power of two that divides a value."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator
