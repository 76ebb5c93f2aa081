"""The order of an update from the host and in a larger graph. A partitioned step has its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.advice.advisor import SilentAdvisor
from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.compiled import (
    NOTHING,
    Compiled,
    Method,
    like_mode,
    runs_eagerly,
    warn_in_graph,
)
from ms_gradaccum.backend.device import graphs_can_raise
from ms_gradaccum.backend.optimizer_progress import OptimizerProgress
from ms_gradaccum.backend.optimizers import LearningRate, compiles_itself, needs_call
from ms_gradaccum.backend.tensors import Done
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput, items_of, with_all_rates, with_one_norm
from ms_gradaccum.training.update import EagerUpdate, Update

# The limit of consecutive skipped windows. After 24 halvings, the largest loss scale in use is 1.
MAX_OVERFLOWS = 100


def unraised(owner: str) -> str:
    """Return the warning of a graph that cannot raise the error of `broken_gradient`."""
    return (
        f"For '{owner}', this device cannot raise errors in a larger graph, so {MAX_OVERFLOWS} "
        f"windows in a row with an Inf or a NaN do not end the training. Watch the outputs' "
        f"`overflow`."
    )


class WindowReduction(nn.Cell):
    """The first half of the end of a window: reduce the sums over the ranks, and report on them."""

    def __init__(
        self, optimizer: nn.Cell, reducer: GradientReducer, settings: StepSettings
    ) -> None:
        super().__init__(auto_prefix=False)
        owner = settings.owner
        self.reducer = reducer
        self.buffer = reducer.buffer
        self.loss_scale = settings.precision.loss_scale
        self.learning_rate = LearningRate(optimizer)
        # The graph contains the learning rate, which is user code, unless the optimizer runs op by op.
        self.compiled_report = Compiled(lambda: Method(self, "report", True), owner, "the report")
        self.compiled_report_without_rate = Compiled(
            lambda: Method(self, "report", False), owner, "the report"
        )
        self.compiled_partial_report = Compiled(
            lambda: Method(self, "partial_report"), owner, "the report"
        )

    def reduce_and_report(self, has_rate: bool, done: Done) -> tuple[Tensor, dict[str, Tensor]]:
        """Reduce the sums. Return True for a loss scale that was too large, and the report by name."""
        reduced = ops.depend(self.reducer.reduce(), done)
        norm = ops.depend(self.reducer.norm(tuple(self.reducer.sums)), reduced)
        rate = Tensor(math.nan, ms.float32)
        if has_rate:
            rate = self.learning_rate()
        reduced = reduced, done
        inverse = ops.depend(self.buffer.reciprocal_weight(), reduced)
        loss = ops.depend(self.buffer.loss * inverse, reduced)
        weight = ops.depend(self.buffer.weight + 0.0, reduced)
        # Divide the norm of the sums by the weight, which saves a pass over the gradient.
        norm = norm * self.loss_scale.unscaled(inverse)
        overflow, updated = decide(norm, weight, self.loss_scale.skips_overflow)
        bad = overflow
        if self.buffer.dropped is not None:
            dropped = ops.depend(self.buffer.dropped + 0.0, reduced)
            bad = ops.logical_or(bad, ops.greater(dropped, 0.0))
            has_no_weight = ops.logical_not(ops.greater(weight, 0.0))
            # All micro batches were dropped.
            overflow = ops.logical_or(overflow, ops.logical_and(bad, has_no_weight))
        report = {
            "loss": loss,
            "overflow": overflow,
            "loss_scale": self.loss_scale.value(),
            "updated": updated,
            "grad_norm": norm,
            "clipped_grad_norm": norm,
            "learning_rate": rate,
            "weight": weight,
        }
        return bad, report

    def report(self, has_rate: bool, done: Done) -> Tensors:
        """Return what `reduce_and_report` does as a flat tuple, for the host."""
        bad, report = self.reduce_and_report(has_rate, done)
        return (bad, *items_of(report, self.buffer.other_losses_after(report["weight"])))

    def partial_report(self, done: Done) -> Tensors:
        """Return the items of a StepOutput for the open window, after ``done``."""
        loss = ops.depend(self.buffer.loss * self.buffer.reciprocal_weight(), done)
        weight = ops.depend(self.buffer.weight + 0.0, done)
        no = Tensor(False)
        report = {
            "loss": loss,
            "overflow": no,
            "loss_scale": self.loss_scale.value(),
            "updated": no,
            "weight": weight,
        }
        return items_of(report, self.buffer.other_losses_after(done))


class WindowEnd(nn.Cell):
    """The end of a window for one optimizer: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, norm of the mean, finite?, too large?, divide by the weight, unscale, clip, optimizer, clear,
    adjust scale.

    From the host, `reduce` and `finish` each run one half as a graph, and Python reads the decision in between.
    In a larger graph, `construct` runs both halves, and the decision is a branch.
    """

    def __init__(
        self, optimizer: nn.Cell, reducer: GradientReducer, settings: StepSettings
    ) -> None:
        super().__init__(auto_prefix=False)
        self.settings = settings
        self.norm_limit = settings.norm_limit
        self.reducer = reducer
        self.reduction = WindowReduction(optimizer, reducer, settings)
        self.progress = OptimizerProgress(optimizer)
        self.update = Update(optimizer, reducer, settings)
        # In PYNATIVE mode, too, but not a clip of the program.
        self.compiles = settings.compiles or (
            compiles_itself(optimizer) and not settings.clip.is_own
        )
        # The updates, each built for the first window that needs it. The keys are the type of the caller's clip, and a
        # flag for an `EagerUpdate`. Without a clip of the caller it is the type of None.
        self.updates: dict[tuple[type, bool], Compiled | EagerUpdate] = {}
        # Called after each update that the optimizer has made.
        self.followers: list[Callable[[], None]] = []
        # The number of windows in a row that a graph has skipped.
        name = f"accu_grads.{reducer.buffer.names[0]}.window_skipped"
        self.skipped = Parameter(Tensor(0, ms.int32), name, requires_grad=False)
        self.can_raise = graphs_can_raise()
        # A graph ends a training of skipped windows with this error, or warns that it cannot.
        self.message = broken_gradient(settings.owner)
        if not self.can_raise:
            self.message = unraised(settings.owner)

    def after_batch(self, done: Done, batches_of_window: int) -> Tensors:
        """Count a batch as part of a graph, after ``done``, and end a full window. Return the items of a StepOutput."""
        batches = ops.depend(self.reducer.buffer.count_batch(), done)
        if batches >= batches_of_window:
            output = self.construct(batches)
        else:
            output = self.reduction.partial_report(batches)
        return output

    def construct(self, done: Done) -> Tensors:
        """End the window as part of a graph, after ``done``. Return the items of a StepOutput."""
        bad, report = self.reduction.reduce_and_report(True, done)
        others = self.reducer.buffer.other_losses_after(report["weight"])
        before = ops.depend(self.progress.count + 0, (items_of(report), others))
        norm = report["grad_norm"]
        overflow = report["overflow"]
        updated = self.norm_limit(norm, report["updated"])
        if updated:
            clipped_norm = ops.depend(self.update(norm), ops.assign(self.skipped, 0))
        else:
            clipped_norm = ops.depend(norm, self.reducer.buffer.clear())
            if self.can_raise:
                in_a_row = ops.assign_add(self.skipped, ops.cast(overflow, ms.int32))
                if in_a_row >= MAX_OVERFLOWS:
                    raise RuntimeError(self.message)
            else:
                warn_in_graph(self.message)
        clipped_norm = self.update.keep_storage(clipped_norm)
        clipped_norm = ops.depend(
            clipped_norm, self.reduction.loss_scale(updated, bad, clipped_norm)
        )
        if self.progress.may_leave_out:
            updated = self.progress(updated, before, clipped_norm)
        report["updated"] = updated
        report["clipped_grad_norm"] = clipped_norm
        return items_of(report, others)

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        reduction = self.reduction
        return [
            self,
            self.update,
            reduction,
            reduction.compiled_report,
            reduction.compiled_report_without_rate,
            reduction.compiled_partial_report,
            *(each for each in self.updates.values() if isinstance(each, Compiled)),
        ]

    def reduce(self) -> tuple[Tensor, StepOutput]:
        """Run the first half from the host. Return whether the loss scale was too large, and the report."""
        count = len(self.update.optimizer.parameters)
        known = len(self.reducer.parameters)
        if count != known:
            raise ValueError(
                f"For '{self.settings.owner}', the argument 'optimizer' must keep its {known} "
                f"parameters, but got {count}. Build a new step after add_param_group()."
            )
        if runs_eagerly(self.compiles):
            is_bad, *items = self.reduction.compiled_report_without_rate(NOTHING)
            rate = self.reduction.learning_rate.before_update()
            return is_bad, StepOutput(*items)._replace(learning_rate=rate)
        is_bad, *items = self.reduction.compiled_report(NOTHING)
        return is_bad, StepOutput(*items)

    def finish(self, output: StepOutput, clip: Clip | None = None) -> StepOutput:
        """Run the second half of an update, with the norm in ``output``. A ``clip`` replaces the window's own."""
        inputs = [output.grad_norm]
        if clip is not None:
            inputs += clip.inputs()
        is_eager = runs_eagerly(self.compiles)
        run = self.updates.get((type(clip), is_eager)) or self._build(clip, is_eager)
        rate = output.learning_rate
        before = self.progress.snapshot() if self.progress.may_leave_out else None
        if is_eager and self.reduction.learning_rate.is_recorded:
            with self.reduction.learning_rate.recording() as recorded:
                clipped_norm = run(*inputs)
            rate = recorded()
        else:
            clipped_norm = run(*inputs)
        if self.reducer.is_distributed:
            self.reducer.check_replicas()
        if before is None or self.progress.has_updated(before, output.grad_norm, rate):
            for follow in self.followers:
                follow()
        else:
            output = output._replace(updated=Tensor(False))
        return output._replace(clipped_grad_norm=clipped_norm, learning_rate=rate)

    def _build(self, clip: Clip | None, is_eager: bool) -> Compiled | EagerUpdate:
        """Build the update of a window with this clip of the caller."""
        update = self.update
        if clip is not None:
            update = Update(update.optimizer, self.reducer, replace(self.settings, clip=clip))
            like_mode(update, self.update)
        update.needs_call = needs_call(update.optimizer)
        built: Compiled | EagerUpdate
        if is_eager:
            built = EagerUpdate(self.settings.owner, update)
        else:
            built = Compiled(lambda: update, self.settings.owner, "the optimizer")
        self.updates[type(clip), is_eager] = built
        return built


