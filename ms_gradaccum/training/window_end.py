"""The order of an update, which only this file defines."""

import math
from dataclasses import replace

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, like_mode, runs_eagerly
from ms_gradaccum.backend.device import graphs_can_raise
from ms_gradaccum.backend.in_graph import warn_in_graph
from ms_gradaccum.backend.optimizer_progress import OptimizerProgress
from ms_gradaccum.backend.optimizers import LearningRate, compiles_itself, needs_call, optimizers_in, scale_for
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput, items_of
from ms_gradaccum.training.update import EagerUpdate, Update

# The limit of consecutive skipped windows. After 24 halvings, the largest loss scale in use is 1.
MAX_OVERFLOWS = 100
NO_END = (
    f"For 'TrainOneStepCell', {MAX_OVERFLOWS} windows in a row with an Inf or a NaN should end the training, but this "
    f"device has no errors in a larger graph. Look at the outputs' `overflow`."
)


class WindowEnd(nn.Cell):
    """The end of a window for one optimizer: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, divide by the weight, unscale, finite?, norm, clip, optimizer, clear, adjust the scale, report.

    From the host, `reduce` and `finish` each run one half as a graph, and Python reads the decision in between.
    In a larger graph, `construct` runs both halves, and the decision is a branch.
    """

    def __init__(self, optimizer: nn.Cell, reducer: GradientReducer, settings: StepSettings) -> None:
        super().__init__(auto_prefix=False)
        self.settings, self.owner, self.loss_scale = settings, settings.owner, settings.precision.loss_scale
        self.reducer, self.buffer = reducer, reducer.buffer
        # In PYNATIVE mode, too.
        self.compiles = settings.compiles or compiles_itself(optimizer)
        self.learning_rate = LearningRate(optimizer)
        self.progress = OptimizerProgress(optimizer)
        self.eager = False  # True if the optimizer runs op by op in the current window.
        self.has_updated = True  # False if the optimizer has left out its last update.
        self.update = Update(optimizer, reducer, settings, scale_for(self.owner, optimizer, self.loss_scale))
        self.compiled_partial_report = Compiled(lambda: Method(self, "partial_report"), self.owner, "the report")
        # The keys are flags: the graph contains the learning rate, which is user code.
        self.reports: dict[bool, Compiled] = {}
        # The keys are the kind of the caller's clip (None: the window's own), and a flag for an `EagerUpdate`.
        self.updates: dict[tuple[type | None, bool], Compiled | EagerUpdate] = {}
        # The number of windows in a row that a graph has skipped.
        name = f"accu_grads.{reducer.buffer.names[0]}.window_skipped"
        self.skipped = Parameter(Tensor(0, ms.int32), name, requires_grad=False)
        self.can_raise = graphs_can_raise()
        self.broken = broken_gradient(self.owner)
        # True if the loss scale was too large for the last window, or for a micro batch that was dropped.
        self.is_bad = Tensor(False)

    def measure(self, has_rate: bool, done: Done) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the first half in a graph. Return True for a loss scale that was too large, and the report by name."""
        reduced = ops.depend(self.reducer.reduce(), done)
        norm = ops.depend(self.reducer.norm(tuple(self.reducer.sums)), reduced)
        rate = self.learning_rate() if has_rate else Tensor(math.nan, ms.float32)
        reduced = reduced, done
        inverse = ops.depend(self.buffer.reciprocal_weight(), reduced)
        loss = ops.depend(self.buffer.loss * inverse, reduced)
        weight = ops.depend(self.buffer.weight + 0.0, reduced)
        # Divide the norm of the sums by the weight, which saves a pass over the gradient.
        norm = norm * self.loss_scale.unscaled(inverse)
        overflow, updated = decide(norm, weight, self.loss_scale.skips_overflow)
        bad = overflow
        if self.buffer.dropped is not None:
            bad = ops.logical_or(bad, ops.greater(ops.depend(self.buffer.dropped + 0.0, reduced), 0.0))
            # All micro batches were dropped.
            overflow = ops.logical_or(overflow, ops.logical_and(bad, ops.logical_not(ops.greater(weight, 0.0))))
        report = {"loss": loss, "overflow": overflow, "loss_scale": self.loss_scale.value(), "updated": updated}
        report["grad_norm"] = norm
        report["clipped_grad_norm"] = norm
        report["learning_rate"] = rate
        report["weight"] = weight
        return bad, report

    def report(self, has_rate: bool, done: Done) -> tuple[Tensor, ...]:
        """Return what `measure` does as a flat tuple, for the host."""
        bad, report = self.measure(has_rate, done)
        return (bad, *items_of(report, self.buffer.other_losses_after(report["weight"])))

    def partial_report(self, done: Done) -> tuple[Tensor, ...]:
        """Return the items of a StepOutput for the open window, after ``done``."""
        loss = ops.depend(self.buffer.loss * self.buffer.reciprocal_weight(), done)
        weight = ops.depend(self.buffer.weight + 0.0, done)
        no = Tensor(False)
        report = {"loss": loss, "overflow": no, "loss_scale": self.loss_scale.value(), "updated": no, "weight": weight}
        return items_of(report, self.buffer.other_losses_after(done))

    def run_partial_report(self) -> StepOutput:
        """Return `partial_report` from the host."""
        return StepOutput(*self.compiled_partial_report(NOTHING))

    def after_batch(self, done: Done, batches_of_window: int) -> tuple[Tensor, ...]:
        """Count a batch as part of a graph, after ``done``, and end a full window. Return the items of a StepOutput."""
        batches = ops.depend(self.buffer.count_batch(), done)
        if batches >= batches_of_window:
            output = self.construct(batches)
        else:
            output = self.partial_report(batches)
        return output

    def construct(self, done: Done) -> tuple[Tensor, ...]:
        """End the window as part of a graph, after ``done``. Return the items of a StepOutput."""
        bad, report = self.measure(True, done)
        others = self.buffer.other_losses_after(report["weight"])
        before = ops.depend(self.progress.count + 0, (items_of(report), others))
        norm = report["grad_norm"]
        overflow = report["overflow"]
        updated = report["updated"]
        if updated:
            clipped_norm = ops.depend(self.update(norm), ops.assign(self.skipped, 0))
        else:
            clipped_norm = ops.depend(norm, self.buffer.clear())
            if self.can_raise:
                in_a_row = ops.assign_add(self.skipped, ops.cast(overflow, ms.int32))
                if in_a_row >= MAX_OVERFLOWS:
                    raise RuntimeError(self.broken)
            else:
                warn_in_graph(NO_END)
        clipped_norm = self.update.keep_storage(clipped_norm)
        clipped_norm = ops.depend(clipped_norm, self.loss_scale(updated, bad, clipped_norm))
        if self.progress.may_leave_out:
            updated = self.progress(updated, before, clipped_norm)
        report["updated"] = updated
        report["clipped_grad_norm"] = clipped_norm
        return items_of(report, others)

    def runs(self, optimizer: nn.Cell) -> bool:
        """Return whether this end runs ``optimizer``, maybe inside another one."""
        return any(optimizer is each for each in optimizers_in(self.update.optimizer))

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        updates = [each for each in self.updates.values() if isinstance(each, Compiled)]
        return [self, self.update, self.compiled_partial_report, *self.reports.values(), *updates]

    def reduce(self) -> StepOutput:
        """Run the first half from the host."""
        count, known = len(self.update.optimizer.parameters), len(self.reducer.parameters)
        if count != known:
            got, remedy = f"{count} where it had {known}", "Build a new step after add_param_group()."
            raise ValueError(argument_error(self.owner, "optimizer", "one whose parameters stay the same", got, remedy))
        self.eager = runs_eagerly(self.compiles)
        has_rate = not self.eager
        if has_rate not in self.reports:
            self.reports[has_rate] = Compiled(lambda: Method(self, "report", has_rate), self.owner, "the report")
        self.is_bad, *items = self.reports[has_rate](NOTHING)
        output = StepOutput(*items)
        return output._replace(learning_rate=self.learning_rate.before_update()) if self.eager else output

    def finish(self, output: StepOutput, clip: Clip | None = None) -> StepOutput:
        """Run the second half of an update, with the norm in ``output``. A ``clip`` replaces the window's own."""
        limit = () if clip is None else clip.inputs()
        key = None if clip is None else type(clip), self.eager
        if key not in self.updates:
            update = self.update
            if clip is not None:
                settings = replace(self.settings, clip=clip)
                update = Update(update.optimizer, self.reducer, settings, update.handed_scale)
                like_mode(update, self.update)
            update.needs_call = needs_call(update.optimizer)
            if self.eager:
                self.updates[key] = EagerUpdate(self.owner, update)
            else:
                self.updates[key] = Compiled(lambda: update, self.owner, "the optimizer")
        run, rate = self.updates[key], output.learning_rate
        before = self.progress.snapshot() if self.progress.may_leave_out else None
        if self.eager and self.learning_rate.is_recorded:
            with self.learning_rate.recording() as recorded:
                clipped_norm = run(output.grad_norm, *limit)
            rate = recorded()
        else:
            clipped_norm = run(output.grad_norm, *limit)
        if self.reducer.is_distributed:
            self.reducer.check_replicas()
        self.has_updated = before is None or self.progress.has_updated(before, output.grad_norm, rate)
        if not self.has_updated:
            output = output._replace(updated=Tensor(False))
        return output._replace(clipped_grad_norm=clipped_norm, learning_rate=rate)


def decide(norm: Tensor, weight: Tensor, skips_overflow: bool) -> tuple[Tensor, Tensor]:
    """Return whether a window with this norm has an overflow, and whether to update, as part of a graph."""
    overflow = ops.logical_not(ops.isfinite(norm))
    # A window without weight (no valid token anywhere) has no mean and makes no update.
    updated = ops.greater(weight, 0.0)
    if skips_overflow:
        updated = ops.logical_and(updated, ops.logical_not(overflow))
    return overflow, updated


def broken_gradient(owner: str) -> str:
    """Return the error text for a training that makes no more updates."""
    return (
        f"For '{owner}', one window in {MAX_OVERFLOWS} must have a finite gradient, but got Inf or NaN in each of the "
        f"last {MAX_OVERFLOWS}, which made no update. The weights are those of the last update. Look for NaN in the "
        f"data and the loss, lower the learning rate, or use float32."
    )
