"""The order of an update. No other file knows it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.primitive import _primexpr

from ms_gradaccum._checks import argument_error, warn
from ms_gradaccum.backend.compiled import NOTHING, Compiled, follow_mode, runs_eagerly
from ms_gradaccum.backend.device import device_target
from ms_gradaccum.backend.optimizers import EagerRate, LearningRate, compiles_itself, scale_for
from ms_gradaccum.gradients.buffer import GradientBuffer
from ms_gradaccum.gradients.loss_scaler import NoLossScale
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.update import MeanGradients, Update, build_update

# The limit of consecutive skipped windows. The largest scale in use is 1 after 24 halvings.
MAX_OVERFLOWS = 100


class WindowReport(NamedTuple):
    """Items of the graph of `Report`, by name. Inside graphs they are a plain tuple: strict syntax knows no NamedTuple.

    Attributes:
        is_bad: Whether the loss scale was too large for the window, or for a micro batch that was left out.
        loss, overflow, loss_scale, updated, grad_norm, learning_rate, weight, other_losses: See `StepOutput`.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor
    updated: Tensor
    grad_norm: Tensor
    learning_rate: Tensor
    weight: Tensor
    is_bad: Tensor
    other_losses: Tensor | tuple[Tensor, ...] = ()

    def as_output(self, learning_rate: Tensor) -> StepOutput:
        """Return the report on a window whose gradient is not clipped yet."""
        return StepOutput(
            loss=self.loss,
            overflow=self.overflow,
            loss_scale=self.loss_scale,
            updated=self.updated,
            grad_norm=self.grad_norm,
            clipped_grad_norm=self.grad_norm,
            learning_rate=learning_rate,
            weight=self.weight,
            other_losses=self.other_losses,
        )


class Report(nn.Cell):
    """First half of the end of a window: reduce over ranks, divide by the weight, unscale, finite?, norm."""

    def __init__(
        self, learning_rate: nn.Cell, reducer: GradientReducer, loss_scale: NoLossScale, reduces: bool = True
    ) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = reducer.buffer
        self.reducer = reducer
        self.loss_scale = loss_scale
        # Otherwise the last micro step has done it.
        self.reduces = reduces
        self.learning_rate = learning_rate

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """Return the items of a `WindowReport` once the micro steps behind ``done`` have run."""
        reduced = ops.depend(self.reducer.reduce(), done) if self.reduces else done
        loss = ops.depend(self.buffer.mean_loss(), (reduced, done))
        weight = ops.depend(self.buffer.weight + 0.0, reduced)
        # The norm of the sums is divided, which saves a pass over the gradient.
        norm = ops.depend(self.reducer.norm(tuple(self.reducer.sums)), reduced)
        norm = norm * self.loss_scale.unscaled(self.buffer.reciprocal_weight())
        overflow = bad = ops.logical_not(ops.isfinite(norm))
        # A window without weight (no valid token anywhere) has no mean and makes no update.
        weighs = updated = ops.greater(weight, 0.0)
        if self.loss_scale.skips_overflow:
            updated = ops.logical_and(weighs, ops.logical_not(overflow))
        if self.buffer.dropped is not None:
            bad = ops.logical_or(bad, ops.greater(ops.depend(self.buffer.dropped + 0.0, reduced), 0.0))
            # All of it was left out.
            overflow = ops.logical_or(overflow, ops.logical_and(bad, ops.logical_not(weighs)))
        others = self.buffer.other_losses_after(reduced)
        return (loss, overflow, self.loss_scale.value(), updated, norm, self.learning_rate(), weight, bad, *others)


class OpenWindow(nn.Cell):
    """Report on an open window."""

    def __init__(self, buffer: GradientBuffer, loss_scale: NoLossScale) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer
        self.loss_scale = loss_scale

    def construct(self, done: Any) -> tuple[Tensor, ...]:
        """Return the items of a StepOutput, after ``done``."""
        loss = ops.depend(self.buffer.mean_loss(), done)
        weight = ops.depend(self.buffer.weight + 0.0, done)
        unknown, no = Tensor(math.nan, ms.float32), Tensor(False)
        others = self.buffer.other_losses_after(done)
        return (loss, no, self.loss_scale.value(), no, unknown, unknown, unknown, weight, *others)


