"""All that only warns, behind one object. It never changes a training, and an error inside it ends none."""

import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import GradAccumulationWarning, first_line, warn
from ms_gradaccum.advice.ambiguous_inputs import explain_split
from ms_gradaccum.advice.first_batches import FirstBatches
from ms_gradaccum.advice.fixed_rows import explain_fixed_rows
from ms_gradaccum.advice.gradient_exchange import Program
from ms_gradaccum.advice.gradient_watch import GradientWatch
from ms_gradaccum.advice.loss_measurement import LossMeasurement, not_measured
from ms_gradaccum.advice.rank_inputs import FirstInput, warn_of_inputs
from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.advice.skipped_windows import SkippedWindows
from ms_gradaccum.advice.window_watch import WindowWatch
from ms_gradaccum.batch.arguments import Args
from ms_gradaccum.batch.split import SplitBatch
from ms_gradaccum.gradients.buffer import BatchCount
from ms_gradaccum.parallel.reducer import GradientReducer, replicas_of

_MANY_STRUCTURES = 8
_Inputs = ParamSpec("_Inputs")
_Self = TypeVar("_Self", bound="SilentAdvisor")


class SeenBatch(NamedTuple):
    """A batch as a training step shows it to its Advisor."""

    inputs: Args
    split: SplitBatch
    weight: float | None  # The caller's weight of the batch.
    is_last: bool  # True if the batch ends its window.
    is_eager: bool  # True if the network runs op by op.


class AdvisedTraining(NamedTuple):
    """The settings of a training that decide what an Advisor looks at."""

    accumulation_steps: int
    compiles: bool
    is_half: bool  # True if the network computes in 16 bits, or its loss is scaled.
    check_loss: bool


def _harmless(
    hook: Callable[Concatenate[_Self, _Inputs], None],
) -> Callable[Concatenate[_Self, _Inputs], None]:
    """Make a warning of the errors of a hook. A warning that a filter turns into an error stays one."""

    @functools.wraps(hook)
    def guarded(self: _Self, /, *args: _Inputs.args, **kwargs: _Inputs.kwargs) -> None:
        try:
            with np.errstate(all="ignore"):
                hook(self, *args, **kwargs)
        except GradAccumulationWarning:
            raise
        except Exception as error:
            self.tell_of_failure(error)

    return guarded


class SilentAdvisor:
    """The hooks of an Advisor, which warn of nothing. Errors of a batch are explained all the same."""

    # True while a batch may be worth a warning. A batch that runs op by op always may.
    is_on = False
    measurement: LossMeasurement | None = None  # None where nothing is measured, or not any more.
    is_unmeasured = False  # True until a batch was measured, if one should be.
    has_failed = False  # True after the first error inside a hook.

    def __init__(self, owner: str, network: nn.Cell) -> None:
        self.owner = owner
        self.network = network

    def before_batch(self, batch: SeenBatch, make_program: Callable[[], Program]) -> None:
        """Look at a batch that is about to be trained. ``make_program`` returns what adds its gradients."""

    def after_batch(self, outputs: Sequence[Sequence[Tensor]], num_windows: int) -> None:
        """Look at the outputs of the micro steps, after so many windows of the training have ended."""

    def after_gradients(self, grads: Sequence[Tensor]) -> None:
        """Look at gradients that the caller has computed."""

    def after_build(self, num_structures: int) -> None:
        """Learn for how many structures of the inputs a micro step was compiled."""

    def before_update(self) -> None:
        """Look at a full window."""

    def after_skip(self, weight: Tensor, loss_scale: Tensor, searches: bool) -> None:
        """Learn of a window with an overflow. ``searches``: whether the loss scale follows overflows."""

    def after_high_norm(self, norm: Tensor, skip_above: object) -> None:
        """Learn of a window that is skipped because of its norm."""

    def after_empty(self, weight: float, in_a_row: int) -> None:
        """Learn of a window without weight, one of so many in a row."""

    def after_first_inputs(self, firsts: Sequence[FirstInput]) -> None:
        """Look at the first inputs of all ranks. Empty ones stand for those that were looked at before."""

    def begin_anew(self) -> None:
        """Forget the open window, because a state was loaded."""

    def after_split_more(self) -> None:
        """Learn that batches have more micro batches from now on."""

    def before_graph(self) -> None:
        """Look at a network that a larger graph will train."""

    def before_sink(self, inputs: Args, split: SplitBatch) -> None:
        """Look at a batch that a larger graph will train."""

    @_harmless
    def explain(self, error: Exception, inputs: Args, rows: int) -> None:
        """Add hints to the error of a batch. ``rows`` are those of a first micro batch that has failed, or 0."""
        if not explain_split(self.network, error, inputs) and rows:
            explain_fixed_rows(self.network, inputs, rows, error)

    def tell_of_failure(self, error: Exception) -> None:
        """Warn, once, that a hook has failed. Nothing is measured after it."""
        self.measurement = None
        if not self.has_failed:
            self.has_failed = True
            warn(
                f"For '{self.owner}', a check that only warns has failed with "
                f"{type(error).__name__}: {first_line(error)} The training goes on without it; "
                f"please report this error."
            )


