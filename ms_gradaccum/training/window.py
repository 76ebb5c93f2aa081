"""A window of one network: its batches, its sums, and the update of its optimizers."""

import math
import threading
from collections.abc import Iterable, Sequence

from mindspore import Tensor, nn

from ms_gradaccum._checks import (
    MAX_INT,
    State,
    check_saved,
    check_saved_list,
    counted,
    is_count,
    is_lost,
    warn,
)
from ms_gradaccum.advice.advisor import AdvisedTraining, Advisor
from ms_gradaccum.backend import plain_state
from ms_gradaccum.backend.compiled import Compiled, runs_eagerly
from ms_gradaccum.backend.device import is_out_of_memory
from ms_gradaccum.backend.optimizers import groups_of
from ms_gradaccum.gradients.buffer import BatchCount
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.parallel.reduced import UNSAVED
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.parallel.world import RanksDiffer
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.micro_step import Outputs, is_half
from ms_gradaccum.training.micro_steps import BatchProgress, MicroSteps, WindowBatch
from ms_gradaccum.training.rank_comparison import RankComparison
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window_end import FullWindow, WindowEnds


def _is_batch_count(value: object) -> bool:
    return isinstance(value, int) and is_count(value) and value <= MAX_INT


_COUNTS = {"batches": _is_batch_count, "overflows_in_a_row": is_count}


