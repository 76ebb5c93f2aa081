"""A window of one network: its micro batches, its sums, and the update of its optimizers."""

import math
import threading
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum import _checks as check
from ms_gradaccum._checks import MAX_INT, State, is_count, is_lost, warn, warn_of_dropped
from ms_gradaccum.backend import plain_state
from ms_gradaccum.backend.compiled import Compiled, runs_eagerly
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.optimizers import groups_of, settable_rates
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.batch.split import Flattened
from ms_gradaccum.gradients.buffer import BatchCount, GradientBuffer
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.reduced import UNSAVED, schedulers_of
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.parallel.world import NO_INPUT, FirstInput, RanksDiffer, compare_ranks, digest
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.micro_steps import MicroSteps
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput, with_all_rates, with_one_norm
from ms_gradaccum.training.window_end import MAX_OVERFLOWS, WindowEnd, broken_gradient
from ms_gradaccum.training.window_watch import WATCHED_WINDOWS, WindowWatch


class Window:
    """The window of one network, from its micro batches to the update. If a part fails, all of it is discarded."""

    # True if the optimizers report other callers. `has_claims` is False once a later step has the same optimizers.
    watches_calls = has_claims = True
    # The reports of the optimizers on the full window, before the update.
    outputs: list[StepOutput] | None = None
    has_loss = True  # False if the caller gave gradients of the window without a loss.
    clip: Clip | None = None  # Only for this window.
    # With several ranks: this rank's first input, see `FirstInput`.
    first: FirstInput | None = None
    ended = 0  # The number of ended windows.
    has_told = False  # True after the first warning of a skipped window with a non-finite gradient.

    def __init__(
        self,
        network: nn.Cell,
        optimizers: Sequence[nn.Cell],
        reducers: Sequence[GradientReducer],
        settings: StepSettings,
        events: Events,
    ) -> None:
        self.owner, self.network, self.settings = settings.owner, network, settings
        self.optimizers, self.reducers = list(optimizers), list(reducers)
        self.loss_scale = settings.precision.loss_scale
        self.is_distributed, self.grads_are_reduced = reducers[0].is_distributed, reducers[0].grads_are_reduced
        # The first buffer counts the batches for all.
        self.count = BatchCount(reducers[0].buffer)
        self.micro_steps = MicroSteps(network, self.reducers, settings, events)
        self.ends = [WindowEnd(optimizer, each, settings) for optimizer, each in zip(optimizers, reducers)]
        self.overflows_in_a_row = 0
        watched = None if self.grads_are_reduced else network
        self.watch = WindowWatch(settings.owner, watched, self.optimizers, self.count)
        self._in_use = threading.Lock()

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        return [*self.micro_steps.compiled_cells(), *(cell for end in self.ends for cell in end.compiled_cells())]

    @property
    def is_open(self) -> bool:
        """True if the buffers contain a batch."""
        return self.count.get() > 0

    def state_dict(self) -> dict[str, object]:
        """Return the state of the window except its sums, as JSON. The sums are parameters of the buffers."""
        batches, scale = self.count.read(), self.loss_scale.chooser_state.state_dict()
        if batches and self.reducers[0].accumulates:
            raise RuntimeError(UNSAVED.format(owner=self.owner))
        # A graph does not follow what the program sets in the groups of its optimizer.
        eager = runs_eagerly(self.settings.compiles)
        settings = {"groups": [plain_state.take_settings(each) for each in groups_of(self.optimizers)]} if eager else {}
        counts = {"batches": batches, "overflows_in_a_row": self.overflows_in_a_row}
        return {**counts, "loss_scale": scale, **settings}

    def load_state_dict(self, saved: State) -> None:
        rules = {"batches": lambda value: is_count(value) and value <= MAX_INT, "overflows_in_a_row": is_count}
        counts = check.check_saved(saved, "how many batches and overflows its windows had", rules)
        groups = groups_of(self.optimizers) if "groups" in saved else []  # There are none in states of 0.2.0.
        settings = check.check_saved_list(saved.get("groups", []), "groups of parameters", len(groups))
        steps = [step for each in zip(groups, settings) for step in plain_state.plan_settings(*each)]
        self.loss_scale.chooser_state.load_state_dict(saved.get("loss_scale"))
        for step in steps:
            step()
        self.count.set(counts["batches"])
        self.watch.restart()
        self.overflows_in_a_row = counts["overflows_in_a_row"]

    def add(
        self, args: Args, kwargs: Kwargs, is_last: bool = False, weight: float | None = None
    ) -> list[tuple[Tensor, ...]]:
        """Add one batch, maybe the last of its window, and return the outputs of its micro steps.

        A ``weight`` of the caller takes the place of its rows.
        """
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"For '{self.owner}', a training must be that of one thread, but got a batch while another one is "
                f"under way. Hold a lock around each batch, or give each thread a step and a network of its own."
            )
        try:
            if self.watch.is_on:
                self.watch.begin_batch()
            is_first = self.micro_steps.measurement.is_on and not self.is_open
            outputs = self.micro_steps.run(args, kwargs, is_last, weight, is_first)
            if self.watch.is_on:
                self.watch.end_batch(is_last)
        except BaseException as error:
            self._end_failed(error)
            raise
        finally:
            self._in_use.release()
        self.note_first("batch", (args, kwargs), 0.0 if weight is not None else self.micro_steps.rows)
        return outputs

    def _end_failed(self, error: BaseException) -> None:
        """Discard the window if a failed batch was added in part, and join the remaining collectives of that batch."""
        self.network.head(error)
        if self.micro_steps.has_added:
            batches = self.count.read()
            self.discard(for_all=True)
            warn_of_dropped(self.owner, batches)
        if not self.is_open:
            self.watch.restart()
        if self.can_continue_after(error):
            self.micro_steps.join(self.micro_steps.rounds)

    def note_first(self, what: str, inputs: object, rows: float = 0.0) -> None:
        """With several ranks, record the first batch or gradients of this rank, and its rows if it counts by them."""
        if self.is_distributed and self.first is None:
            tensors, reducing = Flattened((inputs,)).tensors, schedulers_of(self.network)
            code = NetworkCode(self.network.network, (type(each).__module__ for each in reducing))
            rows = 0.0 if self.network.weighted else rows
            self.first = FirstInput(what, digest(tensors), rows, code.reductions()[:1]) if tensors else NO_INPUT

    def compare_ranks(self) -> None:
        """Compare the ranks' first batches, learning rates and parameters. Collective: all ranks must call it."""
        if self.is_distributed:
            shared = [each for reducer in self.reducers for each in reducer.shared()]
            averages = sorted(self.micro_steps.events.attached)
            compare_ranks(self.owner, self.first or NO_INPUT, averages, settable_rates(self.optimizers), shared)
            self.first = NO_INPUT

    def can_continue_after(self, error: BaseException) -> bool:
        """Return whether this rank stays in its window after an error that a program may catch."""
        can = self.is_distributed and not (is_lost(self.owner, error) or self.grads_are_reduced)
        return can and isinstance(error, Exception) and not isinstance(error, (StopIteration, RanksDiffer))

    def partial_output(self) -> StepOutput:
        output = self.ends[0].run_partial_report()
        return output if self.has_loss else output._replace(loss=None)

    def reduce(self) -> StepOutput:
        """Reduce the sums over the ranks, and return the report on the full window before clipping and update."""
        if self.outputs is None:
            self.ended += 1
            try:
                if self.grads_are_reduced:
                    self.reducers[0].check_window(self.owner)
                outputs = [end.reduce() for end in self.ends]
                if self.ended.bit_count() == 1:  # In windows 1, 2, 4, 8 and so on.
                    self.compare_ranks()
                self.outputs = outputs if len(outputs) == 1 else with_one_norm(outputs)
            except BaseException:
                self.discard()
                raise
        return self.outputs[0]

    def close(self) -> StepOutput:
        """Update, clear the buffers and return the report. Python decides whether to update."""
        updated = self.reduce().is_updated
        if self.watch.is_on:
            self.watch.end_window(is_last=self.ended >= WATCHED_WINDOWS)
        measured, clip, outputs = self.outputs or [], self.clip, []
        try:
            if not updated:
                measured = self._skipped(measured)
                for reducer in self.reducers:
                    reducer.buffer.clear()
            if self.grads_are_reduced:
                self.reshard()
            for end, output in zip(self.ends, measured):
                outputs.append(end.finish(output, clip) if updated else output)
            if self.loss_scale.searches:
                bad = self.ends[0].is_bad
                if len(outputs) > 1:  # Another optimizer may have an overflow.
                    bad = Tensor(outputs[0].has_overflow or bool(bad.asnumpy()))
                self.loss_scale.adjust(updated, bad)
            self.overflows_in_a_row = 0 if updated else self.overflows_in_a_row + outputs[0].has_overflow
            if self.overflows_in_a_row >= MAX_OVERFLOWS:
                # No smaller loss scale can repair such a gradient.
                self.overflows_in_a_row = 0
                raise RuntimeError(broken_gradient(self.owner))
        except BaseException:
            self.discard()
            if 0 < len(outputs) < len(self.ends):
                warn(
                    f"For '{self.owner}', the update of optimizer {len(outputs) + 1} of {len(self.ends)} failed, but "
                    f"those before it have updated already, and the window is gone. Load a state from before it."
                )
            raise
        has_own_norms = not (clip or self.settings.clip).has_one_factor
        report = outputs[0] if len(outputs) == 1 else with_all_rates(outputs, has_own_norms)
        if not self.has_loss:
            report = report._replace(loss=None)
        self.reset()
        return report

    def reshard(self) -> None:
        """Cut the parameters that an evaluation has left whole."""
        for reducer in self.reducers:
            reducer.reshard()

    def discard(self, for_all: bool = False) -> None:
        """Discard the window on this rank or, with ``for_all``, on all ranks, by the reduced weights."""
        for reducer in self.reducers:
            reducer.buffer.clear()
            if for_all and self.is_distributed:
                weight = reducer.buffer.weight
                weight.set_data(Tensor(-math.inf, weight.dtype))
        self.reset()

    def _skipped(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Warn why a window makes no update, and return its report."""
        weight = float(outputs[0].weight.asnumpy()) if self.is_distributed or not self.has_told else 0.0
        if self.is_distributed and weight == -math.inf:
            warn(
                f"For '{self.owner}', a window must be whole on all ranks, but a batch of it has failed on one: all "
                f"drop it, and the next update is that of the next window. The log of that rank has the error."
            )
            nothing = {"overflow": Tensor(False), "weight": Tensor(0.0, ms.float32)}
            nothing |= dict.fromkeys(("loss", "grad_norm", "clipped_grad_norm"), Tensor(math.nan, ms.float32))
            self.ends[0].is_bad = Tensor(False)
            return [output._replace(**nothing) for output in outputs]
        if self.has_told or not outputs[0].has_overflow:
            return outputs
        scale = float(outputs[0].loss_scale.asnumpy())
        if not (self.loss_scale.searches and scale > 1.0):
            self.has_told = True
            why = _why_not_finite([reducer.buffer for reducer in self.reducers], weight, scale)
            remedy = "lower the loss scale or the learning rate" if scale > 1.0 else "lower the learning rate"
            warn(
                f"For '{self.owner}', the gradient of a window must have a finite norm, but got {why}: this window "
                f"makes no update, and later windows like it are skipped without a warning. Look for NaN in the data "
                f"and the loss, or {remedy}."
            )
        return outputs

    def reset(self) -> None:
        """Reset the report and the clip of the window that has ended."""
        self.outputs, self.clip, self.has_loss = None, None, True
        if self.watch.is_on:
            self.watch.restart()
        if self.grads_are_reduced:
            for reducer in self.reducers:
                reducer.restart()
        # Windows of one batch are not counted.
        if self.count.known or self.count.is_stale:
            self.count.was_cleared()


def _why_not_finite(buffers: Sequence[GradientBuffer], weight: float, scale: float) -> str:
    """Return the cause of a non-finite norm of the sums. A sum is ``weight`` times ``scale`` times the gradient."""
    if weight == 0.0:
        return "an Inf or a NaN in each micro batch"
    if not math.isfinite(weight):
        return f"the weight {weight}"
    largest, largest_name = 0.0, ""
    for name, total in ((name, total) for buffer in buffers for name, total in zip(buffer.names, buffer.sums)):
        size = float(np.abs(total.asnumpy()).max(initial=0.0))
        if not math.isfinite(size):
            return f"an Inf or a NaN for the parameter {name!r}"
        largest, largest_name = max((largest, largest_name), (size, name))
    if largest < 1e12:
        return "an Inf or a NaN in another rank's shard"
    size = largest / weight / scale
    return f"up to {size:.3g} for the parameter {largest_name!r}, whose squares are Inf in float32"
