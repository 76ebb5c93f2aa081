"""Windows and whole batches, run from one start as often as a diagnosis asks for them."""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_gradaccum.backend.compiled import Compiled, forget_passes, op_by_op, runs_eagerly
from ms_gradaccum.backend.kept_state import STATISTICS, KeptState, as_array, set_mode
from ms_gradaccum.batch.loss_parts import Finding
from ms_gradaccum.batch.rows import Cut, Rows
from ms_gradaccum.batch.split import MicroBatch, SplitBatch, split_batch
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals
from ms_gradaccum.gradients.mixed_precision import check_precision, computes_in_16_bits
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.tools.verification.comparison import Run
from ms_gradaccum.tools.whole_batch import WholeBatch
from ms_gradaccum.training.first_pass import first_pass_of
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.loss_check import LossCheck
from ms_gradaccum.training.micro_step import AddMicroBatch, BackwardStart, EagerMicroStep, MicroLoss, build_micro_step
from ms_gradaccum.training.settings import StepSettings

_OWNER = "verify"


class Start:
    """The parameters, modes and random state that a network and its reference have now, to come back to."""

    def __init__(self, network: nn.Cell, reference: nn.Cell | None) -> None:
        networks = [network] if reference is None else [network, reference]
        for each in networks:
            each.init_parameters_data()
        self.kept = KeptState(*networks)
        self.tensors, self.cells = self.kept.tensors, self.kept.cells
        self.parameters = [tensor for tensor in self.tensors.tensors if isinstance(tensor, Parameter)]
        # In training mode already: what in it is not has been frozen. Otherwise no training has begun.
        inside = {id(inner) for _, inner in network.cells_and_names()} if network.training else set()
        self.trained = [cell.training or id(cell) not in inside for cell in self.cells]

    def changed(self) -> dict[int, Any]:
        """Return the values of the parameters that are not as they were, by their places among the tensors."""
        tensors = self.tensors.tensors
        return {i: as_array(tensors[i]).copy() for i in self.tensors.changed() if isinstance(tensors[i], Parameter)}

    def begin(self, frozen: Sequence[nn.Cell], same_random: bool = True) -> None:
        """Begin anew in training mode, but for cells that were frozen before and the ``frozen`` ones.

        Generators inside kernels cannot be put back, and attributes are left, so that what they change shows.
        """
        self.tensors.put_back()
        if same_random:
            self.kept.put_back_random()
        for cell, training, attributes in zip(self.cells, self.trained, self.kept.attributes):
            set_mode(cell, training, attributes.get(STATISTICS))
        for outer in frozen:
            for _, cell in outer.cells_and_names():
                set_mode(cell, False, False)


