"""Windows and whole batches, run from one start as often as a diagnosis asks for them."""

import time
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn
from mindspore.common.seed import _KERNEL_SEED

from ms_gradaccum.backend import random_state
from ms_gradaccum.backend.compiled import Compiled, forget_passes, op_by_op, runs_eagerly
from ms_gradaccum.batch.split import MicroBatch, SplitBatch, leaf_axes, split_batch
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.gradients.buffer import GradientBuffer, WindowTotals
from ms_gradaccum.gradients.mixed_precision import check_precision
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.tools.verification.comparison import Run
from ms_gradaccum.tools.whole_batch import WholeBatch
from ms_gradaccum.training.first_pass import first_pass_of
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.micro_step import AddMicroBatch, BackwardStart, EagerMicroStep, MicroLoss, build_micro_step

_OWNER = "verify"
# What BatchNorm of mindspore.nn goes by before its mode: whether it takes the statistics of its batch. None: the mode.
_STATISTICS = "use_batch_statistics"
# What every cell has, whatever its class.
_OF_ALL_CELLS = frozenset(vars(nn.Cell()))


class Start:
    """The parameters, modes and random state that a network and its reference have now, to come back to."""

    def __init__(self, network: nn.Cell, reference: nn.Cell | None) -> None:
        cells = [network] if reference is None else [network, reference]
        for cell in cells:
            cell.init_parameters_data()
        self.parameters = _unique(parameter for cell in cells for parameter in cell.get_parameters())
        self.values = [parameter.asnumpy().copy() for parameter in self.parameters]
        self.cells = _unique(inner for cell in cells for _, inner in cell.cells_and_names())
        self.modes = [(cell.training, cell.phase, vars(cell).get(_STATISTICS)) for cell in self.cells]
        # In training mode already: what in it is not has been frozen. Otherwise no training has begun.
        inside = {id(inner) for _, inner in network.cells_and_names()} if network.training else set()
        self.trained = [cell.training or id(cell) not in inside for cell in self.cells]
        self.random, self.kernel_seeds = random_state.take(), dict(_KERNEL_SEED)
        self.attributes = [_attributes(cell) for cell in self.cells]

    def changed(self) -> dict[int, Any]:
        """Return the values of the parameters that are not as they were, by their places."""
        values = [parameter.asnumpy() for parameter in self.parameters]
        return {i: new.copy() for i, new in enumerate(values) if new.tobytes() != self.values[i].tobytes()}

    def rewind(self) -> None:
        """Give the parameters the values that they had."""
        for i in self.changed():
            self.parameters[i].set_data(Tensor(self.values[i], self.parameters[i].dtype))

    def rewind_random(self) -> None:
        """Give the generators the state that they had. Those inside kernels cannot be reached."""
        random_state.put(self.random)
        _KERNEL_SEED.clear()
        _KERNEL_SEED.update(self.kernel_seeds)

    def rewind_attributes(self) -> None:
        """Give the cells the attributes that they had, lists and dicts with the items that they had."""
        for cell, attributes in zip(self.cells, self.attributes):
            for name in _attributes(cell).keys() - attributes.keys():
                del vars(cell)[name]
            for name, (value, items) in attributes.items():
                vars(cell)[name] = value
                if type(value) is list:
                    value[:] = items
                elif type(value) is dict:
                    value.clear()
                    value.update(items)

    def train(self, frozen: Sequence[nn.Cell] = ()) -> None:
        """Set the cells in training mode, but for those that were frozen before and the ``frozen`` ones."""
        for cell, training, (_, _, statistics) in zip(self.cells, self.trained, self.modes):
            _set_mode(cell, training, statistics)
        for outer in frozen:
            for _, cell in outer.cells_and_names():
                _set_mode(cell, False, False)

    def restore(self) -> None:
        """Leave everything as it was."""
        self.rewind()
        self.rewind_random()
        self.rewind_attributes()
        for cell, (training, phase, statistics) in zip(self.cells, self.modes):
            _set_mode(cell, training, statistics)
            cell.phase = phase


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
        self.batch = split_batch(inputs, 1, network.batch_axis).micro_batches[0]
        self.axes = leaf_axes(inputs, network.batch_axis)
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

    def rows_of(self, micro_batch: int) -> list[int]:
        """Return the places of its rows in the batch."""
        sizes = [part.rows for part in self.micro_batches]
        begin = sum(sizes[:micro_batch])
        return list(range(begin, begin + sizes[micro_batch]))

    def window(self) -> Run:
        """Run the window, as a training step does."""
        return self._run_window(self.micro_batches)

    def micro_batch(self, index: int) -> Run:
        """Run a window that has one of the micro batches alone."""
        return self._run_window(self.micro_batches[index : index + 1])

    def whole(self, *, same_random: bool = True) -> Run:
        """Run the whole batch in one piece."""
        return self._run_whole("network", self.batch, same_random)

    def rows(self, places: Sequence[int]) -> Run:
        """Run these rows of the batch in one piece."""
        cut = tuple(_take(tensor, axis, places) for tensor, axis in zip(self.batch.tensors, self.axes))
        return self._run_whole("network", MicroBatch(len(places), cut))

    def whole_reference(self) -> Run:
        """Run the whole batch through the reference."""
        return self._run_whole("reference", self.batch)

    def seconds(self) -> float:
        """Return how long the forward and backward passes of the window take."""
        self._begin()
        self.reducer.buffer.clear()
        begin = time.perf_counter()
        self._add(self.micro_batches)
        _number(self.reducer.buffer.weight)  # Waits for what is still being computed.
        return time.perf_counter() - begin

    def _run_window(self, micro_batches: Sequence[MicroBatch]) -> Run:
        self._begin()
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

    def _run_whole(self, which: str, batch: MicroBatch, same_random: bool = True) -> Run:
        self._begin(same_random)
        loss, weight, grads = self._step(which, batch.tensors)(*batch.tensors)
        weight = _number(weight) if self.network.weighted and which == "network" else float(batch.rows)
        arrays = [grad.asnumpy().astype(np.float32) for grad in grads]
        return Run(_number(loss), weight, arrays, self.start.changed())

    def _begin(self, same_random: bool = True) -> None:
        self.start.rewind()
        if same_random:
            self.start.rewind_random()
        self.start.train(self.frozen)

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


def _unique(items: Iterable[Any]) -> list[Any]:
    """Return the items in their order, each object once."""
    return list({id(item): item for item in items}.values())


def _attributes(cell: nn.Cell) -> dict[str, tuple[Any, Any]]:
    """Return what a cell has beside what every cell has, with copies of lists and dicts."""
    own = ((name, value) for name, value in vars(cell).items() if name not in _OF_ALL_CELLS)
    return {name: (value, copy(value) if type(value) in (list, dict) else None) for name, value in own}


def _set_mode(cell: nn.Cell, training: bool, statistics: bool | None) -> None:
    cell.phase = "train" if training else "predict"
    cell.add_flags(training=training)  # Not `set_train`, which sets the cells inside, too.
    if _STATISTICS in vars(cell):
        setattr(cell, _STATISTICS, statistics)


def _take(tensor: Tensor, axis: int | None, places: Sequence[int]) -> Tensor:
    return tensor if axis is None else Tensor(np.take(tensor.asnumpy(), places, axis), tensor.dtype)


def _number(tensor: Tensor) -> float:
    return float(tensor.asnumpy())
