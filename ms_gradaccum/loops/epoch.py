"""The work of Model around the steps of a training, so that windows, ranks and states fit its epochs."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.train.callback import Callback, LossMonitor

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend import random_state
from ms_gradaccum.loops.data_position import PassPlace, Sources, skipping
from ms_gradaccum.parallel.world import current_world, gather_counts
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Model"
_PASSES_ONLY = "A state knows passes over the data, and no sinks."


@runtime_checkable
class ResumingCallback(Protocol):
    """A callback that keeps the states of a training. It runs after all others, since it saves what they change."""

    def watching(self, model: Any) -> AbstractContextManager[None]:
        """Enclose a training of ``model``."""

    def resume_into(self, model: Any) -> None:
        """Give ``model`` the last state that was kept, if there is one. Collective."""


class PassSteps(Callback):
    """The first of a training's callbacks: what has to happen after a step before the others look at it.

    A pass has as many steps on each process as it has batches on the one with the most. The others join that one in
    those, with all that their callbacks do in a step.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any], dataset: Any, first_epoch: int) -> None:
        super().__init__()
        self.model = model
        self.train_step = model.train_network
        self.train_step.check_claims()
        self.stop_at_invalid_loss = any(isinstance(callback, LossMonitor) for callback in callbacks)
        self.keeps_states = any(isinstance(callback, ResumingCallback) for callback in callbacks)
        # Those that the step has counted.
        self.batches = self.train_step.events.batches
        self.dataset = dataset
        self.first_epoch = first_epoch
        self.world = current_world(_OWNER)
        self.length = dataset.get_dataset_size()
        several = self.train_step.windows[0].several
        lengths = gather_counts(self.length) if several else [self.length]
        # Of a pass: steps on every process, and batches that all of them have.
        self.steps, self.common = max(lengths), min(lengths)
        self.done = 0
        self.in_pass = False
        # Whether what MindSpore calls an epoch are the batches of a sink, and no pass.
        self.in_sinks = False
        self.run_context: Any = None
        self.sources: Sources | None = None
        self.resumed: PassPlace | None = None
        self._until_first_batch = ExitStack()

    def resume(self, checkpoints: list[ResumingCallback], epochs: int, settings: dict[str, Any]) -> bool:
        """Load the last state and let the training go on there. Return False if it has ended already."""
        if self.model.resumed_place is None:
            if not checkpoints:
                remedy = "Give StateCheckpoint(directory), or call load_state(model, directory) first."
                raise ValueError(
                    argument_error(_OWNER, "callbacks", "some with a StateCheckpoint to resume", "none", remedy)
                )
            checkpoints[0].resume_into(self.model)
        place, self.model.resumed_place = self.model.resumed_place, None
        if place is None:
            return True
        place = place.among(self.length, self.world.size)
        if place.next_epoch >= epochs:
            return False
        self.resumed, self.first_epoch, self.sources = place, place.first_epoch, place.sources
        done = (place.next_epoch - place.first_epoch) * self.steps + (place.batches or 0)
        settings.update(initial_epoch=place.next_epoch, initial_step=done)
        self.done = done
        return True

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Note what the order of the samples depends on, or begin with what it did when the state was saved."""
        if self.sources is None:
            self.sources = Sources.now(self.world.size)
        place = self.resumed
        begin = self.sources.begun(self.dataset, None if place is None else place.random_now)
        self._until_first_batch.enter_context(begin)
        if place is not None:
            taken = (place.next_epoch - place.first_epoch) * self.length + (place.batches or 0)
            self._until_first_batch.enter_context(skipping(self.dataset, taken))
        with self._until_first_batch:
            yield

    @property
    def is_common(self) -> bool:
        """True if all processes can continue from the last step: either all or none have run out of data."""
        batches = self.done % self.steps
        return batches == 0 or batches < self.common or self.common == self.steps

    def place(self) -> PassPlace:
        """Return where this process is in its data, after a step."""
        if self.in_sinks:
            raise ValueError(argument_error(_OWNER, "sink_size", "-1 where a state is saved", "another", _PASSES_ONLY))
        passes, batches = divmod(self.done, self.steps)
        if not self.is_common:
            raise RuntimeError(
                f"For '{_OWNER}', a state must be saved where all processes have batches left, but got one after batch "
                f"{batches} of a pass in which some have {self.common}. Save it before, or at the end of the pass."
            )
        epoch, ranks = self.first_epoch + passes, self.world.size
        if self.sources is not None:
            self.sources.check_known(self.dataset, ranks)
        if batches == 0:
            return PassPlace(epoch - 1, None, self.length, self.sources, ranks, first_epoch=self.first_epoch)
        return PassPlace(epoch, batches, self.length, self.sources, ranks, first_epoch=self.first_epoch)

    def on_train_begin(self, run_context: Any) -> None:
        self.run_context = run_context
        self.train_step.body.is_carried = self.model.last_window == "carry"
        params = run_context.original_args()
        # MindSpore counts by a sink_size even where the data does not sink.
        sink_size = params.sink_size if params.get("dataset_sink_mode") else -1
        self.in_sinks = sink_size > 0 and not sink_size == self.steps == self.common
        if self.in_sinks:
            self._check_sinks(sink_size)
        else:
            params.batch_num = self.steps

    def _check_sinks(self, sink_size: int) -> None:
        rule = remedy = ""
        if self.common < self.steps:
            rule, remedy = "-1 where some processes have more batches", "Each process then ends with its own data."
        elif self.keeps_states or self.resumed is not None:
            rule, remedy = "-1 for a training that can be resumed", _PASSES_ONLY
        elif self._ends_inside_sinks(sink_size):
            rule = "-1 or a divisor of the batches of a pass, where that ends in mid-window"
            remedy = "Give last_window='carry', or as many batches as whole windows have."
        if rule:
            got = f"{sink_size} with {self.length} batches in a pass"
            raise ValueError(argument_error(_OWNER, "sink_size", rule, got, remedy))

    def _ends_inside_sinks(self, sink_size: int) -> bool:
        """Return whether a pass can end in mid-window inside a sink, which is one graph."""
        in_graph = ms.get_context("mode") == ms.GRAPH_MODE
        in_window = self.model.last_window != "carry" and self.steps % self.train_step.accumulation_steps != 0
        return in_graph and in_window and self.steps % sink_size != 0

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self.in_pass = True

    def on_train_step_begin(self, run_context: Any) -> None:
        # The first batch is there.
        self._until_first_batch.close()
        if self.resumed is not None and self.resumed.random_now is not None:
            random_state.put_device(self.resumed.random_now)
            self.resumed = None

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.done = params.cur_step_num
        if not isinstance(params.net_outputs, StepOutput):
            # In data sink mode a graph has returned the items in a plain tuple.
            params.net_outputs = StepOutput(*params.net_outputs)
        self._tell_of_update(params.net_outputs)
        if self.done % self.steps == 0:
            self._finish_pass(params)
        if self.stop_at_invalid_loss:
            step = (self.done - 1) % params.batch_num + 1
            self._check_loss(params.net_outputs.loss, params.cur_epoch_num, step)

    def end_epoch(self, params: Any, callbacks: Any) -> None:
        """Take part in the steps that only other processes have batches for, once this one has no more."""
        stops = self.run_context.get_stop_requested
        if self.in_sinks and not stops() and params.cur_epoch_num < self.first_epoch + params.epoch_num:
            return  # The next sink goes on with the pass.
        while self.in_pass and not self.in_sinks and not stops():
            params.cur_step_num += 1
            callbacks.on_train_step_begin(self.run_context)
            params.net_outputs = self.train_step.join()
            callbacks.on_train_step_end(self.run_context)
        if self.in_pass:
            # A callback or the last sink has ended the pass before the end of its data.
            self._finish_pass(params)

    def _finish_pass(self, params: Any) -> None:
        """Do with an unfinished window what `last_window` says."""
        self.in_pass = False
        if self.model.last_window == "drop":
            self.train_step.drop()
        if self.model.last_window == "apply":
            output = self.train_step.flush()
            if output is not None:
                params.net_outputs = output

    def _tell_of_update(self, output: StepOutput) -> None:
        """Tell who listens of an update that a graph has made by itself: in data sink mode, the last of a sink."""
        events = self.train_step.events
        if events.batches == self.batches and events.heard and output.ends_window:
            events.update_end(output)
        self.batches = events.batches

    def _check_loss(self, loss: Tensor, epoch: int, step: int) -> None:
        """Stop as LossMonitor does at a NaN or Inf loss, but not if the loss comes in a tuple."""
        value = float(loss.asnumpy())
        if not np.isfinite(value):
            self.train_step.drop()
            raise ValueError(
                f"For '{_OWNER}', the loss must be finite, but got {value} in epoch {epoch}, step {step}. "
                f"LossMonitor ends the training here; without it the window is skipped."
            )
