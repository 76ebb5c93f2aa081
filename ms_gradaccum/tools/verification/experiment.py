"""Runs of a window and of the whole batch, each from the same start, and their differences."""

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, ParameterTuple, nn

from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.compiled import Compiled, Eager, runs_eagerly
from ms_gradaccum.backend.snapshot import STATISTICS, Array, Snapshot, as_array, set_mode
from ms_gradaccum.batch.split import split_batch
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals
from ms_gradaccum.gradients.network_precision import computes_in_16_bits
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.tools.whole_batch import WholeBatch
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.micro_steps import MicroSteps
from ms_gradaccum.training.settings import StepSettings

_OWNER = "verify"
# The smallest scale of a gradient, as a share of the whole: a bias before a normalisation has only rounding.
_SMALLEST_SHARE = 0.01


class Run(NamedTuple):
    """The results of one window or one batch."""

    loss: float
    grads: list[Array]  # The mean gradient, one array per trainable parameter.
    state: dict[int, Array]  # The parameters that the run has changed, by their indices in the network.


def norm(run: Run) -> float:
    """Return the L2 norm of the gradient as one vector."""
    return math.hypot(*map(norm_of, run.grads))


def norm_of(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64).reshape(-1)))


def is_finite(run: Run) -> bool:
    return math.isfinite(run.loss) and all(np.isfinite(grad).all() for grad in run.grads)


def misfits(a: Run, b: Run) -> list[float]:
    """Return, per parameter, the norm of the gradients' difference, relative to the larger of the gradients."""
    floor = _SMALLEST_SHARE * max(norm(a), norm(b))
    with np.errstate(invalid="ignore"):  # The difference of two Infs is a NaN, which counts as different.
        return [relative(norm_of(x - y), max(floor, norm_of(x), norm_of(y))) for x, y in zip(a.grads, b.grads)]


def misfit(a: Run, b: Run) -> float:
    """Return the largest relative difference of two runs, over all parameters and the loss."""
    of_loss = relative(abs(a.loss - b.loss), max(abs(a.loss), abs(b.loss)))
    return max(*misfits(a, b), of_loss)


def relative(difference: float, scale: float) -> float:
    """Return ``difference / scale``, and 0 for 0 / 0."""
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


class Start(Snapshot):
    """The parameters, modes and random state of a network and its reference, to restore before each run."""

    def __init__(self, network: nn.Cell, reference: nn.Cell | None) -> None:
        networks = [network] if reference is None else [network, reference]
        for each in networks:
            each.init_parameters_data()
        super().__init__(*networks)
        # If some cells are in training mode, the others were frozen. Otherwise no training has begun.
        inside = {id(inner) for _, inner in network.cells_and_names()} if network.training else set()
        self.trained = [cell.training or id(cell) not in inside for cell in self.cells]
        self.is_16_bit = computes_in_16_bits(self.parameters(), self.cells)

    def parameters(self) -> list[Parameter]:
        return [tensor for tensor in self.tensors.tensors if isinstance(tensor, Parameter)]

    def changed(self) -> dict[int, Array]:
        """Return the values of the parameters that have changed, by their indices among the tensors."""
        tensors = self.tensors.tensors
        return {i: as_array(tensors[i]).copy() for i in self.tensors.changed() if isinstance(tensors[i], Parameter)}

    def begin(self, frozen: tuple[str, ...], same_random: bool = True) -> None:
        """Restore all except attributes, and set training mode, except for cells that were or are to be ``frozen``."""
        self.tensors.put_back()
        if same_random:
            self.put_back_random()
        for cell, training, attributes in zip(self.cells, self.trained, self.attributes):
            set_mode(cell, training, attributes.get(STATISTICS))
        self.evaluate(frozen)


@dataclass
class Experiment:
    """One batch of one network: runs of its window, and of the whole batch in one piece, from the same start."""

    network: GradAccumulation
    inputs: tuple[Any, ...]
    reference: nn.Cell | None
    start: Start
    frozen: tuple[str, ...] = ()  # Cells with one of these words in their class name are in evaluation mode.
    compiles: bool = False

    def __post_init__(self) -> None:
        self.parameters = ParameterTuple(self.network.trainable_params())
        self.split = split_batch(self.inputs, self.network.micro_size, self.network.batch_axis)
        self.rows = tuple(micro_batch.rows for micro_batch in self.split.micro_batches)
        self.batch = Rows.of(self.inputs, self.network.batch_axis)
        buffer = GradientBuffer(self.parameters, totals=WindowTotals(other_losses=self.network.other_losses))
        self.reducer = GradientReducer(self.parameters, buffer)
        settings = StepSettings.checked(_OWNER, compile=self.compiles or None, check_loss=False)
        self.micro_steps = MicroSteps(self.network, [self.reducer], settings, Events(_OWNER))
        # The report replaces the warnings about the network.
        self.micro_steps.has_begun = True
        self.micro_steps.hooks = sys.maxsize
        # The steps of the reference (True) and of the network (False).
        self._whole_steps: dict[bool, Eager | Compiled] = {}

    def window(self) -> Run:
        """Run the window like a training step."""
        self.start.begin(self.frozen)
        buffer = self.reducer.buffer
        buffer.clear()
        self.micro_steps.run(self.inputs, {})
        inverse = buffer.reciprocal_weight()
        factor = np.float32(float(inverse))
        grads = [(total.asnumpy() * factor).astype(np.float32) for total in buffer.sums]
        return Run(float(buffer.loss * inverse), grads, self.start.changed())

    def whole(self, *, by_reference: bool = False, same_random: bool = True) -> Run:
        """Run the whole batch in one piece, compiled or op by op as in training."""
        self.start.begin(self.frozen, same_random)
        batch = self.batch
        network, steps = self.network, self._whole_steps
        if by_reference not in steps:
            loss = network.whole_loss_of(batch.structure)
            if by_reference:
                loss = RowWeight(self.reference, batch.structure, network.losses)
            cell, code = WholeBatch(loss, self.parameters), network.network
            if runs_eagerly(self.compiles):
                steps[by_reference] = Eager(cell, True)
            else:
                steps[by_reference] = Compiled(lambda: cell, _OWNER, "the network", code, needs_fixed=True)
        loss, _, grads = steps[by_reference](*batch.tensors)
        arrays = [grad.asnumpy().astype(np.float32) for grad in grads]
        return Run(float(loss), arrays, self.start.changed())

    def measure(self) -> str:
        """Return the sentence of training's measurement of the loss, or an empty string."""
        self.start.begin(self.frozen)
        measurement = LossMeasurement(self.network, self.parameters, self.compiles, self.start.is_16_bit)
        return measurement.measure(self.inputs, self.split.micro_batches, self.split.structure)