class FullWindow(NamedTuple):
    """A full window whose sums are reduced over the ranks, before its update."""

    outputs: list[StepOutput]  # One for each optimizer.
    is_bad: Tensor  # True if the loss scale was too large, also for a micro batch that was dropped.
    clip: Clip | None = None  # The caller's, in place of that of the settings.


class WindowEnds:
    """The ends of a window for all optimizers of its network, with one norm, one decision and one loss scale."""

    overflows_in_a_row = 0
    empty_in_a_row = 0  # The number of windows without weight since the last update.

    def __init__(
        self,
        optimizers: Sequence[nn.Cell],
        reducers: Sequence[GradientReducer],
        settings: StepSettings,
        advisor: SilentAdvisor,
    ) -> None:
        self.reducers = reducers
        self.settings = settings
        self.advisor = advisor
        self.of_optimizers = [
            WindowEnd(optimizer, each, settings) for optimizer, each in zip(optimizers, reducers)
        ]

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        cells: list[nn.Cell | Compiled] = []
        for end in self.of_optimizers:
            cells += end.compiled_cells()
        return cells

    def partial_output(self) -> StepOutput:
        return StepOutput(*self.of_optimizers[0].reduction.compiled_partial_report(NOTHING))

    def reduce(self) -> FullWindow:
        """Reduce the sums of a full window."""
        if self.reducers[0].grads_are_reduced:
            self.reducers[0].check_window(self.settings.owner)
        is_bad, output = self.of_optimizers[0].reduce()
        outputs = [output]
        for end in self.of_optimizers[1:]:
            outputs.append(end.reduce()[1])
        if len(outputs) > 1:
            outputs = with_one_norm(outputs)
        if len(outputs) > 1 and self.settings.precision.loss_scale.searches:
            # Another one may have an overflow.
            is_bad = Tensor(outputs[0].has_overflow or bool(is_bad.asnumpy()))
        limit = self.settings.norm_limit
        if limit.given is not None:
            updated = limit.run(outputs[0].grad_norm, outputs[0].updated)
            outputs = [output._replace(updated=updated) for output in outputs]
        return FullWindow(outputs, is_bad)

    def finish(self, window: FullWindow) -> StepOutput:
        """Update or skip the window, and clear the buffers. Return the report."""
        updated = window.outputs[0].is_updated
        if updated:
            window = window._replace(outputs=self._update(window))
        else:
            window = self._skip(window)
        loss_scale = self.settings.precision.loss_scale
        if loss_scale.searches:
            loss_scale.adjust(updated, window.is_bad)
        outputs = window.outputs
        if updated:
            self.overflows_in_a_row = 0
            self.empty_in_a_row = 0
        elif outputs[0].has_overflow:
            self.overflows_in_a_row += 1
        if self.overflows_in_a_row >= MAX_OVERFLOWS:
            # No smaller loss scale can repair such a gradient.
            self.overflows_in_a_row = 0
            raise RuntimeError(broken_gradient(self.settings.owner))
        if len(outputs) == 1:
            return outputs[0]
        return with_all_rates(outputs, not (window.clip or self.settings.clip).has_one_factor)

    def _update(self, window: FullWindow) -> list[StepOutput]:
        """Run the optimizers. Return their reports."""
        outputs: list[StepOutput] = []
        try:
            for end, report in zip(self.of_optimizers, window.outputs):
                outputs.append(end.finish(report, window.clip))
        except BaseException:
            if outputs:
                warn(
                    f"For '{self.settings.owner}', the update of optimizer {len(outputs) + 1} of "
                    f"{len(self.of_optimizers)} failed after those before it, and the window is "
                    f"lost. Load an earlier state."
                )
            raise
        return outputs

    def _skip(self, window: FullWindow) -> FullWindow:
        """Clear the buffers without an update. Return the window as it is reported."""
        first = window.outputs[0]
        weight = float(first.weight.asnumpy())
        if self.reducers[0].is_distributed and weight == -math.inf:
            warn(
                f"For '{self.settings.owner}', a batch failed on one of the ranks, so all ranks "
                f"discard this window. See the log of that rank."
            )
            zero = Tensor(0.0, ms.float32)
            nothing = {
                "overflow": Tensor(False),
                "weight": zero,
                "loss": Tensor(math.nan, ms.float32),
                "grad_norm": zero,
                "clipped_grad_norm": zero,
            }
            outputs = [output._replace(**nothing) for output in window.outputs]
            window = window._replace(outputs=outputs, is_bad=Tensor(False))
        elif first.has_overflow:
            self.advisor.after_skip(
                first.weight, first.loss_scale, self.settings.precision.loss_scale.searches
            )
        elif weight > 0:  # Only the limit of the norm is left as a reason.
            self.advisor.after_high_norm(first.grad_norm, self.settings.norm_limit.given)
        else:
            self.empty_in_a_row += 1
            self.advisor.after_empty(weight, self.empty_in_a_row)
        for reducer in self.reducers:
            reducer.buffer.clear()
        return window


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
        f"For '{owner}', the gradient was Inf or NaN in each of the last {MAX_OVERFLOWS} windows, "
        f"and none of them made an update. The weights are those of the last update. Look for NaN "
        f"in the data and the loss, lower the learning rate, or use float32."
    )
