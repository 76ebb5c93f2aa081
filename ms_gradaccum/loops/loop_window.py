"""The window of a hand-written loop: which batch ends it, and checks of the order of calls."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from mindspore import nn

from ms_gradaccum import _checks as check
from ms_gradaccum._checks import State, warn
from ms_gradaccum.backend.optimizers import check_claims
from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.handed_batches import ActivePasses, Handed, HandedBatches, arrays_in, rows_of
from ms_gradaccum.loops.network_trainer import TrainedNetwork, check_weight, disorder
from ms_gradaccum.loops.schedule import EARLY, UNSEEN, AccumulationConfig, PreparedScheduler
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Accumulator"
UNWEIGHTED = (
    "For 'Accumulator', gradients of other numbers of rows need a weight, but got none: all batches and ranks count "
    "alike. Call accumulator(grads, len(x), loss), or prepare the dataset."
)
_BETWEEN = "Call it at the end of the loop's body."
_COUNTS = dict.fromkeys(("batches", "updates", "steps"), check.is_count)


class LoopWindow:
    """The common window of all networks of a loop."""

    ends = updated = False  # True if the current batch ends the window, and if its update was made.
    in_batch = False  # True if the program is inside a batch.
    batches = 0  # Number of batches in the window, the current one included. The buffers store it, too.
    steps = 0  # Number of batches of a full window; 0 until the next batch decides it.
    updates = 0  # Number of updates made.
    _has_warned_of_rows = _has_warned_of_open = False
    # The number of open no_sync() contexts, and whether the current batch has begun inside one.
    withheld, _is_withheld = 0, False

    def __init__(self, config: AccumulationConfig, networks: Sequence[TrainedNetwork], events: Events) -> None:
        self.config, self.networks, self.events = config, networks, events
        self.schedulers: list[PreparedScheduler] = []
        self.numbers = itertools.count()  # Numbers for the prepared datasets.
        # Positions from a loaded state at which the datasets continue, by the number of the dataset.
        self.places: dict[int, DataPosition] = {}
        self.passes = ActivePasses()
        # The prepared batches that the current batch consists of (expected, until it is recognised), and its rows if it
        # is a piece of one.
        self._batches: list[Handed] = []
        self._is_known = False
        self._piece_rows: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the buffer of some network is not empty."""
        return any(trained.is_open for trained in self.networks)

    @property
    def batches_added(self) -> int:
        """Number of batches in the buffers, including those of compiled functions. It is read from the device."""
        return max(trained.count.read() for trained in self.networks)

    @contextmanager
    def batch(self, join: tuple[bool, int] | None = None) -> Iterator[None]:
        """Context of one batch. If an error comes before anything was added, the batch counts only for other processes.

        ``join`` describes a batch that only other processes have: whether it is the last one, and its epoch.
        """
        if self.in_batch:
            raise disorder("accumulate() must not be entered twice", "it inside itself", "Write one 'with' per batch.")
        self._begin(join)
        self.in_batch, was_open = True, self.is_open
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            if self.networks[0].can_continue_after(error):
                self._join_batch()
                self._end_joined()
            elif self._awaits_batch:
                self.batches -= 1
                self.events.batches -= 1
                self.ends, self._batches = False, []
        finally:
            self.in_batch, is_added = False, any(trained.has_batch for trained in self.networks)
            if not self.is_open and (was_open or is_added):
                # The window was ended by an update, or by an error that the caller has caught inside.
                self.batches = 0
            for trained in filter(lambda trained: trained.is_open, self.networks):
                trained.count.set(self.batches)
            for each in self._batches:
                each.source.train(each, self._piece_rows, self._is_known)
        if error is None or self.networks[0].can_continue_after(error):
            for source in [each.source for each in self._batches if each.source.joins and not each.source.waiting]:
                missing, source.joins = source.joins, 0
                self.join_others(missing, self._batches[0].epoch)
        if error is not None:
            raise error

    def _follow_others(self) -> None:
        """Continue the window of a checkpoint or of a compiled function, with the length of one that begins now."""
        if any([trained.count.was_changed() for trained in self.networks]):
            self.ends, self.steps, self.batches = False, 0, self.batches_added

    def _begin(self, join: tuple[bool, int] | None) -> None:
        check_claims(_OWNER, self.networks)
        self._follow_others()
        if self.ends and self.is_open:
            remedy = "Call step(), or zero_grad() to throw the window away; a batch in no_sync() ends none."
            raise disorder("a full window must be followed by step()", "the next batch", remedy)
        if self.ends:
            self.batches = 0
        # This comes first, because a schedule can raise before anything has begun.
        self._count_batch([] if join is not None else self.passes.coming(), join)
        for trained in self.networks:
            trained.begin_batch(self.ends)
        self.updated = False
        self.events.batches += 1

    def _count_batch(self, batches: list[Handed], join: tuple[bool, int] | None = None) -> None:
        """Count a batch that is expected to consist of these batches of prepared datasets."""
        found = batches[0].epoch if batches else None
        end, epoch = join or (any(each.ends_with(each.source.piece_rows) for each in batches), found)
        if self.batches == 0 or self.steps == 0:
            self.steps = self.config.steps_for(epoch, self.updates)
        self.batches += 1
        self._is_withheld = self.withheld > 0
        self._find_end(end)
        self._batches, self._is_known, self._piece_rows = batches, False, None

    def _find_end(self, end_of_data: bool) -> None:
        """Determine whether the current batch ends the window."""
        is_full = self.batches >= self.steps or (end_of_data and self.config.sync_with_dataloader)
        self.ends = is_full and not self._is_withheld

    def recognise(self, inputs: object, weight: float = 1.0) -> None:
        """Determine the batch of a prepared dataset that ``inputs`` are, or are a piece of, with this weight."""
        arrays = list(arrays_in(inputs))
        found = self.passes.find(arrays)
        if found:
            self._batches = list(dict.fromkeys([*self._batches, *found] if self._is_known else found))
            self.passes.trained = [each.source for each in self._batches]
            self._is_known, self._piece_rows = True, None
        elif not self._is_known:
            # Use the weight as rows only if there were pieces before: it may count tokens, and 1 is the default.
            cuts = any(each.source.pieces_before_that_of(each) > 1 for each in self._batches)
            self._piece_rows = weight if cuts and weight != 1.0 else rows_of(arrays)
        if self._batches:
            self._find_end(any(each.ends_with(self._piece_rows) for each in self._batches))

    @property
    def _awaits_batch(self) -> bool:
        """True if the current batch is counted but not added yet."""
        return self.in_batch and not any(trained.has_batch for trained in self.networks)

    def why_not_due(self) -> str:
        """Return why a scheduler that is called now moves nothing, if the order of calls is the reason."""
        if self.updates:
            return ""
        if any(trained.count.buffer.counts_in_graph for trained in self.networks):
            return UNSEEN
        if not self.in_batch:
            return "" if self.events.batches else EARLY
        return EARLY if self.ends and (self._awaits_batch or all(each.is_open for each in self.networks)) else ""

    def _begin_anew(self) -> None:
        """Begin a window, with the current batch or with the rest of it."""
        self.batches = 0
        if self._awaits_batch:
            self._count_batch(self._batches)
        elif self.in_batch:
            self.batches = 1

    @contextmanager
    def batch_of(self, trained: TrainedNetwork) -> Iterator[None]:
        """Context in which one network adds its batch. Outside `batch` it begins one."""
        if not self.in_batch and len(self.networks) > 1:
            remedy = "They share their batches: write 'with accumulator.accumulate():' around what belongs to one."
            raise disorder("several networks must be trained in accumulate()", "a call outside it", remedy)
        with nullcontext() if self.in_batch else self.batch():
            trained.check_order()
            try:
                yield
            finally:
                if trained.has_batch:
                    # Written at the end of the batch, which may have updated and cleared the buffers by then.
                    trained.count.set(self.batches, writes=False)

    def weight_of(self, weight: object, trained: TrainedNetwork) -> float:
        """Return the weight of a batch: the given one or the rows that a prepared dataset knows; or warn."""
        if weight is not None:
            return check_weight(weight)
        batches = self._batches if self.in_batch else self.passes.coming()
        lengths = {each.length for each in batches}
        rows = lengths.pop() if len(lengths) == 1 and trained.network.batch_axis == 0 else None
        is_whole = all(each.pieces == 0 for each in batches)
        is_alone = self.config.accumulation_steps == 1 and self.config.schedule is None and not trained.is_distributed
        if not (is_alone or (rows and is_whole) or self._has_warned_of_rows):
            self._has_warned_of_rows = True
            warn(UNWEIGHTED)
        return float(rows or 1)

    def begin_pass(self, handed: HandedBatches, can_continue_after: bool) -> None:
        """Begin or continue a pass; warn if the previous pass over the same data left a window open."""
        is_over = bool(handed.depth) or not handed.waiting
        left = handed.current is not None and is_over and not can_continue_after and not self._is_withheld
        if not self.passes.begin(handed) and left and self.config.sync_with_dataloader:
            self.warn_if_open("when the next pass over its data began")

    def warn_if_open(self, when: str) -> None:
        """Warn, once, if there is an unfinished window."""
        if self.is_open and not (self.in_batch or self._has_warned_of_open):
            self._has_warned_of_open = True
            self._follow_others()
            check.warn_of_open(_OWNER, self.batches or self.batches_added, when)

    def state_dict(self) -> State:
        """Return the state of the loop, as JSON. Its networks and datasets have states of their own."""
        self._follow_others()
        return {
            "ends": self.ends,
            "updated": self.updated,
            "counter": {name: getattr(self, name) for name in _COUNTS},
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, saved: State) -> None:
        """Restore what `state_dict` has returned. The windows of the networks must have loaded their states before."""
        flags = check.check_saved(saved, "where its window stands", dict.fromkeys(("ends", "updated"), check.is_flag))
        schedulers = check.check_saved_list(saved.get("schedulers"), "schedulers", len(self.schedulers))
        counts = check.check_saved(saved.get("counter"), "how many batches and updates its loop had", _COUNTS)
        with check.all_or_nothing(self):
            for scheduler, its in zip(self.schedulers, schedulers):
                scheduler.load_state_dict(its)
        # The state may come from a rank with more batches in the window.
        vars(self).update(flags | counts | {"batches": max(counts["batches"], self.batches_added)})

    def check_between_batches(self, owner: str) -> None:
        """Raise unless the program is between two batches, where a state can be saved."""
        if self._awaits_batch:
            raise disorder(f"{owner}() must come before accumulate() or after backward()", "it in between", _BETWEEN)
        if any(trained.is_reduced or trained.clip is not None for trained in self.networks):
            raise disorder(f"{owner}() must come before clip_grad_norm() or after step()", "it in between", _BETWEEN)

    def step(self, trained: TrainedNetwork, clip: nn.Cell | None = None) -> StepOutput:
        """End the window of one network; ``clip`` is for a window that the loop has not clipped."""
        self.events.tell("on_update_begin")
        output = trained.close(trained.clip or clip)
        if output.is_updated:
            self.updates += not self.updated
            self.updated = True
            for scheduler in self.schedulers:
                scheduler.is_due |= self._follows(scheduler, trained)
        self.events.update_end(output)
        return output

    def _follows(self, scheduler: PreparedScheduler, trained: TrainedNetwork) -> bool:
        """Return whether a scheduler steps after an update of ``trained``: not if its optimizer made none."""
        ends = [(end, network is trained) for network in self.networks for end in network.ends.of_optimizers]
        own = [(end, is_own) for end, is_own in ends if end.runs(scheduler.optimizer)]
        return not own or any(end.has_updated and is_own for end, is_own in own)

    def flush(self) -> tuple[StepOutput, ...]:
        self.ends, self.updated = True, False
        outputs = tuple(self.step(trained, trained.last_clip) for trained in self.networks)
        if self._awaits_batch:
            self._begin_anew()
        return outputs

    def drop(self) -> int:
        batches = self.batches_added
        for trained in self.networks:
            trained.discard()
        self.ends = False
        self._begin_anew()
        return batches

    def join_others(self, missing: int, epoch: int) -> None:
        for i in range(missing):
            self.join((i == missing - 1, epoch))

    def join(self, join: tuple[bool, int] | None = None) -> None:
        """Join the collectives of a batch with no local data."""
        with self.batch(join):
            self._join_batch()
        self._end_joined()

    def _join_batch(self) -> None:
        """Join the collectives of a batch with no local data, or the remaining ones of a batch that has failed."""
        for trained in self.networks:
            if not trained.has_batch:
                trained.micro_steps.join()
                trained.has_batch = True
                trained.count.set(self.batches, writes=False)

    def _end_joined(self) -> None:
        """If the batch ends the window, end it as the other processes do."""
        if not self.ends:
            return
        for trained in filter(lambda trained: trained.is_open, self.networks):
            self.step(trained, trained.last_clip)
        for scheduler in filter(lambda scheduler: scheduler.follows_updates, self.schedulers):
            scheduler.step()
