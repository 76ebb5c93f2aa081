"""The micro steps of a network's batches, compiled or op by op, depending on MindSpore's mode."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn

from ms_gradaccum._checks import argument_error, warn
from ms_gradaccum.backend.compiled import NOTHING, Compiled, follow_mode, runs_eagerly
from ms_gradaccum.backend.cpu import has_convolutions, pixels, thread_pool_is_faster, warn_of_slow_convolutions
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.batch.ambiguous_inputs import warn_of_split
from ms_gradaccum.batch.nested_inputs import why_no_graph
from ms_gradaccum.batch.split import MicroBatch
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import sparse_lookup
from ms_gradaccum.parallel.reduced import check_hooks_run
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.first_pass import first_pass_of
from ms_gradaccum.training.loss_check import LossCheck
from ms_gradaccum.training.micro_step import (
    AddMicroBatch,
    BackwardStart,
    EagerMicroStep,
    EmptyStep,
    MicroLoss,
    MicroStep,
    backward_start_of,
    build_micro_step,
    is_half,
)
from ms_gradaccum.training.settings import StepSettings

_MANY_STRUCTURES = 8
_LOGGER = logging.getLogger("ms_gradaccum")
# What is random or counts in training, and does neither in evaluation. nn.BatchNorm3d has a BatchNorm2d inside.
_BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm),
    *(mint.nn.BatchNorm1d, mint.nn.BatchNorm2d, mint.nn.BatchNorm3d, mint.nn.SyncBatchNorm),
)
FREEZE = "use_batch_statistics=False, or with its set_train(False) in a callback's on_train_step_begin()"
_TRAINS_ONLY = (*_BATCH_NORMS, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class MicroSteps:
    """The micro steps of the batches of a network.

    Args:
        network: The GradAccumulation.
        reducers: The reducers of the optimizers.
        settings: The options of the training step.
        events: Event dispatcher.
    """

    def __init__(
        self, network: Any, reducers: Sequence[GradientReducer], settings: StepSettings, events: Events
    ) -> None:
        self.owner = owner = settings.owner
        if reducers[0].comes_reduced:
            _check_reduced(owner, network, settings)
        warn_of_slow_convolutions(owner, network)
        self.settings = settings
        self.events = events
        self.network = network
        self.reducers = reducers
        # For each optimizer the whole parameters that it updates.
        self.parameters = [ParameterTuple(reducer.replicas()) for reducer in reducers]
        # The micro step as part of a larger graph, which takes nested inputs.
        self.cell = self._build(network.weighted_loss)
        # The pass before the micro steps, for a loss over the whole batch.
        self.first_pass = first_pass_of(
            owner, network, self.cell, self.cell.parameters, reducers[0], self.cell.micro_loss.half
        )
        # The keys are the structure of the inputs, nearly always a single one, and whether the sums are reduced.
        self.by_structure: dict[tuple[Hashable, bool], Compiled] = {}
        # The keys say whether the sums are reduced.
        self.eager: dict[bool, EagerMicroStep] = {}
        # Ranks share their cores, and their messages must keep one order.
        self.may_use_thread_pool = not reducers[0].several
        self.empty_step = EmptyStep(reducers)
        self.run_empty_step = Compiled(lambda: self.empty_step, owner, "the empty step")
        half = self.cell.micro_loss.half
        self.loss_check = LossCheck(network, self.cell.parameters, settings, half, reducers[0].several)
        # The forward passes of rows would communicate, too.
        self.loss_check.is_done |= reducers[0].comes_reduced
        # True once the network, and a batch that is split, have been checked in this training.
        self.has_begun = self.has_split = False
        # True if the last batch may have added something before it failed.
        self.has_added = False
        # The micro batches of the last batch whose collectives other ranks may still wait in; None before the count.
        self.rounds: int | None = None

    def compiled_cells(self) -> list[Any]:
        """Return the compiled cells, which have a mode and settings of their own."""
        return [self.cell, self.empty_step, *self.by_structure.values(), *self.first_pass.compiled_cells()]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool = False) -> list[Any]:
        """Add one batch and return the outputs of its micro steps. The last one may also reduce the sums."""
        self.has_added, self.rounds = False, None
        is_first, self.has_begun = not self.has_begun, True
        if is_first:
            self._warn_of_network()
        batch = self.network.split(*args, **kwargs)
        if not self.has_split:
            inputs = self.network.positional(args, kwargs)
            self.has_split = warn_of_split(self.network, inputs, len(batch.micro_batches), is_first)
        (structure, micro_batches), batch_rows = self.first_pass.run(batch, self._runs_eagerly())
        micro_step, backward_start = self._micro_step(structure, micro_batches)
        numbers = {part.rows: backward_start.share_and_factor(part.rows, batch_rows) for part in micro_batches}
        starts = {rows: tuple(Tensor(number, ms.float32) for number in pair) for rows, pair in numbers.items()}
        # This comes first, because all ranks must send their messages in the same order.
        self.rounds = self.reducers[0].max_micro_batches(len(micro_batches))
        outputs: list[Any] = []
        done = self.events.micro_batches
        last, _ = self._micro_step(structure, micro_batches, reduces)
        self.loss_check.before_batch()
        steps = [micro_step] * (len(micro_batches) - 1) + [last]
        # A callback may raise before its first run.
        steps[0].has_run = False
        try:
            for index, (step, (rows, tensors)) in enumerate(zip(steps, micro_batches)):
                self.events.micro_batch_begin(index, rows)
                outputs.append(step(*starts[rows], *tensors))
                self.rounds -= 1
                self.loss_check.after_micro_batch()
                self.events.micro_batch_end(index, rows)
            self.first_pass.check(outputs)
            self.loss_check.after_batch(len(micro_batches), args, kwargs)
        except BaseException as error:
            self.has_added = bool(outputs) or steps[0].has_run
            self.events.micro_batches = done
            if isinstance(error, Exception):
                self.network.explain_split(error, args, kwargs)
            raise
        self._add_nothing(self.rounds)
        return outputs

    def _warn_of_network(self) -> None:
        """Warn of a network that trains in another way, or slowly."""
        _tell_of_modes(self.owner, self.network, self.settings.adds_batches)
        if not self.reducers[0].comes_reduced:
            _warn_custom_backward(self.owner, self.network, self.cell.parameters, self.settings.adds_batches)
        if self._runs_eagerly() and not self.reducers[0].comes_reduced:
            _LOGGER.warning(
                "%s: PYNATIVE mode runs the network op by op. Compiled it is often several times as fast: "
                "verify(network, batch, micro_size, compile=True) says whether it then trains the same.",
                self.owner,
            )

    def take_part(self) -> None:
        """Join the remaining collectives of a batch that has failed on this rank."""
        if self.rounds is None:
            self.join()
        else:
            self._add_nothing(self.rounds)

    def measure_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the loss of a batch that a larger graph will train."""
        self.loss_check.after_batch(len(self.network.split(*args, **kwargs).micro_batches), args, kwargs)

    def join(self) -> None:
        """Join the collectives of a batch with no local data."""
        self.first_pass.join()
        self._add_nothing(self.reducers[0].max_micro_batches(0))

    def _add_nothing(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.run_empty_step(NOTHING)

    def _micro_step(self, structure: Any, micro_batches: list[MicroBatch], reduces: bool = False) -> Any:
        """Return the callable that runs a micro batch of this structure, and its backward start."""
        if not self._runs_eagerly():
            compiled = self._compiled(structure, micro_batches, reduces)
            return compiled, compiled.cell.backward_start
        if reduces not in self.eager:
            self.eager[reduces] = self._build_eager(reduces)
        step = self.eager[reduces]
        step.structure = structure
        return step, step.backward_start

    def _runs_eagerly(self) -> bool:
        eager = runs_eagerly(self.settings.compiles)
        if self.reducers[0].comes_reduced:
            check_hooks_run(self.owner, eager)
        return eager

    def _build_eager(self, is_last: bool) -> EagerMicroStep:
        lookup = sparse_lookup(self.network)
        if lookup is not None:
            rule = "one of dense gradients in PYNATIVE mode, where MindSpore forgets the rows of sparse ones"
            remedy = "Use nn.Embedding, or give compile=True."
            raise ValueError(argument_error(self.owner, "network", rule, f"a sparse lookup in {lookup}", remedy))
        loss = self.network.weighted_loss
        precision, drop_non_finite = self.settings.precision, self.settings.drop_non_finite
        half = is_half(loss, precision)
        comes_reduced = self.reducers[0].comes_reduced
        # Divided by its own weight, a loss would have another factor on each rank.
        micro_loss = MicroLoss(loss, half, precision.loss_scale, divides=not comes_reduced)
        reduces = is_last and self.reducers[0].overlaps
        adding = AddMicroBatch(self.reducers, self.parameters, micro_loss.totals(), drop_non_finite, reduces)
        # The gradients of all ranks have one factor, whatever rows each rank has.
        start = BackwardStart.SUM if comes_reduced else backward_start_of(loss, half, eager=True)
        return EagerMicroStep(self.owner, micro_loss, self.parameters, adding, start, is_last)

    def _is_for_thread_pool(self, micro_batches: list[MicroBatch]) -> bool:
        if not micro_batches or not self.may_use_thread_pool:
            return False
        rows, tensors = micro_batches[0]
        positions = pixels(tensors) if has_convolutions(self.network) else rows
        return thread_pool_is_faster(self.cell.parameters, positions, self.cell.jit_config_dict)

    def _compiled(self, structure: Hashable, micro_batches: list[MicroBatch], reduces: bool) -> Compiled:
        """Return the micro step for a structure. Its first batch decides whether the thread pool runs it."""
        key = (structure, reduces)
        if key not in self.by_structure:
            why_not = why_no_graph(structure)
            if why_not:
                remedy = "Give a tuple or a dict, or leave compile out."
                raise ValueError(
                    argument_error(self.owner, "compile", "None for inputs that no graph takes", why_not, remedy)
                )
            pooled = self._is_for_thread_pool(micro_batches)
            build = self._builder(structure, pooled, reduces)
            self.by_structure[key] = Compiled(build, self.owner, "the network", self.network.network)
            if len({known for known, _ in self.by_structure}) == _MANY_STRUCTURES and not reduces:
                warn(
                    f"For '{self.owner}', the inputs must keep their structure and Python values, but got "
                    f"{_MANY_STRUCTURES} different ones, each compiled on its own. Make values that change tensors.",
                )
        return self.by_structure[key]

    def _builder(self, structure: Hashable, pooled: bool, reduces: bool) -> Callable[[], MicroStep]:
        return lambda: self._build(self.network.loss_of(structure), pooled, reduces)

    def _build(self, weighted_loss: WeightedLoss, pooled: bool = False, reduces: bool = False) -> MicroStep:
        precision, drop_non_finite = self.settings.precision, self.settings.drop_non_finite
        cell = build_micro_step(weighted_loss, self.reducers, self.parameters, precision, drop_non_finite, reduces)
        cell.in_thread_pool = pooled
        if hasattr(self, "cell"):
            follow_mode(cell, self.cell)
            cell._get_attr_from_cell(self.cell)  # What `set_jit_config` has said.
        return cell


def _check_reduced(owner: str, network: Any, settings: StepSettings) -> None:
    """Raise for what cannot be done with gradients of all ranks."""
    for name, is_given, rule in (
        ("network", network.is_cached, "one without GradCacheLoss"),
        ("bad_micro_batch", settings.drop_non_finite, "'skip_window'"),
        ("mixed_precision", settings.precision.level != "O0", "None or a loss scale"),
        ("compile", settings.compiles, "None"),
    ):
        if is_given:
            remedy = "Leave it out, and convert a network before hsdp() cuts it."
            rule = f"{rule} where gradients come reduced"
            raise ValueError(argument_error(owner, name, rule, "something else", remedy))


def _tell_of_modes(owner: str, network: Any, adds_batches: bool) -> None:
    """Warn of a network that is in evaluation mode as a whole, in which MindSpore's step leaves it without a word, and
    of a BatchNorm in training."""
    cells = [cell for _, cell in network.network.cells_and_names()]
    norms = [cell.cls_name for cell in cells if isinstance(cell, _BATCH_NORMS) and takes_batch_statistics(cell)]
    has_parts = network.micro_size > 1 or adds_batches
    in_training = any(cell.training for cell in cells)
    if has_parts and norms:
        warn(
            f"For '{owner}', {norms[0]} takes the mean and the variance of each micro batch, and not those of "
            f"the whole batch: that is another training. Use GroupNorm, or freeze its statistics with {FREEZE}."
        )
    idle = [cell.cls_name for cell in cells if isinstance(cell, _TRAINS_ONLY) and follows_mode(cell)]
    if idle and not in_training:
        warn(
            f"For '{owner}', the network is in evaluation mode, in which its {idle[0]} does not do what it does in "
            f"training. Call set_train() of the training step or of the network before the first batch."
        )


def frozen_cell(network: nn.Cell) -> str:
    """Return the name of a cell that was told not to train, apart from the network as a whole, or "" for none."""
    cells = dict(network.cells_and_names())
    in_training = any(cell.training for cell in cells.values())
    whole = len(network.trainable_params())
    # MindSpore sets the phase only of the cell whose set_train was called, not of the cells inside.
    told = [cell for cell in cells.values() if cell.phase == "predict" and not cell.training]
    parts = [] if any(len(cell.trainable_params()) == whole for cell in told) else told
    frozen = {id(inner) for cell in parts for _, inner in cell.cells_and_names()}
    for name, cell in cells.items():
        is_idle = isinstance(cell, _TRAINS_ONLY) and follows_mode(cell) and not cell.training
        if is_idle and (in_training or id(cell) in frozen):
            return f"{cell.cls_name} {name!r}"
    return ""


def follows_mode(cell: nn.Cell) -> bool:
    """Return whether a cell follows its mode. `use_batch_statistics` of a BatchNorm takes precedence."""
    return getattr(cell, "use_batch_statistics", None) is None


def takes_batch_statistics(norm: nn.Cell) -> bool:
    """Return whether a BatchNorm uses the statistics of its batch."""
    return bool(norm.training if follows_mode(norm) else norm.use_batch_statistics)


def _warn_custom_backward(owner: str, network: Any, parameters: Iterable[Parameter], adds_batches: bool) -> None:
    """Warn of code in the backward pass that gets another gradient than in MindSpore's step."""
    hooked = next((parameter.name for parameter in parameters if parameter.hooks()), None)
    if hooked is not None and (network.micro_size > 1 or adds_batches):
        warn(
            f"For '{owner}', the hook of the parameter {hooked!r} must be linear, such as a mask or a factor: it gets "
            f"the gradient of each micro batch, and not that of the whole batch. Clip with clip=ClipByGlobalNorm(1.0) "
            f"or clip=ClipByValue(-1.0, 1.0), for example."
        )
    if adds_batches and NetworkCode(network.network).has_own_backward():
        warn(
            f"For '{owner}', what the network does in the backward pass (a bprop, a hook) must be linear in the "
            f"gradient: in a window of several batches it gets the gradient of each batch, and not that of the window. "
            f"Else give whole batches to GradAccumulation, which splits them."
        )