class ReportedRate:
    """The learning rate of a compiled optimizer, which the report contains before the update."""

    def __init__(self, rate: LearningRate) -> None:
        self.cell = rate

    def before_update(self, reported: Tensor) -> Tensor:
        """Return ``reported``, the learning rate of the next update."""
        return reported

    @contextmanager
    def recording(self, known: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns ``known``, the learning rate of the update inside."""
        yield lambda: known


class WindowEnd(nn.Cell):
    """The end of a window for one optimizer: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, divide by the weight, unscale, finite?, norm, clip, optimizer, clear, adjust the scale, report.
    """

    def __init__(
        self,
        owner: str,
        optimizer: nn.Cell,
        clip: Any,
        reducer: GradientReducer,
        loss_scale: NoLossScale,
        compiles: bool = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.buffer = reducer.buffer
        self.reducer = reducer
        self.loss_scale = loss_scale
        # True if the optimizer is compiled in PYNATIVE mode, too.
        self.compiles = compiles or compiles_itself(optimizer)
        self.handed_scale = scale_for(owner, optimizer, loss_scale)
        # The keys say whether the optimizer runs op by op.
        rate = LearningRate(optimizer)
        self.rates: dict[bool, Any] = {False: ReportedRate(rate), True: EagerRate(rate)}
        self.report = Report(rate, reducer, loss_scale)
        self.update = Update(optimizer, MeanGradients(clip, reducer, loss_scale, self.handed_scale))
        self.open = OpenWindow(reducer.buffer, loss_scale)
        self.run_open = Compiled(lambda: self.open, owner, "the report on an open window")
        # The keys say whether the sums are reduced already, and whether the learning rate, a user's code, is left out.
        self.reports: dict[tuple[bool, bool], Compiled] = {}
        # The keys are the kind of clip that the caller chooses for each update (None: the window's own), and whether
        # the optimizer runs op by op.
        self.updates: dict[tuple[Any, bool], Any] = {}
        # How many windows in a row a graph has skipped.
        name = f"accu_grads.{reducer.buffer.names[0]}.window_skipped"
        self.skipped = Parameter(Tensor(0, ms.int32), name, requires_grad=False)
        # Errors inside graphs have been tried on CPU alone.
        self.can_raise = device_target() == "CPU"
        self.broken = broken_gradient(owner)
        # True if the loss scale was too large for the last window.
        self.is_bad = Tensor(False)

    def compiled_cells(self) -> list[Any]:
        """Return the compiled cells, which have a mode and settings of their own."""
        compiled = [each for each in self.updates.values() if isinstance(each, Compiled)]
        return [self.open, self.report, self.update, self.loss_scale, *self.reports.values(), *compiled]

    def partial_output(self) -> StepOutput:
        """Return the report on the open window."""
        return StepOutput(*self.run_open(NOTHING))

    def measure(self, reduced: bool = False) -> StepOutput:
        """Run the first half of the end of the window: all but clip, optimizer and clear.

        ``reduced`` is True if the sums are reduced over the ranks already.
        """
        count, known = len(self.update.optimizer.parameters), len(self.reducer.parameters)
        if count != known:
            got, remedy = f"{count} where it had {known}", "Build a new step after add_param_group()."
            raise ValueError(argument_error(self.owner, "optimizer", "one whose parameters stay the same", got, remedy))
        eager = runs_eagerly(self.compiles)
        report = WindowReport(*self._report(reduced, eager)(NOTHING))
        self.is_bad = report.is_bad
        return report.as_output(self.rates[eager].before_update(report.learning_rate))

    def _report(self, reduced: bool, eager: bool) -> Compiled:
        key = reduced, eager
        if key not in self.reports:
            report = Report(self.rates[eager].cell, self.reducer, self.loss_scale, not reduced)
            follow_mode(report, self.report)
            report._get_attr_from_cell(self.report)
            self.reports[key] = Compiled(lambda: report, self.owner, "the report")
        return self.reports[key]

    def finish(self, output: StepOutput, clip: Any = None) -> StepOutput:
        """Run the second half, with the norm and the decision in ``output``. A ``clip`` replaces the window's own."""
        if not output.is_updated:
            self.buffer.clear()
            return output
        limit = () if clip is None else (clip.as_tensor(),)
        eager = runs_eagerly(self.compiles)
        with self.rates[eager].recording(output.learning_rate) as rate:
            clipped_norm = self._update(clip, eager)(output.grad_norm, *limit)
        self.reducer.check_replicas()
        return output._replace(clipped_grad_norm=clipped_norm, learning_rate=rate())

    def adjust(self, output: StepOutput, several: bool = False) -> None:
        """Choose the loss scale of the next window from the ``output`` of this one, of one optimizer or ``several``."""
        bad = self.is_bad
        if several and self.loss_scale.scales:
            # One of the others can have overflowed.
            bad = Tensor(output.has_overflow or bool(bad.asnumpy()))
        self.loss_scale.adjust(output.is_updated, bad)

    def _update(self, clip: nn.Cell | None, eager: bool) -> Any:
        """Return the update with a clip whose limit is an input, so that a new limit needs no new graph."""
        key = None if clip is None else type(clip), eager
        if key not in self.updates:
            update = self.update
            if clip is not None:
                gradients = MeanGradients(clip, self.reducer, self.loss_scale, self.handed_scale)
                update = Update(self.update.optimizer, gradients)
                follow_mode(update, self.update)
                update._get_attr_from_cell(self.update)
            self.updates[key] = build_update(self.owner, update, eager)
        return self.updates[key]

    def after_batch(self, done: Any, batches_of_window: int) -> tuple[Tensor, ...]:
        """Count a batch as part of a graph, after ``done``, and end the window if it has enough batches.

        Return the items of a StepOutput.
        """
        batches = ops.depend(self.buffer.count_batch(), done)
        if batches >= batches_of_window:
            output = self.ended(batches)
        else:
            output = self.open(batches)
        return output

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        return self.ended(done)

    def ended(self, done: Any) -> tuple[Tensor, ...]:
        """End the window as part of a graph, after ``done``. Return the items of a StepOutput.

        A plain tuple: strict graph syntax knows no NamedTuple.
        """
        report: tuple[Tensor, ...] = self.report(done)
        loss, overflow, scale, updated, norm, learning_rate, weight, bad = report[:8]
        if updated:
            clipped_norm = ops.depend(self.update(norm), ops.assign(self.skipped, 0))
        else:
            clipped_norm = ops.depend(norm, self.buffer.clear())
            if self.can_raise:
                in_a_row = ops.assign_add(self.skipped, ops.cast(overflow, ms.int32))
                if in_a_row >= MAX_OVERFLOWS:
                    raise RuntimeError(self.broken)
            else:
                warn_of_no_end()
        clipped_norm = self.update.keep_storage(clipped_norm)
        clipped_norm = ops.depend(clipped_norm, self.loss_scale(updated, bad, clipped_norm))
        output: tuple[Tensor, ...] = (loss, overflow, scale, updated, norm, clipped_norm, learning_rate, weight)
        return output + report[8:]


@_primexpr
def warn_of_no_end() -> None:
    """Warn, while a larger graph is compiled, that nothing in it ends a training that makes no more updates."""
    warn(
        f"For 'TrainOneStepCell', {MAX_OVERFLOWS} windows in a row with an Inf or a NaN should end the training, but "
        f"this device has no errors in a larger graph. Look at the outputs' `overflow`."
    )


def broken_gradient(owner: str) -> str:
    """Return the error of a training that makes no more updates."""
    return (
        f"For '{owner}', one window in {MAX_OVERFLOWS} must have a finite gradient, but got Inf or NaN in each of the "
        f"last {MAX_OVERFLOWS}, which made no update. The weights are those of the last update. Look for NaN in the "
        f"data and the loss, lower the learning rate, or use float32."
    )
