"""The order of an update. No other file knows it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum.compiled import NOTHING, Compiled
from ms_gradaccum.grad_buffer import GradBuffer, reciprocal
from ms_gradaccum.grad_clip import as_dtype
from ms_gradaccum.kernels import add_in_place
from ms_gradaccum.loss_scale import NoLossScale
from ms_gradaccum.optimizers import LearningRate, all_parameters, may_have_branches
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.runs import once, run_of
from ms_gradaccum.step_output import StepOutput
from ms_gradaccum.window_clip import clip_of

# Windows that may be skipped one after the other. The largest scale in use is 1 after 24 halvings.
MAX_OVERFLOWS = 100


_add_part = ops.MultitypeFuncGraph("add_part")


@_add_part.register("Tensor", "Tensor", "Tensor")
def _add_one_part(factor: Tensor, total: Parameter, part: Parameter) -> Tensor:
    return add_in_place(total, part * factor)


class FoldTerms(nn.Cell):
    """Make one sum of those of a loss's terms, each divided by its own weight over all ranks.

    The weight of the window is then that of the first term, or 1 if nothing has any of it.
    """

    def __init__(self, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel
        self.map = ops.HyperMap()

    def construct(self) -> Any:
        buffer = self.buffer
        weights: tuple[Tensor, ...] = (buffer.weight + 0.0,)
        for other in buffer.others:
            weights += (other.weight + 0.0,)
        totals = ops.unstack(self.parallel.total(ops.stack(weights)))
        weightless = totals[0] == 0.0
        scale = ops.select(weightless, ops.ones_like(totals[0]), totals[0])
        done: Any = ()
        for i, other in enumerate(buffer.others):
            factor = reciprocal(totals[i + 1]) * scale
            for begin, end in buffer.runs:
                factor = once(factor, done)
                done = self.map(
                    ops.partial(_add_part, factor), run_of(buffer.sums, begin, end), run_of(other.sums, begin, end)
                )
            done = ops.assign_add(buffer.loss, other.loss * once(factor, done))
            done = other.clear_term(done)
        # One process stands in for the missing weight.
        stand_in = ops.cast(ops.greater(ops.addn(totals), 0.0), ms.float32) * self.parallel.is_first
        return ops.assign(buffer.weight, ops.select(weightless, stand_in, ops.depend(weights[0], done)))


class Report(nn.Cell):
    """First half of the end of a window: reduce over ranks, divide by the weight, unscale, finite?, norm."""

    def __init__(
        self, optimizer: nn.Cell, parallel: SingleProcess, loss_scale: NoLossScale, reduces: bool = True
    ) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel
        self.loss_scale = loss_scale
        # Otherwise the last micro step has done it.
        self.reduces = reduces
        self.fold_terms = FoldTerms(parallel) if len(parallel.buffer.others) > 0 else None
        self.learning_rate = LearningRate(optimizer)

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """Report on the window once the micro steps behind ``done`` have run.

        The last item says whether the loss scale was too large for it, or for a micro batch that was left out.
        """
        if self.fold_terms is not None:
            done = ops.depend(done, self.fold_terms())
        reduced = ops.depend(self.parallel.reduce(), done) if self.reduces else done
        loss = ops.depend(self.buffer.mean_loss(), (reduced, done))
        weight = ops.depend(self.buffer.weight + 0.0, reduced)
        # Of the sums, then divided: that saves a pass over the gradient.
        norm = ops.depend(self.parallel.norm(tuple(self.parallel.sums)), reduced)
        norm = norm * self.loss_scale.unscaled(self.buffer.reciprocal_weight())
        overflow = bad = ops.logical_not(ops.isfinite(norm))
        # A window that weighs nothing (no valid token anywhere) has no mean and makes no update.
        weighs = updated = ops.greater(weight, 0.0)
        if self.loss_scale.skips_overflow:
            updated = ops.logical_and(weighs, ops.logical_not(overflow))
        if self.buffer.dropped is not None:
            bad = ops.logical_or(bad, ops.greater(ops.depend(self.buffer.dropped + 0.0, reduced), 0.0))
            # All of it was left out.
            overflow = ops.logical_or(overflow, ops.logical_and(bad, ops.logical_not(weighs)))
        return loss, overflow, self.loss_scale.value(), updated, norm, self.learning_rate(), weight, bad


_look_at = ops.MultitypeFuncGraph("look_at")


@_look_at.register("Tensor", "Tensor")
def _look_at_one(value: Tensor, parameter: Tensor) -> Tensor:
    return ops.expand_dims(ops.depend(parameter, value), 0)


_as_weight = ops.MultitypeFuncGraph("as_weight")


@_as_weight.register("Tensor", "Tensor")
def _as_one_weight(grad: Tensor, weight: Tensor) -> Tensor:
    return as_dtype(grad, weight.dtype)


class Update(nn.Cell):
    """Second half of the end of a window: clip, optimizer, clear."""

    def __init__(self, optimizer: nn.Cell, clip: Any, parallel: SingleProcess, loss_scale: NoLossScale) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.loss_scale = loss_scale
        self.optimizer = optimizer
        self.clip = clip_of(clip, parallel.buffer.names, parallel)
        self.parallel = parallel
        self.parameters = all_parameters(optimizer)
        self.has_branches = may_have_branches(optimizer)
        self.map = ops.HyperMap()

    def construct(self, norm: Tensor, *limit: Tensor) -> Tensor:
        """Update with the mean gradient, whose norm is ``norm``, and return the norm after clipping.

        A ``limit`` is what it is clipped to, if not what the clip says.
        """
        factor = self.loss_scale.unscaled(self.buffer.reciprocal_weight())
        grads = self.clip(factor, norm, *limit)
        clipped_norm = self.clip.norm_after(norm, *limit)
        if clipped_norm is None:
            clipped_norm = self.parallel.norm(grads)
        ready = self.map(_as_weight, self.parallel.for_optimizer(grads), self.parallel.weights)
        ready = ops.depend(ready, self.parallel.before_update())
        updated = self.parallel.after_update(self.optimizer(ready))
        clipped_norm = ops.depend(clipped_norm, self.buffer.clear(updated))
        return self.touch(clipped_norm) if self.has_branches else clipped_norm

    def touch(self, value: Tensor) -> Tensor:
        """Return ``value``, having looked at all parameters of the optimizer.

        One that a graph uses in a branch alone, as some optimizers do, keeps its old storage when a checkpoint is
        loaded. After the update: the compiler copies what is looked at before it changes. Each look waits for each
        change, so this takes the square of the parameters.
        """
        value = once(value, ())
        return ops.depend(value, self.map(ops.partial(_look_at, value), self.parameters))


class OpenWindow(nn.Cell):
    """What is reported of a window that goes on."""

    def __init__(self, buffer: GradBuffer, loss_scale: NoLossScale) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer
        self.loss_scale = loss_scale

    def construct(self, done: Any) -> tuple[Tensor, ...]:
        """Return the items of a StepOutput, after ``done``."""
        loss = ops.depend(self.buffer.mean_loss(), done)
        weight = ops.depend(self.buffer.weight + 0.0, done)
        unknown, no = Tensor(math.nan, ms.float32), Tensor(False)
        return (loss, no, self.loss_scale.value(), no, unknown, unknown, unknown, weight)


class Window(nn.Cell):
    """The end of a window: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, divide by the weight, unscale, finite?, norm, clip, optimizer, clear, adjust the scale, report.
    """

    def __init__(self, optimizer: nn.Cell, clip: Any, parallel: SingleProcess, loss_scale: NoLossScale) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel
        self.loss_scale = loss_scale
        self.report = Report(optimizer, parallel, loss_scale)
        self.report_reduced = Report(optimizer, parallel, loss_scale, reduces=False)
        self.run_report_reduced = Compiled(lambda: self.report_reduced, "TrainOneStepCell", "the report")
        self.update = Update(optimizer, clip, parallel, loss_scale)
        self.open = OpenWindow(parallel.buffer, loss_scale)
        self.run_open = Compiled(lambda: self.open, "TrainOneStepCell", "the report on an open window")
        self.run_report = Compiled(lambda: self.report, "TrainOneStepCell", "the report")
        self.run_update = Compiled(lambda: self.update, "TrainOneStepCell", "the optimizer")
        # For clips that the caller chooses anew at each update, by kind.
        self.other_updates: dict[type, Compiled] = {}
        # Whether the loss scale was too large for the window that was measured last.
        self.is_bad = Tensor(False)
        self.overflows_in_a_row = 0

    def compiled_cells(self) -> list[Any]:
        """Return what has a mode and settings of its own."""
        return [self.open, self.report, self.report_reduced, self.update, self.loss_scale, *self.other_updates.values()]

    def so_far(self) -> StepOutput:
        """Report on the window that goes on."""
        return StepOutput(*self.run_open(NOTHING))

    def close(self, reduced: bool = False) -> StepOutput:
        """End the window from the host, with the decision whether to update made in Python."""
        output = self.finish(self.measure(reduced))
        self.adjust(output)
        return output

    def measure(self, reduced: bool = False) -> StepOutput:
        """Do the first half of the end of the window: all but clip, optimizer and clear.

        ``reduced`` is whether the sums are those of all ranks already.
        """
        with self._emptied_if_it_fails():
            *items, self.is_bad = (self.run_report_reduced if reduced else self.run_report)(NOTHING)
        loss, overflow, scale, updated, norm, learning_rate, weight = items
        return StepOutput(loss, overflow, scale, updated, norm, norm, learning_rate, weight)

    def finish(self, output: StepOutput, clip: Any = None) -> StepOutput:
        """Do the second half, with the norm and the decision in ``output``; ``clip`` replaces the window's own."""
        with self._emptied_if_it_fails():
            if not output.updated.asnumpy():
                self.buffer.clear()
                return output
            if clip is None:
                clipped_norm = self.run_update(output.grad_norm)
            else:
                clipped_norm = self._update_with(clip)(output.grad_norm, clip.as_tensor())
            self.parallel.check_replicas()
        return output._replace(clipped_grad_norm=clipped_norm)

    def adjust(self, output: StepOutput) -> None:
        """Choose the loss scale of the next window, after ``output`` of this one."""
        overflow = bool(output.overflow.asnumpy())
        self.loss_scale.adjust(output.updated, Tensor(overflow or bool(self.is_bad.asnumpy())))
        self._count_overflow(overflow, bool(output.updated.asnumpy()))

    def _count_overflow(self, overflow: bool, updated: bool) -> None:
        """Stop a training that skips all its updates: no scale is small enough for a gradient that is broken."""
        if updated:
            self.overflows_in_a_row = 0
        elif overflow:
            self.overflows_in_a_row += 1
        if self.overflows_in_a_row >= MAX_OVERFLOWS:
            self.overflows_in_a_row = 0
            raise RuntimeError(
                f"For 'TrainOneStepCell', one window in {MAX_OVERFLOWS} must have a finite gradient, but got Inf or "
                f"NaN in each of the last {MAX_OVERFLOWS}, which made no update. The weights are those of the last "
                f"update. Look for NaN in the data and the loss, lower the learning rate, or use float32."
            )

    @contextmanager
    def _emptied_if_it_fails(self) -> Iterator[None]:
        """Empty the buffer after an error, or its rows would be in the next window too."""
        try:
            yield
        except BaseException:
            self.buffer.clear()
            raise

    def _update_with(self, clip: nn.Cell) -> Compiled:
        """Return the update that takes its limit as an input, so that a new one costs no new graph."""
        if type(clip) not in self.other_updates:
            update = Update(self.update.optimizer, clip, self.parallel, self.loss_scale)
            update.set_train(self.update.training)
            update._get_attr_from_cell(self.update)
            self.other_updates[type(clip)] = Compiled(lambda: update, "Accumulator", "the optimizer")
        return self.other_updates[type(clip)]

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """End the window as part of a graph, after ``done``. Return the items of a StepOutput.

        A plain tuple: strict graph syntax knows no NamedTuple.
        """
        loss, overflow, scale, updated, norm, learning_rate, weight, bad = self.report(done)
        if updated:
            clipped_norm = self.update(norm)
        else:
            clipped_norm = ops.depend(norm, self.buffer.clear())
        clipped_norm = self.update.touch(clipped_norm)
        clipped_norm = ops.depend(clipped_norm, self.loss_scale(updated, bad, clipped_norm))
        return loss, overflow, scale, updated, norm, clipped_norm, learning_rate, weight
