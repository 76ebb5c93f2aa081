"""Callbacks of Model that align windows, ranks and saved states with the epochs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, get_args, runtime_checkable

import mindspore as ms
import numpy as np
from mindspore.dataset import Dataset
from mindspore.train.callback import Callback, LossMonitor, RunContext

from ms_gradaccum._checks import check_choice, warn
from ms_gradaccum.backend.mindspore_private import CallbackManager, InternalCallbackParam
from ms_gradaccum.backend.optimizers import listed_rates, updates_of
from ms_gradaccum.loops.data_position import DataPosition, SampleOrder
from ms_gradaccum.parallel.world import current_world, gather_counts
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Model"
# The treatment of an unfinished window at the end of the data.
LastWindow = Literal["apply", "drop", "carry"]
_PASSES_ONLY = "A saved state counts passes over the data, not sinks."


def check_last_window(owner: str, value: object) -> str:
    remedy = (
        "'apply' makes one more update, 'drop' discards the window, 'carry' continues it in the "
        "next pass."
    )
    return check_choice(owner, "last_window", value, get_args(LastWindow), remedy)


@runtime_checkable
class ResumingCallback(Protocol):
    """A callback that saves the states of a training. It runs last, so that it saves the changes of the others."""

    def agreed(self) -> str: ...

    def watching(self, model: ms.Model) -> AbstractContextManager[None]: ...

    def resume_into(self, model: ms.Model) -> None: ...


class StopTogether(Callback):
    """The last callback of a training with several ranks: it stops all ranks after an epoch if one of them stops."""

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        stops = gather_counts("ends an epoch", run_context.get_stop_requested())
        ranks = [rank for rank, stop in enumerate(stops) if stop]
        if ranks and 0 in stops:
            run_context.request_stop()
            warn(
                f"For '{_OWNER}', only ranks {ranks} have called request_stop(), and all ranks "
                f"stop now. Let a callback decide by a metric of all ranks."
            )


class Passes:
    """The steps of a training, which are counted by passes over its data.

    On every process, a pass has as many steps as the process with the most batches: the others join its last steps.
    """

    in_pass = False  # True from the begin of an epoch to the end of a pass.
    in_sinks = False  # True if MindSpore's epoch is a sink instead of a pass.
    done = 0  # The number of finished steps, as if each pass had the size that it says.
    missing = 0  # The number of steps that passes lacked; negative for longer passes.
    begun = 0  # The number of steps at the beginning of this epoch.

    def __init__(self, lengths: Sequence[int]) -> None:
        self.steps = max(lengths)
        self.common = min(lengths)  # The number of batches that all processes have.

    @property
    def batches(self) -> int:
        """The number of finished steps of this pass; 0 at its end."""
        return self.done % self.steps

    @property
    def is_common(self) -> bool:
        """True if all processes can continue from the last step: either all or none have run out of data."""
        return self.batches == 0 or self.batches < self.common or self.common == self.steps

    def end_shorter(self) -> None:
        """Go on as if a pass had the size that it says, and warn unless it has."""
        batches = self.done - self.begun
        left = self.steps - self.begun % self.steps
        if batches == left:
            return
        self.missing += left - batches
        self.done += left - batches
        warn(
            f"For '{_OWNER}', the argument 'train_dataset' must yield the {left} batches of its "
            f"get_dataset_size(), but got {batches}: windows end by that size, and a resumed "
            f"training may begin at another batch. Make all passes equally long, or use an "
            f"Accumulator."
        )


class PassSteps(Callback):
    """The first callback of a training, which completes each step before the other callbacks see it."""

    run_context: RunContext = None
    # The batches of the open window and the updates at the beginning of this epoch.
    open_batches = 0
    updates: int | None = None

    def __init__(
        self,
        model: ms.Model,
        callbacks: Sequence[Callback],
        dataset: Dataset,
        first_epoch: int,
        epochs: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.train_step = model.train_network
        self.train_step.check_claims()
        self.epochs = epochs  # The number of epochs, including those before this training.
        self.stop_at_invalid_loss = any(isinstance(callback, LossMonitor) for callback in callbacks)
        self.checkpoints = [each for each in callbacks if isinstance(each, ResumingCallback)]
        self.ranks = current_world(_OWNER).size
        self.order = SampleOrder(dataset, self.ranks, first_epoch)
        lengths = [self.order.length]
        if self.train_step.windows[0].is_distributed:
            lengths = gather_counts("begins to train a Model", self.order.length)
        self.passes = Passes(lengths)

    def resume(self, epochs: int, settings: dict[str, object]) -> bool:
        """Load the last state to continue the training. Return False if the training has already ended."""
        if self.model.resumed_position is None:
            if not self.checkpoints:
                raise ValueError(
                    f"For '{_OWNER}', the argument 'callbacks' must be a list with a "
                    f"StateCheckpoint for resume=True, but got none. Give "
                    f"StateCheckpoint(directory), or call load_state(model, directory) first."
                )
            self.checkpoints[0].resume_into(self.model)
        position = self.model.resumed_position
        self.model.resumed_position = None
        if position is None:
            return True
        position = self.order.resume(position)
        self.passes.done = position.taken(self.passes.steps)
        settings.update(initial_epoch=position.next_epoch, initial_step=self.passes.done)
        return bool(position.next_epoch < epochs)

    def epoch_of(self, open_batches: int) -> int:
        """Return the number of the pass in which an open window of so many batches has begun."""
        return self.order.first_epoch + max(0, self.passes.done - open_batches) // self.passes.steps

    def position(self) -> DataPosition:
        """Return the position of this process in its data, after a step."""
        passes = self.passes
        if passes.in_sinks:
            raise ValueError(
                f"For '{_OWNER}', the argument 'sink_size' must be -1 where a state is saved, but "
                f"got another. {_PASSES_ONLY}"
            )
        if not passes.is_common:
            raise RuntimeError(
                f"For '{_OWNER}', all processes must still have data when a state is saved, but "
                f"got batch {passes.batches} where some have only {passes.common}. Save it "
                f"earlier, or at the end of the pass."
            )
        return self.order.position(passes.done // passes.steps, passes.batches)

    def on_train_begin(self, run_context: RunContext) -> None:
        self.run_context = run_context
        self.train_step.body.is_carried = self.model.last_window == "carry"
        params = run_context.original_args()
        params.loss_scale_mananger = self.model.loss_scale_manager
        # MindSpore counts epochs by sink_size even without data sink mode.
        sink_size = params.sink_size if params.get("dataset_sink_mode") else -1
        passes = self.passes
        passes.in_sinks = sink_size > 0 and not sink_size == passes.steps == passes.common
        if passes.in_sinks:
            self._check_sinks(sink_size)
        else:
            params.batch_num = passes.steps

    def _check_sinks(self, sink_size: int) -> None:
        """Raise for sinks that end otherwise than passes where this matters."""
        passes = self.passes
        if passes.common != passes.steps:
            raise ValueError(
                f"For '{_OWNER}', the argument 'dataset_sink_mode' must be False if the processes "
                f"have different numbers of batches, but got True. Then each process ends with its "
                f"own data."
            )
        got = f"{sink_size} with {self.order.length} batches in a pass"
        if self.checkpoints or self.order.resumed is not None:
            raise ValueError(
                f"For '{_OWNER}', the argument 'sink_size' must be -1 for a resumable training, "
                f"but got {got}. {_PASSES_ONLY}"
            )
        length = self.train_step.body.settings.window_length
        is_whole = length.is_fixed and passes.steps % length.most == 0
        is_carried = self.model.last_window == "carry" or is_whole
        if (
            not is_carried
            and passes.steps % sink_size != 0
            and ms.get_context("mode") == ms.GRAPH_MODE
        ):
            # In data sink mode a sink is one graph, and a pass cannot end inside it.
            raise ValueError(
                f"For '{_OWNER}', the argument 'sink_size' must be -1 or a divisor of the batches "
                f"of a pass that ends inside a window, but got {got}. Give last_window='carry', or "
                f"a pass of whole windows."
            )

    def _check_rates(self, params: InternalCallbackParam) -> None:
        """Warn of a list of learning rates that has not an entry for each update of the first training."""
        length = self.train_step.body.settings.window_length
        if not length.is_fixed or length.most == 1:
            return
        if self.updates and params.epoch_num == self.epochs:
            # This training continues none, but its optimizer has used a part of the list before.
            return
        rates = listed_rates(self.train_step.optimizer)
        batches = self.epochs * (params.sink_size if self.passes.in_sinks else self.passes.steps)
        updates = self._updates_of(batches)
        # A list for several such trainings, one after the other, is a multiple.
        is_multiple = rates != batches and updates > 0 and rates % updates == 0
        if not rates or is_multiple:
            return
        warn(
            f"For '{_OWNER}', a list of learning rates must have one entry per update, but got "
            f"{rates} for {updates} updates of {batches} batches. Build it with {updates} entries."
        )

    def _updates_of(self, batches: int) -> int:
        """Return the number of updates of a training with so many batches."""
        window: int = self.train_step.accumulation_steps
        if self.model.last_window == "carry":
            return batches // window
        passes, rest = divmod(batches, self.passes.steps)
        updates = passes * (self.passes.steps // window) + rest // window
        if self.model.last_window == "apply":
            updates += passes * (self.passes.steps % window > 0) + (rest % window > 0)
        return updates

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.passes.in_pass = True
        self.passes.begun = self.passes.done
        self.open_batches = self.train_step.open_batches()
        self.updates = updates_of(self.train_step.optimizer)
        if not self.model.has_rates_checked:
            self.model.has_rates_checked = True
            self._check_rates(run_context.original_args())

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if any(reducer.stand_ins for reducer in self.train_step.windows[0].reducers):
            # In data sink mode MindSpore has put a cell around the step, of which callbacks would save shards.
            run_context.original_args().train_network = self.train_step
        # The pipeline has begun, with its first batch.
        self.order.end_begin()

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        passes = self.passes
        passes.done = params.cur_step_num + passes.missing
        if not isinstance(params.net_outputs, StepOutput):
            # In data sink mode a graph, which is called once in an epoch, has returned the items in a plain tuple.
            params.net_outputs = StepOutput(*params.net_outputs)
            self._count(params.net_outputs)
        passes.in_pass = passes.batches != 0
        if not passes.in_pass:
            self._finish_pass(params)
        if self.stop_at_invalid_loss:
            self._check_loss(params)

    def _count(self, output: StepOutput) -> None:
        """Count what a graph has trained by itself, and call the listeners. Only its last update is seen."""
        events = self.train_step.events
        batches = self.passes.done - self.passes.begun
        now = updates_of(self.train_step.optimizer)
        windows = (self.open_batches + batches) // self.train_step.accumulation_steps
        # Of an optimizer without a count, only the last window is known to be skipped.
        updates = windows - (output.ends_window and not output.is_updated)
        # A user's optimizer may leave its count at 0.
        if (
            self.updates is not None
            and now is not None
            and (now or not (output.is_updated or events.updates))
        ):
            updates = now - self.updates
        events.batches += batches
        events.updates += updates
        events.skipped_updates += windows - updates
        if output.ends_window:
            events.tell("on_update_end", output=output)

    def end_epoch(self, params: InternalCallbackParam, callbacks: CallbackManager) -> None:
        """After this process's last batch, join the steps that only other processes have batches for."""
        stops = self.run_context.get_stop_requested
        in_sinks = self.passes.in_sinks
        if (
            in_sinks
            and not stops()
            and params.cur_epoch_num < self.order.first_epoch + params.epoch_num
        ):
            return  # The next sink goes on with the pass.
        if self.ranks == 1 and not in_sinks and not stops():
            self.passes.end_shorter()
        while self.passes.in_pass and self.ranks > 1 and not in_sinks and not stops():
            params.cur_step_num += 1
            callbacks.on_train_step_begin(self.run_context)
            params.net_outputs = self.train_step.join()
            callbacks.on_train_step_end(self.run_context)
        if self.passes.in_pass:
            # A callback or the last sink has ended the pass early.
            self._finish_pass(params)

    def _finish_pass(self, params: InternalCallbackParam) -> None:
        """Apply, drop or carry an unfinished window, see `last_window`."""
        if self.model.last_window == "drop":
            self.train_step.drop()
        elif self.model.last_window == "apply":
            output = self.train_step.flush()
            params.net_outputs = params.net_outputs if output is None else output

    def _check_loss(self, params: InternalCallbackParam) -> None:
        """Stop at a NaN or Inf loss. LossMonitor itself does so only for a loss outside of a tuple."""
        value = float(params.net_outputs.loss.asnumpy())
        if not np.isfinite(value):
            self.train_step.drop()
            step = (self.passes.done - 1) % params.batch_num + 1
            raise ValueError(
                f"For '{_OWNER}', the loss must be finite, but got {value} in epoch "
                f"{params.cur_epoch_num}, step {step}. LossMonitor ends the training here; without "
                f"it only this window is skipped."
            )
