"""Callbacks of Model that align windows, ranks and saved states with the epochs."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, Protocol, get_args, runtime_checkable

import mindspore as ms
import numpy as np
from mindspore.dataset import Dataset
from mindspore.train.callback import Callback, LossMonitor, RunContext

from ms_gradaccum._checks import check_choice, require, warn
from ms_gradaccum.backend.mindspore_private import CallbackManager, InternalCallbackParam
from ms_gradaccum.backend.optimizers import listed_rates, updates_of
from ms_gradaccum.backend.snapshot import put_device_random_state
from ms_gradaccum.loops.data_position import DataPosition, Sources, skipping
from ms_gradaccum.parallel.world import current_world, gather_counts
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Model"
LastWindow = Literal["apply", "drop", "carry"]  # The treatment of an unfinished window at the end of the data.
_PASSES_ONLY = "A state knows passes over the data, and no sinks."


def check_last_window(owner: str, value: object) -> str:
    remedy = "'apply' makes one more update, 'drop' none, and 'carry' goes on with the next pass."
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
                f"For '{_OWNER}', the ranks must stop after the same epoch, but only ranks {ranks} have called "
                f"request_stop(): all stop now. Let them decide by a number that they have in common."
            )


class PassSteps(Callback):
    """The first callback of a training, which completes each step before the other callbacks see it.

    On every process, a pass has as many steps as the process with the most batches: the others join its last steps.
    """

    in_pass = False
    in_sinks = False  # True if MindSpore's epoch is a sink instead of a pass.
    done = 0  # The number of finished steps, as if each pass had the size that it says.
    missing = 0  # The number of steps that passes lacked; negative for longer passes.
    begun = 0  # The number of steps at the beginning of this epoch.
    before: tuple[int, int | None] = 0, None  # The batches of the open window and the updates at that time.
    run_context: RunContext = None
    sources: Sources | None = None
    resumed: DataPosition | None = None

    def __init__(
        self, model: ms.Model, callbacks: Sequence[Callback], dataset: Dataset, first_epoch: int, epochs: int
    ) -> None:
        super().__init__()
        self.epochs = epochs  # The number of epochs, including those before this training.
        self.model, self.train_step, self.dataset, self.first_epoch = model, model.train_network, dataset, first_epoch
        self.train_step.check_claims()
        self.stop_at_invalid_loss = any(isinstance(callback, LossMonitor) for callback in callbacks)
        self.keeps_states = any(isinstance(callback, ResumingCallback) for callback in callbacks)
        self.world = current_world(_OWNER)
        self.length = dataset.get_dataset_size()
        lengths: list[int] = [self.length]
        if self.train_step.windows[0].is_distributed:
            lengths = gather_counts("begins to train a Model", self.length)
        # In a pass, the number of steps on every process, and the number of batches that all processes have.
        self.steps, self.common = max(lengths), min(lengths)
        self._until_first_batch = ExitStack()

    def resume(self, checkpoints: list[ResumingCallback], epochs: int, settings: dict[str, object]) -> bool:
        """Load the last state to continue the training. Return False if the training has already ended."""
        if self.model.resumed_place is None:
            remedy = "Give StateCheckpoint(directory), or call load_state(model, directory) first."
            require(checkpoints, _OWNER, "callbacks", "some with a StateCheckpoint to resume", "none", remedy)
            checkpoints[0].resume_into(self.model)
        place, self.model.resumed_place = self.model.resumed_place, None
        if place is None:
            return True
        place = place.among(self.length, self.world.size)
        self.resumed, self.first_epoch, self.sources = place, place.first_epoch, place.sources
        self.done = (place.next_epoch - place.first_epoch) * self.steps + (place.batches or 0)
        settings.update(initial_epoch=place.next_epoch, initial_step=self.done)
        return bool(place.next_epoch < epochs)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Record the sources of the order of the samples, or restore those of a loaded state."""
        self.sources = self.sources or Sources.now(self.world.size)
        place = self.resumed
        with self._until_first_batch as stack:
            stack.enter_context(self.sources.begun(self.dataset, place and place.random_now))
            if place is not None:
                taken = (place.next_epoch - place.first_epoch) * self.length + (place.batches or 0)
                stack.enter_context(skipping(self.dataset, taken))
            yield

    @property
    def is_common(self) -> bool:
        """True if all processes can continue from the last step: either all or none have run out of data."""
        batches = self.done % self.steps
        return batches == 0 or batches < self.common or self.common == self.steps

    def place(self) -> DataPosition:
        """Return the position of this process in its data, after a step."""
        require(not self.in_sinks, _OWNER, "sink_size", "-1 where a state is saved", "another", _PASSES_ONLY)
        passes, batches = divmod(self.done, self.steps)
        if not self.is_common:
            raise RuntimeError(
                f"For '{_OWNER}', a state must be saved where all processes have batches left, but got one after batch "
                f"{batches} of a pass in which some have {self.common}. Save it before, or at the end of the pass."
            )
        if self.sources is not None:
            self.sources.check_known(self.dataset, self.world.size)
        # Between two passes, the place is the end of the last one.
        epoch, taken = self.first_epoch + passes - (batches == 0), batches or None
        return DataPosition(epoch, taken, self.length, self.sources, self.world.size, first_epoch=self.first_epoch)

    def on_train_begin(self, run_context: RunContext) -> None:
        self.run_context = run_context
        self.train_step.body.is_carried = self.model.last_window == "carry"
        params = run_context.original_args()
        params.loss_scale_mananger = self.model.loss_scale_manager
        # MindSpore counts epochs by sink_size even without data sink mode.
        sink_size = params.sink_size if params.get("dataset_sink_mode") else -1
        self.in_sinks = sink_size > 0 and not sink_size == self.steps == self.common
        if not self.in_sinks:
            params.batch_num = self.steps
            return
        is_carried = self.model.last_window == "carry" or self.steps % self.train_step.accumulation_steps == 0
        rule, remedy = "False where some processes have more batches", "Each process then ends with its own data."
        require(self.common == self.steps, _OWNER, "dataset_sink_mode", rule, True, remedy)
        rule = remedy = ""
        if self.keeps_states or self.resumed is not None:
            rule, remedy = "-1 for a training that can be resumed", _PASSES_ONLY
        elif not is_carried and self.steps % sink_size != 0 and ms.get_context("mode") == ms.GRAPH_MODE:
            # In data sink mode a sink is one graph, and a pass cannot end inside it.
            rule = "-1 or a divisor of the batches of a pass, where that ends in mid-window"
            remedy = "Give last_window='carry', or as many batches as whole windows have."
        require(not rule, _OWNER, "sink_size", rule, f"{sink_size} with {self.length} batches in a pass", remedy)

    def _check_rates(self, params: InternalCallbackParam) -> None:
        """Warn of a list of learning rates that has not an entry for each update of the first training."""
        _, used = self.before
        if used and params.epoch_num == self.epochs:
            return  # This training continues none, but its optimizer has used a part of the list before.
        rates, window = listed_rates(self.train_step.optimizer), self.train_step.accumulation_steps
        batches = self.epochs * (params.sink_size if self.in_sinks else self.steps)
        passes, rest = divmod(batches, self.steps)
        updates = batches // window
        if self.model.last_window != "carry":
            updates = passes * (self.steps // window) + rest // window
        if self.model.last_window == "apply":
            updates += passes * (self.steps % window > 0) + (rest % window > 0)
        # A list for several such trainings, one after the other, is a multiple.
        if window == 1 or not rates or (rates != batches and updates and rates % updates == 0):
            return
        warn(
            f"For '{_OWNER}', a list of learning rates must have an entry for each update, but got {rates} for "
            f"{updates} updates with {batches} batches. Build it with {updates} entries."
        )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.in_pass, self.begun = True, self.done
        self.before = self.train_step.open_batches(), updates_of(self.train_step.optimizer)
        if not self.model.has_rates_checked:
            self.model.has_rates_checked = True
            self._check_rates(run_context.original_args())

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if any(reducer.gathered for reducer in self.train_step.windows[0].reducers):
            # In data sink mode MindSpore has put a cell around the step, of which callbacks would save shards.
            run_context.original_args().train_network = self.train_step
        # The pipeline has begun, with its first batch.
        self._until_first_batch.close()
        if self.resumed is not None and self.resumed.random_now is not None:
            put_device_random_state(self.resumed.random_now)
            self.resumed = None

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self.done = params.cur_step_num + self.missing
        if not isinstance(params.net_outputs, StepOutput):
            # In data sink mode a graph, which is called once in an epoch, has returned the items in a plain tuple.
            params.net_outputs = StepOutput(*params.net_outputs)
            self._count(params.net_outputs)
        self.in_pass = self.done % self.steps != 0
        if not self.in_pass:
            self._finish_pass(params)
        if self.stop_at_invalid_loss:
            self._check_loss(params)

    def _count(self, output: StepOutput) -> None:
        """Count what a graph has trained by itself, and call the listeners. Only its last update is seen."""
        events, (open_batches, before) = self.train_step.events, self.before
        batches, now = self.done - self.begun, updates_of(self.train_step.optimizer)
        windows = (open_batches + batches) // self.train_step.accumulation_steps
        # Of an optimizer without a count, only the last window is known to be skipped.
        updates = windows - (output.ends_window and not output.is_updated)
        # A user's optimizer may leave its count at 0.
        if before is not None and now is not None and (now or not (output.is_updated or events.updates)):
            updates = now - before
        events.batches += batches
        events.updates += updates
        events.skipped_updates += windows - updates
        if output.ends_window:
            events.tell("on_update_end", output=output)

    def end_epoch(self, params: InternalCallbackParam, callbacks: CallbackManager) -> None:
        """After this process's last batch, join the steps that only other processes have batches for."""
        stops = self.run_context.get_stop_requested
        if self.in_sinks and not stops() and params.cur_epoch_num < self.first_epoch + params.epoch_num:
            return  # The next sink goes on with the pass.
        batches, left = self.done - self.begun, self.steps - self.begun % self.steps
        if self.world.size == 1 and not self.in_sinks and not stops() and batches != left:
            self.missing += left - batches
            self.done += left - batches
            warn(
                f"For '{_OWNER}', a pass over the argument 'train_dataset' must have {left} batches, by its "
                f"get_dataset_size(), but got {batches}: windows end by that size, and a resumed training may begin "
                f"at another batch. Make all passes equally long, or train in a loop of your own with an Accumulator."
            )
        while self.in_pass and self.world.size > 1 and not self.in_sinks and not stops():
            params.cur_step_num += 1
            callbacks.on_train_step_begin(self.run_context)
            params.net_outputs = self.train_step.join()
            callbacks.on_train_step_end(self.run_context)
        if self.in_pass:
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
            step = (self.done - 1) % params.batch_num + 1
            raise ValueError(
                f"For '{_OWNER}', the loss must be finite, but got {value} in epoch {params.cur_epoch_num}, step "
                f"{step}. LossMonitor ends the training here; without it the window is skipped."
            )