class Window:
    """The window of one network, from its micro batches to the update. If a part fails, all of it is discarded."""

    # True if the optimizers report other callers. `has_claims` is False once a later step has the same optimizers.
    watches_calls = has_claims = True

    def __init__(
        self,
        network: nn.Cell,
        optimizers: Sequence[nn.Cell],
        reducers: Sequence[GradientReducer],
        settings: StepSettings,
        events: Events,
    ) -> None:
        self.network = network
        self.settings = settings
        self.optimizers = list(optimizers)
        self.reducers = reducers
        # The first buffer counts the batches for all.
        self.count = BatchCount(reducers[0].buffer)
        training = AdvisedTraining(
            settings.window_length.most,
            settings.compiles,
            is_half(network.network, settings.precision),
            settings.check_loss,
        )
        self.advisor = Advisor(self.owner, network, optimizers, reducers, self.count, training)
        self.micro_steps = MicroSteps(network, reducers, settings, events, self.advisor)
        self.ends = WindowEnds(optimizers, reducers, settings, self.advisor)
        self.ranks = RankComparison(self.owner, optimizers, reducers, events, self.advisor)
        # The window from `reduce` until it is reset; None before.
        self.full: FullWindow | None = None
        # False if the caller gave gradients of the window without a loss. True again after the window.
        self.has_loss = True
        self._in_use = threading.Lock()

    @property
    def owner(self) -> str:
        """The class that the user called."""
        return self.settings.owner

    @property
    def is_distributed(self) -> bool:
        return self.reducers[0].is_distributed

    @property
    def grads_are_reduced(self) -> bool:
        return self.reducers[0].grads_are_reduced

    @property
    def loss_scale(self) -> nn.Cell:
        return self.settings.precision.loss_scale

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        return self.micro_steps.compiled_cells() + self.ends.compiled_cells()

    @property
    def is_open(self) -> bool:
        """True if the buffers contain a batch."""
        return self.count.get() > 0

    def state_dict(self) -> dict[str, object]:
        """Return the state of the window except its sums, as JSON. The sums are parameters of the buffers."""
        batches = self.count.read()
        if batches and self.reducers[0].accumulates:
            raise RuntimeError(UNSAVED.format(owner=self.owner))
        state = {
            "batches": batches,
            "overflows_in_a_row": self.ends.overflows_in_a_row,
            "loss_scale": self.loss_scale.chooser_state.state_dict(),
        }
        # A graph does not follow what the program sets in the groups of its optimizer.
        if runs_eagerly(self.settings.compiles):
            state["groups"] = [
                plain_state.take_settings(group) for group in groups_of(self.optimizers)
            ]
        return state

    def load_state_dict(self, saved: State) -> None:
        counts = check_saved(saved, "how many batches and overflows its windows had", _COUNTS)
        groups = []
        if "groups" in saved:  # States of 0.2.0 have none.
            groups = groups_of(self.optimizers)
        settings = check_saved_list(saved.get("groups", []), "groups of parameters", len(groups))
        for group, its in zip(groups, settings):
            plain_state.check_settings(group, its)
        self.loss_scale.chooser_state.load_state_dict(saved.get("loss_scale"))
        for group, its in zip(groups, settings):
            plain_state.put_settings(group, its)
        self.count.set(counts["batches"])
        self.advisor.begin_anew()
        self.ends.overflows_in_a_row = counts["overflows_in_a_row"]

    def add(self, batch: WindowBatch) -> list[Outputs]:
        """Add one batch. Return the outputs of its micro steps."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"For '{self.owner}', a batch began while another one was still running. Hold a "
                f"lock around each batch, or give each thread its own step and network."
            )
        try:
            outputs = self._run_steps(batch)
        finally:
            self._in_use.release()
        if self.ranks.is_on:
            self.ranks.note_first("batch", (batch.args, batch.kwargs))
        return outputs

    def _run_steps(self, batch: WindowBatch) -> list[Outputs]:
        """Run the micro steps of a batch, again with twice as many where the device runs out of memory."""
        while True:
            progress = BatchProgress()
            try:
                return self.micro_steps.run(batch, progress)
            except BaseException as error:
                if not (batch.weight is None and self._splits_more(error, progress)):
                    self._end_failed(error, progress)
                    raise

    def _splits_more(self, error: BaseException, progress: BatchProgress) -> bool:
        """Split batches into more micro batches if memory ran out before the window had anything to lose.

        Each rank does so for itself, unless the ranks communicate in each micro batch.
        """
        if not is_out_of_memory(type(error).__name__, f"{error}"):
            return False
        if (
            self.reducers[0].every_batch
            or self.grads_are_reduced
            or (progress.has_run and self.is_open)
        ):
            return False
        before = self.network.micro_size
        if not self.network.split_more(progress.rows):
            return False
        if progress.has_run:
            for reducer in self.reducers:
                reducer.buffer.clear()
        warn(
            f"For '{self.network.owner}', the memory is not enough for "
            f"{counted(before, 'micro batch')} of a batch of {progress.rows} rows, so from now on "
            f"each batch has {self.network.micro_size}. Give micro_size={self.network.micro_size} "
            f"to start with."
        )
        self.advisor.after_split_more()
        return True

    def _end_failed(self, error: BaseException, progress: BatchProgress) -> None:
        """Discard the window if a failed batch was added in part, and join the remaining collectives of that batch."""
        self.network.head(error)
        if progress.has_run:
            batches = self.count.read()
            self.discard(for_all=True)
            if batches:
                warn(
                    f"For '{self.owner}', a batch failed inside a window, which also discards "
                    f"{counted(batches, 'batch')} before it. The next batch begins a new window."
                )
        if self.can_continue_after(error):
            self.micro_steps.join(progress.rounds_left)

    def can_continue_after(self, error: BaseException) -> bool:
        """Return whether this rank stays in its window after an error that a program may catch."""
        if not self.is_distributed or is_lost(self.owner, error) or self.grads_are_reduced:
            return False
        return isinstance(error, Exception) and not isinstance(error, (StopIteration, RanksDiffer))

    def partial_output(self) -> StepOutput:
        output = self.ends.partial_output()
        return output if self.has_loss else output._replace(loss=None)

    def reduce(self, clip: Clip | None = None) -> FullWindow:
        """Reduce the sums over the ranks, once, before clipping and update. A ``clip`` is for this window alone."""
        if self.full is None:
            try:
                self.full = self.ends.reduce()
                if self.ranks.is_on:
                    self.ranks.end_window()
            except BaseException:
                self.discard()
                raise
        if clip is not None:
            self.full = self.full._replace(clip=clip)
        return self.full

    def close(self, clip: Clip | None = None) -> StepOutput:
        """Update, clear the buffers and return the report. A ``clip`` is for this window alone."""
        full = self.reduce(clip)
        if self.advisor.is_on:
            self.advisor.before_update()
        try:
            if self.reducers[0].grads_are_reduced:
                self.reshard()
            report = self.ends.finish(full)
        except BaseException:
            self.discard()
            raise
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

    def reset(self) -> None:
        """Forget the window that has ended."""
        self.full = None
        self.has_loss = True
        if self.reducers[0].grads_are_reduced:
            for reducer in self.reducers:
                reducer.restart()
        # Windows of one batch are not counted.
        if self.count.known or self.count.is_stale:
            self.count.was_cleared()


def reducers_of(windows: Iterable[Window]) -> list[GradientReducer]:
    """Return the reducers of all optimizers of these windows."""
    reducers: list[GradientReducer] = []
    for window in windows:
        reducers += window.reducers
    return reducers