class Advisor(SilentAdvisor):
    """Warn of what trains otherwise in micro batches, in the first batches and windows of one network."""

    def __init__(
        self,
        owner: str,
        network: nn.Cell,
        optimizers: Sequence[nn.Cell],
        reducers: Sequence[GradientReducer],
        count: BatchCount,
        training: AdvisedTraining,
    ) -> None:
        super().__init__(owner, network)
        self.is_on = True
        self.count = count
        parameters = replicas_of(reducers)
        self.adds_batches = training.accumulation_steps > 1
        self.first_batches = FirstBatches(
            owner, network, parameters, reducers[0], self.adds_batches
        )
        # The forward pass makes shards whole, which are no changes of the program.
        watched = None if reducers[0].grads_are_reduced else network
        self.watch = WindowWatch(owner, watched, optimizers, count)
        self.gradient_watch = GradientWatch(owner)
        self.skipped_windows = SkippedWindows(owner, [reducer.buffer for reducer in reducers])
        self.make_measurement = functools.partial(
            measurement_of, network, parameters, reducers[0], training
        )
        self.measurement = self.make_measurement()
        self.is_unmeasured = self.measurement is not None
        # The batch that is trained now; None after it, unless it has failed.
        self.batch: SeenBatch | None = None

    @_harmless
    def before_batch(self, batch: SeenBatch, make_program: Callable[[], Program]) -> None:
        follows_failure = self.batch is not None
        self.batch = batch
        self.is_unmeasured = False
        self.first_batches.look(batch.split, batch.is_eager)
        is_first = self.count.get() == 0
        if self.watch.is_on:
            if is_first:
                self.watch.restart()
            self.watch.begin_batch()
        if (
            is_first
            and not follows_failure
            and self.measurement is not None
            and self.measurement.windows < 2
        ):
            self._end_measuring(self.measurement.begin_window(self._rows_of(batch), make_program()))
        if self.measurement is not None:
            self._end_measuring(self.measurement.before_batch())

    @_harmless
    def after_batch(self, outputs: Sequence[Sequence[Tensor]], num_windows: int) -> None:
        batch = self.batch
        self.batch = None
        if batch is None:
            return
        measurement = self.measurement
        if measurement is not None:
            measurement.schedule.end_batch()
            if measurement.is_due and batch.weight != 0.0:
                self._end_measuring(
                    measurement.after_batch(self._rows_of(batch), outputs, num_windows)
                )
        if self.watch.is_on:
            self.watch.end_batch(batch.is_last)
        self._look_on()

    @_harmless
    def after_gradients(self, grads: Sequence[Tensor]) -> None:
        if not self.watch.is_on:
            return
        if self.count.get() == 0:
            self.watch.restart()
        self.watch.begin_batch()
        if self.adds_batches:
            self.gradient_watch.note(grads)
        self.watch.end_batch()

    @_harmless
    def after_build(self, num_structures: int) -> None:
        if num_structures == _MANY_STRUCTURES:
            warn(
                f"For '{self.owner}', the inputs must keep their structure and Python values, but "
                f"got {_MANY_STRUCTURES} different ones, each compiled on its own. Pass changing "
                f"values as tensors."
            )

    @_harmless
    def before_update(self) -> None:
        if self.watch.is_on:
            self.watch.end_window()
            self._look_on()

    @_harmless
    def after_skip(self, weight: Tensor, loss_scale: Tensor, searches: bool) -> None:
        self.skipped_windows.note(weight, loss_scale, searches)

    @_harmless
    def after_high_norm(self, norm: Tensor, skip_above: object) -> None:
        self.skipped_windows.note_high_norm(norm, skip_above)

    @_harmless
    def after_empty(self, weight: float, in_a_row: int) -> None:
        self.skipped_windows.note_empty(weight, in_a_row)

    @_harmless
    def after_first_inputs(self, firsts: Sequence[FirstInput]) -> None:
        warn_of_inputs(self.owner, firsts)

    @_harmless
    def begin_anew(self) -> None:
        self.watch.restart()

    @_harmless
    def after_split_more(self) -> None:
        if self.measurement is None:
            self.measurement = self.make_measurement()
            self.is_on = True

    @_harmless
    def before_graph(self) -> None:
        self.first_batches.look_at_network()
        if self.is_unmeasured:
            warn(not_measured("the step is part of a larger graph"))

    @_harmless
    def before_sink(self, inputs: Args, split: SplitBatch) -> None:
        if self.measurement is not None and self.is_unmeasured:
            self.is_unmeasured = False
            text = self.measurement.before_batch()
            parts = Rows.parts(self.network, inputs, split)
            self._end_measuring(text or self.measurement.measure(parts))

    def _look_on(self) -> None:
        """Decide whether later batches may be worth a warning."""
        self.is_on = self.measurement is not None or self.watch.is_on

    def _end_measuring(self, text: str) -> None:
        """Warn of what the measurement has found, and measure nothing more; go on after an empty text."""
        if text:
            self.measurement = None
            warn(self.network.with_owner(text))

    def _rows_of(self, batch: SeenBatch) -> list[Rows]:
        return Rows.parts(self.network, batch.inputs, batch.split, batch.weight)


def measurement_of(
    network: nn.Cell,
    parameters: Sequence[Parameter],
    reducer: GradientReducer,
    training: AdvisedTraining,
) -> LossMeasurement | None:
    """Return the measurement of a loss that is added up from parts; None if no forward pass may be repeated."""
    adds_parts = network.splits or training.accumulation_steps > 1 or reducer.is_distributed
    # Where a network reduces its gradients itself, its forward passes communicate.
    can_repeat = not (network.needs_all_rows or reducer.grads_are_reduced)
    if not (training.check_loss and adds_parts and can_repeat):
        return None
    return LossMeasurement(
        network, parameters, training.compiles, training.is_half, reducer.is_distributed
    )
