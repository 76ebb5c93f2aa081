"""The driver of a hand-written loop: which batch ends a window, and checks of the order of calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from ms_gradaccum._checks import (
    State,
    all_or_nothing,
    check_saved,
    check_saved_list,
    is_count,
    is_flag,
    warn,
)
from ms_gradaccum.backend.optimizers import check_claims, optimizers_in
from ms_gradaccum.gradients.clipping import Clip
from ms_gradaccum.loops.loop_data import DataBatch, HandedBatches, LoopData
from ms_gradaccum.loops.network_trainer import TrainedNetwork, check_weight, disorder
from ms_gradaccum.loops.schedule import EARLY, UNSEEN, AccumulationConfig, PreparedScheduler
from ms_gradaccum.loops.train_step import WindowDriver
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Accumulator"
UNWEIGHTED = (
    "For 'Accumulator', a batch must have a weight, but got none: all batches and ranks count "
    "alike, whatever their rows. Call accumulator(grads, len(x), loss), or prepare the dataset."
)
_BETWEEN = "Call it at the end of the loop's body."
_COUNTS = dict.fromkeys(("batches", "updates", "steps"), is_count)


class LoopDriver(WindowDriver):
    """Drives the windows of all networks of a loop, which begins its batches and ends its windows itself."""

    owner = _OWNER
    windows: Sequence[TrainedNetwork]
    batches = 0  # The number of the current or last batch in its window. The buffers store it, too.
    is_last_batch = False  # True if the current or last batch ends its window.
    updated = False  # True if the current batch has made an update.
    steps = 0  # Number of batches of a full window. 0 until the next batch decides it.
    updates = 0  # Number of updates made.
    withheld = 0  # Number of open no_sync() contexts.
    is_withheld = False  # True if the current batch has begun inside such a context.
    has_warned_of_rows = False

    def __init__(
        self, config: AccumulationConfig, networks: Sequence[TrainedNetwork], events: Events
    ) -> None:
        super().__init__(networks, events)
        self.config = config
        self.schedulers: list[PreparedScheduler] = []
        self.data = LoopData()

    @contextmanager
    def batch(self, joined: DataBatch | None = None) -> Iterator[None]:
        """Context of one batch. If an error comes before anything was added, the batch counts only for other processes.

        ``joined`` is a batch that only other processes have.
        """
        if self.in_batch:
            raise disorder(
                "accumulate() must not be nested",
                "one inside another",
                "Write one 'with' per batch.",
            )
        self._begin(joined)
        was_open = self.is_open
        self.in_batch = True
        continues = False
        try:
            yield
            continues = True
        except BaseException as error:
            continues = self._continues_after(error)
            raise
        finally:
            self._leave(was_open)
            if continues:
                for batch in self.data.batches_to_join():
                    missing = batch.source.joins
                    batch.source.joins = 0
                    self.join_others(missing, batch.epoch)

    def _begin(self, joined: DataBatch | None) -> None:
        check_claims(self.windows)
        self._follow_others()
        if self.is_last_batch and self.is_open:
            remedy = (
                "Call step() in each batch, or zero_grad() to discard the window; a batch in "
                "no_sync() ends none."
            )
            raise disorder("a full window must be followed by step()", "another batch", remedy)
        if self.is_last_batch:
            self.batches = 0
        # This comes first, because a schedule can raise before anything has begun.
        if joined is None:
            self._count_batch(self.data.expect(self.data.coming()))
        else:
            self.data.expect([])
            self._count_batch(joined)
        for trained in self.windows:
            trained.begin_batch(self.is_last_batch)
        self.updated = False
        self.events.batches += 1

    def _follow_others(self) -> None:
        """Continue the window of a checkpoint or of a compiled function, with the length of one that begins now."""
        if any([trained.count.was_changed() for trained in self.windows]):
            self.is_last_batch = False
            self.steps = 0
            self.batches = self.open_batches()

    def _count_batch(self, expected: DataBatch) -> None:
        """Count a batch, which is expected to be this one of the data."""
        if self.batches == 0 or self.steps == 0:
            # The events count the current batch once it has begun.
            batches = self.events.batches - self.batches - self.in_batch
            self.steps = self.config.steps_for(expected.epoch, self.updates, batches)
        self.batches += 1
        self.is_withheld = self.withheld > 0
        self._find_end(expected.is_last)

    def _find_end(self, is_end_of_data: bool) -> None:
        """Determine whether the current batch ends the window."""
        is_full = self.batches >= self.steps or (
            is_end_of_data and self.config.sync_with_dataloader
        )
        self.is_last_batch = is_full and not self.is_withheld

    def _continues_after(self, error: BaseException) -> bool:
        """End a batch that has failed. Return whether this rank continues: others count it, and so does this one."""
        continues = self.windows[0].can_continue_after(error)
        if continues:
            self._join_batch()
            self._end_joined()
        elif self._awaits_batch:
            self.batches -= 1
            self.is_last_batch = False
            self.events.batches -= 1
            self.data.expect([])
        return continues

    def _leave(self, was_open: bool) -> None:
        """Leave a batch, before which the window ``was_open`` or not."""
        is_added = not self._awaits_batch
        self.in_batch = False
        if not self.is_open and (was_open or is_added):
            # The window was ended by an update, or by an error that the caller has caught inside.
            self.batches = 0
        for trained in self.windows:
            if trained.is_open:
                trained.count.set(self.batches)
        self.data.note_trained()

    def recognise(self, inputs: object, weight: float = 1.0) -> None:
        """Determine the batch of a prepared dataset that ``inputs`` are, or are a piece of, with this weight."""
        self.data.recognise(inputs, weight)
        if self.data.batches:
            self._find_end(self.data.is_last())

    @property
    def _awaits_batch(self) -> bool:
        """True if the current batch is counted but not added yet."""
        return self.in_batch and not any(trained.has_batch for trained in self.windows)

    def why_not_due(self) -> str:
        """Return why a scheduler that is called now moves nothing, if the order of calls is the reason."""
        if self.updates:
            return ""
        if any(trained.count.buffer.counts_in_graph for trained in self.windows):
            return UNSEEN
        if self.in_batch:
            is_before = self.is_last_batch and (
                self._awaits_batch or all(each.is_open for each in self.windows)
            )
        else:
            is_before = self.events.batches == 0
        return EARLY if is_before else ""

    @contextmanager
    def batch_of(self, trained: TrainedNetwork) -> Iterator[None]:
        """Context in which one network adds its batch. Outside `batch` it begins one."""
        if not self.in_batch and len(self.windows) > 1:
            remedy = "Write 'with accumulator.accumulate():' around all calls of one batch."
            raise disorder(
                "several networks must be trained in accumulate()", "a call outside it", remedy
            )
        with nullcontext() if self.in_batch else self.batch():
            if trained.has_batch:
                remedy = (
                    "Return the sum of both losses from one cell, or write one 'with' per micro "
                    "batch."
                )
                raise disorder(
                    "a network must have one backward pass in accumulate()", "a second one", remedy
                )
            if trained.full is not None:
                remedy = "The norm is that of the whole window, this batch included."
                raise disorder(
                    "backward() must come before the clipping of its window",
                    "it afterwards",
                    remedy,
                )
            try:
                yield
            finally:
                if trained.has_batch:
                    # Written at the end of the batch, which may have updated and cleared the buffers by then.
                    trained.count.set(self.batches, now=False)

    def weight_of(self, weight: object, trained: TrainedNetwork) -> float:
        """Return the weight of a batch: the given one or the rows that a prepared dataset knows; or warn."""
        if weight is not None:
            return check_weight(weight)
        batches = self.data.batches if self.in_batch else self.data.coming()
        lengths = {each.length for each in batches}
        rows = None
        if len(lengths) == 1 and trained.network.batch_axis == 0:
            rows = lengths.pop()
        is_whole = all(each.pieces == 0 for each in batches)
        is_alone = self.config.window_length.most == 1 and not trained.is_distributed
        if not (is_alone or (rows and is_whole) or self.has_warned_of_rows):
            self.has_warned_of_rows = True
            warn(UNWEIGHTED)
        return float(rows or 1)

    def begin_pass(self, handed: HandedBatches, is_resumed: bool) -> None:
        """Begin or continue a pass; warn if the previous pass over the same data left a window open."""
        is_over = bool(handed.depth) or not handed.waiting
        is_next = handed.current is not None and is_over and not is_resumed and not self.is_withheld
        is_inside = self.data.begin(handed)
        if is_next and not is_inside and self.config.sync_with_dataloader:
            self.warn_if_open("when the next pass over its data began")

    def state_dict(self) -> State:
        """Return the state of the loop, as JSON. Its networks and datasets have states of their own."""
        self._follow_others()
        return {
            "ends": self.is_last_batch,
            "updated": self.updated,
            "counter": {name: getattr(self, name) for name in _COUNTS},
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, saved: State) -> None:
        """Restore what `state_dict` has returned. The windows of the networks must have loaded their states before."""
        flags = check_saved(
            saved, "where its window stands", dict.fromkeys(("ends", "updated"), is_flag)
        )
        schedulers = check_saved_list(saved.get("schedulers"), "schedulers", len(self.schedulers))
        counts = check_saved(
            saved.get("counter"), "how many batches and updates its loop had", _COUNTS
        )
        with all_or_nothing(self):
            for scheduler, its in zip(self.schedulers, schedulers):
                scheduler.load_state_dict(its)
        self.is_last_batch = flags["ends"]
        self.updated = flags["updated"]
        self.updates = counts["updates"]
        self.steps = counts["steps"]
        # The state may come from a rank with more batches in the window.
        self.batches = max(counts["batches"], self.open_batches())

    def check_between_batches(self, caller: str) -> None:
        """Raise unless the program is between two batches, where a state can be saved."""
        if self._awaits_batch:
            raise disorder(
                f"{caller}() must come before accumulate() or after backward()",
                "it in between",
                _BETWEEN,
            )
        if any(trained.full is not None for trained in self.windows):
            raise disorder(
                f"{caller}() must come before clip_grad_norm() or after step()",
                "it in between",
                _BETWEEN,
            )

    def step(self, trained: TrainedNetwork, clip: Clip | None = None) -> StepOutput:
        """End the window of one network; ``clip`` is for a window that the loop has not clipped."""
        # After an error of a listener, the program may step again.
        self.events.tell("on_update_begin")
        output = trained.close(clip)
        if output.is_updated:
            if not self.updated:
                self.updates += 1
            self.updated = True
        self.events.update_end(output)
        return output

    def add_scheduler(self, scheduler: PreparedScheduler) -> None:
        """Let a scheduler follow the updates of its optimizer, or all updates if no window has its optimizer."""
        self.schedulers.append(scheduler)
        ends = []
        for trained in self.windows:
            ends += trained.ends.of_optimizers
        followed = [
            end for end in ends if scheduler.optimizer in optimizers_in(end.update.optimizer)
        ]
        for end in followed or ends:
            end.followers.append(scheduler.note_update)

    def flush(self) -> tuple[StepOutput, ...]:
        self.is_last_batch = True
        self.updated = False
        outputs = tuple(self.step(trained, trained.last_clip) for trained in self.windows)
        if self._awaits_batch:
            self._begin_anew()
        return outputs

    def drop(self) -> int:
        batches = super().drop()
        self.is_last_batch = False
        self._begin_anew()
        return batches

    def _begin_anew(self) -> None:
        """Begin a window, with the current batch or with the rest of it."""
        self.batches = 0
        if self._awaits_batch:
            self._count_batch(self.data.expect(self.data.batches))
        elif self.in_batch:
            self.batches = 1

    def join_others(self, missing: int, epoch: int) -> None:
        """Join the batches that only other processes have at the end of an epoch."""
        for i in range(missing):
            self.join(DataBatch(i == missing - 1, epoch))

    def join(self, joined: DataBatch | None = None) -> None:
        """Join the collectives of a batch with no local data."""
        with self.batch(joined):
            self._join_batch()
        self._end_joined()

    def _join_batch(self) -> None:
        """Join the collectives of a batch with no local data, or the remaining ones of a batch that has failed."""
        for trained in self.windows:
            if not trained.has_batch:
                trained.micro_steps.join()
                trained.has_batch = True
                trained.count.set(self.batches, now=False)

    def _end_joined(self) -> None:
        """If the batch ends the window, end it as the other processes do."""
        if not self.is_last_batch:
            return
        for trained in self.windows:
            if trained.is_open:
                self.step(trained, trained.last_clip)
        for scheduler in self.schedulers:
            if scheduler.follows_updates:
                scheduler.step()
