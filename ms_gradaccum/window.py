"""The order of an update. No other file knows it."""

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum.compiled import Compiled
from ms_gradaccum.grad_buffer import reciprocal
from ms_gradaccum.optimizers import LearningRate, all_parameters
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.step_output import StepOutput

_NOTHING = Tensor(0.0, ms.float32)


class FoldTerms(nn.Cell):
    """Make one sum of those of a loss's terms, each divided by its own weight over all ranks.

    The weight of the window is then that of the first term, or 1 if nothing has any of it.
    """

    def __init__(self, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel

    def construct(self) -> Any:
        buffer = self.buffer
        weights: tuple[Tensor, ...] = (buffer.weight + 0.0,)
        for other in buffer.others:
            weights += (other.weight + 0.0,)
        totals = self.parallel.total(ops.stack(weights))
        weightless = ops.equal(totals[0], 0.0)
        scale = ops.select(weightless, ops.ones_like(totals[0]), totals[0])
        done: Any = ()
        for i, other in enumerate(buffer.others):
            factor = reciprocal(totals[i + 1]) * scale
            for total, part in zip(buffer.sums, other.sums):
                done = ops.assign_add(total, ops.depend(part, done) * factor)
            done = ops.assign_add(buffer.loss, ops.depend(other.loss, done) * factor)
            done = other.clear_term(done)
        # One process stands in for the missing weight.
        stand_in = ops.cast(ops.greater(ops.sum(totals), 0.0), ms.float32) * self.parallel.is_first
        return ops.assign(buffer.weight, ops.select(weightless, stand_in, ops.depend(weights[0], done)))


class Report(nn.Cell):
    """First half of the end of a window: reduce over ranks, divide by the weight, finite?, norm."""

    def __init__(self, optimizer: nn.Cell, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel
        self.fold_terms = FoldTerms(parallel) if len(parallel.buffer.others) > 0 else None
        self.learning_rate = LearningRate(optimizer)

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """Report on the window once the micro steps behind ``done`` have run."""
        if self.fold_terms is not None:
            done = ops.depend(done, self.fold_terms())
        reduced = ops.depend(self.parallel.reduce(), done)
        loss = ops.depend(self.buffer.mean_loss(), (reduced, done))
        weight = ops.depend(self.buffer.weight + 0.0, reduced)
        # Of the sums, then divided: that saves a pass over the gradient.
        norm = ops.depend(self.parallel.norm(tuple(self.parallel.sums)), reduced) * self.buffer.reciprocal_weight()
        finite = ops.isfinite(norm)
        # A window that weighs nothing (no valid token anywhere) has no mean and makes no update.
        updated = ops.logical_and(finite, ops.greater(weight, 0.0))
        overflow, scale = ops.logical_not(finite), Tensor(1.0, ms.float32)
        return loss, overflow, scale, updated, norm, self.learning_rate(), weight


class Update(nn.Cell):
    """Second half of the end of a window: clip, optimizer, clear."""

    def __init__(self, optimizer: nn.Cell, clip: nn.Cell, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.optimizer = optimizer
        self.clip = clip
        self.parallel = parallel
        self.parameters = all_parameters(optimizer)

    def construct(self, norm: Tensor) -> Tensor:
        """Update with the mean gradient, whose norm is ``norm``, and return the norm after clipping."""
        norm = self.touch(norm)
        grads = self.clip(self.mean_grads(), norm)
        clipped_norm = self.clip.norm_after(norm)
        if clipped_norm is None:
            clipped_norm = self.parallel.norm(grads)
        typed: tuple[Tensor, ...] = ()
        for grad, weight in zip(self.parallel.for_optimizer(grads), self.parallel.weights):
            typed += (ops.cast(grad, weight.dtype),)
        ready = ops.depend(typed, self.parallel.before_update())
        updated = self.parallel.after_update(self.optimizer(ready))
        return ops.depend(clipped_norm, self.buffer.clear(updated))

    def touch(self, value: Tensor) -> Tensor:
        """Return ``value``, having looked at all parameters of the optimizer.

        One that a graph uses in a branch alone, as some optimizers do, keeps its old storage when a
        checkpoint is loaded.
        """
        for parameter in self.parameters:
            value = ops.depend(value, parameter.reshape(-1))
        return value

    def mean_grads(self) -> tuple[Tensor, ...]:
        """Return the window's mean gradient in float32."""
        factor = self.buffer.reciprocal_weight()
        grads: tuple[Tensor, ...] = ()
        for total in self.parallel.sums:
            grads += (total * factor,)
        return grads


class Window(nn.Cell):
    """The end of a window: one update from the sums in the buffer, then an empty buffer.

    reduce over ranks, divide by the weight, unscale, finite?, norm, clip, optimizer, clear, report.
    """

    def __init__(self, optimizer: nn.Cell, clip: nn.Cell, parallel: SingleProcess) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = parallel.buffer
        self.parallel = parallel
        self.report = Report(optimizer, parallel)
        self.update = Update(optimizer, clip, parallel)
        self.run_report = Compiled(lambda: self.report, "TrainOneStepCell", "the report")
        self.run_update = Compiled(lambda: self.update, "TrainOneStepCell", "the optimizer")

    def compiled_cells(self) -> tuple[nn.Cell, ...]:
        """Return the cells of which each is compiled on its own."""
        return self.report, self.update

    def close(self) -> StepOutput:
        """End the window from the host, with the decision whether to update made in Python."""
        try:
            return self._close()
        except BaseException:
            self.buffer.clear()  # Or its rows would be in the next window too.
            raise

    def _close(self) -> StepOutput:
        loss, overflow, scale, updated, norm, learning_rate, weight = self.run_report(_NOTHING)
        clipped_norm = norm
        if updated.asnumpy():
            clipped_norm = self.run_update(norm)
            self.parallel.check_replicas()
        else:
            self.buffer.clear()
        return StepOutput(loss, overflow, scale, updated, norm, clipped_norm, learning_rate, weight)

    def construct(self, done: Tensor) -> tuple[Tensor, ...]:
        """End the window as part of a graph, after ``done``. Return the items of a StepOutput.

        A plain tuple: strict graph syntax knows no NamedTuple.
        """
        loss, overflow, scale, updated, norm, learning_rate, weight = self.report(done)
        norm = self.update.touch(norm)
        if updated:
            clipped_norm = self.update(norm)
        else:
            clipped_norm = ops.depend(norm, self.buffer.clear())
        return loss, overflow, scale, updated, norm, clipped_norm, learning_rate, weight


def open_window_output(loss: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the items of a StepOutput for a batch after which the window goes on."""
    unknown, no = Tensor(math.nan, ms.float32), Tensor(False)
    return (loss, no, Tensor(1.0, ms.float32), no, unknown, unknown, unknown, weight)
