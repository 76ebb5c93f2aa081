"""Runs of a window and of the whole batch, each from the same start, and their differences."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, nn

from ms_gradaccum.advice.advisor import SilentAdvisor
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.arrays import Array, as_array
from ms_gradaccum.backend.snapshot import Snapshot
from ms_gradaccum.backend.training_cells import STATISTICS, evaluate, set_mode
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals
from ms_gradaccum.gradients.network_precision import computes_in_16_bits
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.tools.whole_batch import MeanLoss, Run, WholeBatch
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.micro_steps import BatchProgress, MicroSteps, WindowBatch
from ms_gradaccum.training.settings import StepSettings

_OWNER = "verify"


class Start(Snapshot):
    """The parameters, modes and random state of a network and its reference, to restore before each run."""

    def __init__(self, network: nn.Cell, reference: nn.Cell | None) -> None:
        networks = [network] if reference is None else [network, reference]
        for each in networks:
            each.init_parameters_data()
        super().__init__(*networks)
        # If some cells are in training mode, the others were frozen. Otherwise no training has begun.
        inside = (
            {id(inner) for _, inner in network.cells_and_names()} if network.training else set()
        )
        trained = [cell.training or id(cell) not in inside for cell in self.cells]
        self.modes = list(
            zip(self.cells, trained, [vars(cell).get(STATISTICS) for cell in self.cells])
        )
        parameters = [tensor for tensor in self.tensors.tensors if isinstance(tensor, Parameter)]
        self.is_16_bit = computes_in_16_bits(parameters, self.cells)

    def changed(self) -> dict[int, Array]:
        """Return the values of the parameters that have changed, by their indices among the tensors."""
        tensors = self.tensors.tensors
        return {
            i: as_array(tensors[i]).copy()
            for i in self.tensors.changed()
            if isinstance(tensors[i], Parameter)
        }

    def begin(self, frozen: tuple[type[nn.Cell], ...]) -> None:
        """Restore all except attributes, and set training mode, except for cells that were or are to be ``frozen``."""
        self.tensors.put_back()
        self.random.put_back()
        for mode in self.modes:
            set_mode(*mode)
        evaluate(self.cells, frozen)


@dataclass
class Experiment:
    """One batch of one network: runs of its window, and of the whole batch in one piece, from the same start."""

    network: GradAccumulation
    inputs: tuple[Any, ...]
    start: Start
    # MindSpore's own cells of these kinds are in evaluation mode.
    frozen: tuple[type[nn.Cell], ...] = ()
    compiles: bool = False

    def __post_init__(self) -> None:
        self.parameters = ParameterTuple(self.network.trainable_params())
        self.split = self.network.split(*self.inputs)
        self.rows = tuple(micro_batch.rows for micro_batch in self.split.micro_batches)
        buffer = GradientBuffer(
            self.parameters, totals=WindowTotals(other_losses=self.network.weighted_loss.room)
        )
        self.reducer = GradientReducer(self.parameters, buffer)
        settings = StepSettings.checked(_OWNER, compile=self.compiles or None, check_loss=False)
        # The report replaces the warnings about the network.
        advisor = SilentAdvisor(_OWNER, self.network)
        self.micro_steps = MicroSteps(
            self.network, [self.reducer], settings, Events(_OWNER), advisor
        )

    def window(self) -> Run:
        """Run the window like a training step."""
        self.start.begin(self.frozen)
        buffer = self.reducer.buffer
        buffer.clear()
        self.micro_steps.run(WindowBatch(self.inputs, {}), BatchProgress())
        inverse = buffer.reciprocal_weight()
        factor = np.float32(float(inverse))
        grads = [(total.asnumpy() * factor).astype(np.float32) for total in buffer.sums]
        return Run([float(buffer.loss * inverse)], grads, self.start.changed())

    def whole(self, reference: nn.Cell | None = None) -> Run:
        """Run the whole batch in one piece, compiled or op by op as in training, by the network or a reference."""
        batch = Rows.of(self.inputs, self.network.batch_axis)
        loss = self.network.whole_loss_of(batch.structure)
        if reference is not None:
            loss = RowWeight(reference, batch.structure, self.network.losses)
        step = WholeBatch(
            _OWNER,
            MeanLoss(loss),
            self.parameters,
            code=self.network.network,
            compiles=self.compiles,
        )
        self.start.begin(self.frozen)
        loss_value, grads = step.train(*batch.tensors)
        return Run([loss_value], grads, self.start.changed())

    def measure(self) -> str:
        """Return the sentence of training's measurement of the loss, or an empty string."""
        self.start.begin(self.frozen)
        measurement = LossMeasurement(
            self.network, self.parameters, self.compiles, self.start.is_16_bit
        )
        return measurement.measure(Rows.parts(self.network, self.inputs, self.split))