class Experiment:
    """One batch of one network: its window, the whole of it, and any of its rows, each from the same start.

    Args:
        network: The loss cell and how its batch is split.
        inputs: The batch, as the loss cell takes it.
        reference: Another loss cell of the same parameters, which returns the mean loss of its batch.
        start: Where each run begins.
        frozen: Cells that are in evaluation mode meanwhile.
        compiles: Whether the network is compiled in PYNATIVE mode too.
    """

    def __init__(
        self,
        network: GradAccumulation,
        inputs: tuple[Any, ...],
        reference: nn.Cell | None,
        start: Start,
        frozen: Sequence[nn.Cell] = (),
        compiles: bool = False,
    ) -> None:
        self.compiles = compiles
        self.network = network
        self.inputs = inputs
        self.reference = reference
        self.start = start
        self.frozen = list(frozen)
        self.parameters = ParameterTuple(network.trainable_params())
        self.structure, self.micro_batches = split_batch(inputs, network.micro_size, network.batch_axis)
        self.batch = Rows.of(inputs, network.batch_axis)
        buffer = GradientBuffer(self.parameters, totals=WindowTotals(other_losses=network.other_losses))
        self.reducer = GradientReducer(self.parameters, buffer)
        # As in training, but for a loss scale: gradients are compared as they are.
        self.precision = check_precision(_OWNER, None)
        self._steps: dict[Any, Any] = {}
        self.first_pass = first_pass_of(_OWNER, network, network, self.parameters, self.reducer, half=False)
        # Of what the micro steps are given.
        self.micro_structure = self.structure

    def freezing(self, cells: Sequence[nn.Cell]) -> "Experiment":
        """Return the same experiment with these cells in evaluation mode, too."""
        return Experiment(self.network, self.inputs, self.reference, self.start, [*self.frozen, *cells], self.compiles)

    def unsplit(self, place: int) -> "Experiment":
        """Return the same experiment with one input of the network going whole into each micro batch."""
        network = self.network.without_split(place, self.inputs)
        return Experiment(network, self.inputs, self.reference, self.start, self.frozen, self.compiles)

    def window(self) -> Run:
        """Run the window, as a training step does."""
        return self._run_window(self.micro_batches)

    def micro_batch(self, index: int) -> Run:
        """Run a window that has one of the micro batches alone."""
        return self._run_window(self.micro_batches[index : index + 1])

    def whole(self, *, same_random: bool = True) -> Run:
        """Run the whole batch in one piece."""
        return self._run_whole("network", self.batch, same_random)

    def reversed(self) -> Run:
        """Run the whole batch in one piece, its last row first."""
        return self._run_whole("network", self.batch.take(range(self.batch.size)[::-1]))

    def cuts(self) -> Iterator[Cut]:
        """Yield the batch and two halves of it, then these and theirs, down to the micro batches.

        If each of them is the mean of its halves, then the batch is that of its micro batches.
        """
        bounds = [0, *accumulate(part.rows for part in self.micro_batches)]
        pieces = [bounds]
        for piece in pieces:
            middle = len(piece) // 2
            if len(piece) > 2:
                ends = (piece[0], piece[-1]), (piece[0], piece[middle]), (piece[middle], piece[-1])
                whole, first, second = (self.batch.take(range(*pair)) for pair in ends)
                yield whole, first, second
                pieces += [piece[: middle + 1], piece[middle:]]

    def measure(self) -> Finding | None:
        """Return why the loss cannot be trained in parts, as training measures it, but on the whole batch."""
        half = computes_in_16_bits(self.start.parameters, self.start.cells)
        check = LossCheck(self.network, self.parameters, StepSettings.checked(_OWNER), half, False)
        check.moves = True
        self.start.begin(self.frozen)
        return check.measure_cuts(self.cuts(), len(self.micro_batches))

    def whole_reference(self) -> Run:
        """Run the whole batch through the reference."""
        return self._run_whole("reference", self.batch)

    def seconds(self) -> float:
        """Return how long the forward and backward passes of the window take."""
        self.start.begin(self.frozen)
        self.reducer.buffer.clear()
        begin = time.perf_counter()
        self._add(self.micro_batches)
        _number(self.reducer.buffer.weight)  # Waits for what is still being computed.
        return time.perf_counter() - begin

    def _run_window(self, micro_batches: Sequence[MicroBatch]) -> Run:
        self.start.begin(self.frozen)
        buffer = self.reducer.buffer
        buffer.clear()
        self._add(micro_batches)
        grads = _mean_grads(buffer)
        return Run(_number(buffer.mean_loss()), _number(buffer.weight), grads, self.start.changed())

    def _add(self, micro_batches: Sequence[MicroBatch]) -> None:
        given = SplitBatch(self.structure, list(micro_batches))
        (self.micro_structure, parts), batch_rows = self.first_pass.run(given, runs_eagerly(self.compiles))
        for rows, tensors in parts:
            step = self._step("micro step", tensors)
            start = step.backward_start if isinstance(step, EagerMicroStep) else step.cell.backward_start
            step(*(Tensor(number, ms.float32) for number in start.share_and_factor(rows, batch_rows)), *tensors)

    def _run_whole(self, which: str, batch: Rows, same_random: bool = True) -> Run:
        self.start.begin(self.frozen, same_random)
        loss, weight, grads = self._step(which, batch.tensors)(*batch.tensors)
        weight = _number(weight) if self.network.weighted and which == "network" else float(batch.size)
        arrays = [grad.asnumpy().astype(np.float32) for grad in grads]
        return Run(_number(loss), weight, arrays, self.start.changed())

    def _step(self, kind: str, tensors: tuple[Tensor, ...]) -> Any:
        """Return what runs a micro batch or a whole one, as the training would: compiled, or op by op."""
        eager = runs_eagerly(self.compiles)
        # A graph for each shape: it is known beforehand that none of them changes.
        key = (kind, eager, () if eager else tuple(tensor.shape for tensor in tensors))
        if key not in self._steps:
            make = self._make_micro_step if kind == "micro step" else lambda: self._make_whole(kind)
            if eager:
                self._steps[key] = self._make_eager_step() if kind == "micro step" else EagerCell(make())
            else:
                self._steps[key] = Compiled(make, _OWNER, "the network", self.network.network)
        return self._steps[key]

    def _make_micro_step(self) -> nn.Cell:
        loss = self.network.loss_of(self.micro_structure)
        return build_micro_step(loss, [self.reducer], [self.parameters], self.precision)

    def _make_eager_step(self) -> EagerMicroStep:
        micro_loss = MicroLoss(self.network.weighted_loss, False, self.precision.loss_scale)
        adding = AddMicroBatch([self.reducer], [self.parameters], micro_loss.totals())
        step = EagerMicroStep(_OWNER, micro_loss, [self.parameters], adding, BackwardStart.BATCH)
        step.structure = self.micro_structure
        return step

    def _make_whole(self, which: str) -> nn.Cell:
        if which == "network":
            loss = self.network.whole_loss_of(self.structure)
        else:
            loss = RowWeight(self.reference, self.structure, self.network.losses)
        return WholeBatch(loss, self.parameters)


class EagerCell:
    """Calls a cell op by op."""

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = cell

    def __call__(self, *tensors: Tensor) -> Any:
        # MindSpore divides the gradient of a BCEWithLogitsLoss by the rows of a pass before, if it knows one.
        forget_passes()
        with op_by_op():
            return self.cell(*tensors)


def _mean_grads(buffer: GradientBuffer) -> list[Any]:
    """Return the mean gradient of the window."""
    factor = np.float32(_number(buffer.reciprocal_weight()))
    return [(total.asnumpy() * factor).astype(np.float32) for total in buffer.sums]


def _number(tensor: Tensor) -> float:
    return float(tensor.asnumpy())
