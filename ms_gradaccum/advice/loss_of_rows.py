"""Forward passes that give the loss of rows, and how far the losses of parts are from that of the whole."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.compiled import Compiled, Eager, runs_eagerly
from ms_gradaccum.backend.snapshot import Snapshot
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import IN_TRAINING_ONLY, evaluate

# All losses that are multiples of a number have been rounded to it, and to some more in the operators before.
NUM_QUANTA = 16
# Losses of whole numbers have such a divisor, too, so that rounding explains no more than this.
MAX_OF_QUANTA = 2.0**-3
_OWNER = "GradAccumulation"


class Loss(NamedTuple):
    """The loss of some rows: a mean and its number of rows, or a sum and the weight that the network returns."""

    value: float
    weight: float


class LossOfRows:
    """The loss of a network as a function of rows, and the precision of its values."""

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter], compiles: bool, half: bool) -> None:
        self.network = network
        self.compiles = compiles
        dtypes = {ms.float32, *[each.dtype for each in parameters]}
        if half:
            dtypes.add(ms.float16)
        self.tolerance = max(TOLERANCES[dtype].loss for dtype in dtypes if dtype in TOLERANCES)
        # True once a loss was as expected from the very losses of the training: nothing random is in it.
        self.is_exact = False
        # By the structure of the inputs, and whether it runs op by op.
        self.programs: dict[Hashable, Eager | Compiled] = {}

    def known(self, rows: Rows, outputs: Sequence[Tensor]) -> Loss:
        """Return the loss of a micro batch from the outputs of its micro step: a sum and a weight."""
        total = float(outputs[0].asnumpy())
        weight = float(outputs[1].asnumpy())
        if self.network.weighted:
            return Loss(total, weight)
        return Loss(total / weight if weight else math.nan, rows.weight)

    def run(self, rows: Rows, is_eager: bool, has_many_lengths: bool) -> Loss:
        """Return the loss of rows. One graph takes all lengths, if they are many."""
        structure = rows.structure

        def build() -> nn.Cell:
            loss = self.network.loss_of(structure)
            loss.reports = False
            loss.phase = "predict"
            return loss

        program = self.programs.get((structure, is_eager))
        if program is None:
            axes = (None, *rows.axes) if has_many_lengths else None
            program = Compiled(build, _OWNER, "the network", self.network.network, open_axes=axes)
            if is_eager:
                program = Eager(build(), False)
            self.programs[structure, is_eager] = program
        outputs = program(Tensor(1.0, ms.float32), *rows.tensors)
        weight = rows.weight
        if self.network.weighted:
            weight = float(outputs[1].asnumpy())
        return Loss(float(outputs[0].asnumpy()), weight)

    def total(self, loss: Loss) -> float:
        """Return what losses of parts add up to."""
        if self.network.weighted:
            return loss.value
        return loss.value * loss.weight

    def error(self, both: Loss, a: Loss, b: Loss) -> float:
        """Return how far the losses of two micro batches are from that of both: their sums, and their weights."""
        if not math.isfinite(a.value + b.value):
            return math.inf
        whole, first, second = map(self.total, (both, a, b))
        of_totals = relative(whole - first - second, whole, first, second)
        of_weights = relative(both.weight - a.weight - b.weight, both.weight, a.weight, b.weight)
        return max(of_totals, of_weights)

    def rounding(self, *losses: Loss) -> float:
        """Return the relative difference that rounding explains."""
        values = [abs(loss.value) for loss in losses if loss.value and math.isfinite(loss.value)]
        if not values:
            return self.tolerance
        of_quanta = NUM_QUANTA * min(map(_quantum, values)) / max(values)
        return max(self.tolerance, min(of_quanta, MAX_OF_QUANTA))


class Passes:
    """Forward passes from one state of the network, as in training but without Dropout and BatchNorm."""

    def __init__(self, losses: LossOfRows, state: Snapshot) -> None:
        self.losses = losses
        self.state = state
        self.is_eager = runs_eagerly(losses.compiles)
        # Whether cells that act otherwise in training were set to evaluation mode.
        self.has_evaluated = self.prepare()

    def prepare(self) -> bool:
        """Leave out hooks, and set the cells that act otherwise in training to evaluation mode."""
        self.state.leave_out_hooks()
        return evaluate(self.state.cells, IN_TRAINING_ONLY)

    def restore(self) -> None:
        """Take everything back to where it was before the passes."""
        self.state.put_back()
        self.prepare()

    def loss(self, rows: Rows, seed: int | None = 0) -> Loss:
        """Return the loss of rows, with the random numbers of this seed, or with further ones."""
        if seed is not None:
            self.state.put_back_random(seed)
        return self.losses.run(rows, self.is_eager, self.has_evaluated)


def relative(difference: float, *values: float) -> float:
    """Return a difference relative to the largest of the values."""
    scale = max(map(abs, values))
    return abs(difference) / scale if scale else 0.0


def _quantum(value: float) -> float:
    """Return the largest power of two that divides a value."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator
