"""The window of a hand-written loop: the batch that ends it, and checks of the order of calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspore import nn

from ms_gradaccum._checks import (
    State,
    all_or_nothing,
    argument_error,
    check_number,
    check_saved,
    check_saved_list,
    is_flag,
    warn,
    warn_of_open,
)
from ms_gradaccum.backend.optimizers import check_claims
from ms_gradaccum.loops.dataloader import PreparedDatasets, PreparedScheduler
from ms_gradaccum.loops.handed_batches import ActivePasses, Handed, HandedBatches, arrays_in, rows_of
from ms_gradaccum.loops.network_trainer import TrainedNetwork
from ms_gradaccum.loops.schedule import AccumulationConfig, WindowCounter
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "Accumulator"
_BETWEEN = "Call it at the end of the loop's body."


class LoopWindow(PreparedDatasets):
    """The common window of all networks of a loop.

    Attributes:
        ends: True if the current batch ends the window.
        updated: True if its update was made.
        in_batch: True if the program is inside `batch`.
        events: Event dispatcher.
    """

    def __init__(self, config: AccumulationConfig, networks: Sequence[TrainedNetwork], events: Events) -> None:
        super().__init__()
        self.networks = networks
        self.counter = WindowCounter(config)
        self.events = events
        self.passes = ActivePasses()
        self.schedulers: list[PreparedScheduler] = []
        self.ends = self.updated = self.in_batch = self._is_withheld = self._is_known = False
        self._withheld = 0
        # The prepared batches that the current batch has or, as long as it is not known (`_is_known`), is expected to
        # have, and its rows if it is a piece of one. `_is_withheld`: it is inside no_sync().
        self._batches: list[Handed] = []
        self._piece_rows: float | None = None
        # The rows of the window's last batch that came without a weight, if known; True once a difference was reported.
        self._rows: int | None = None
        self._has_warned_of_rows = self._has_warned_of_open = False

    @property
    def is_open(self) -> bool:
        """True if the buffer of some network is not empty."""
        return any(trained.is_open for trained in self.networks)

    @contextmanager
    def batch(self, join: tuple[bool, int] | None = None) -> Iterator[None]:
        """Context of one batch. After an error before anything was added, the batch counts only for other processes.

        ``join`` describes a batch that only other processes have: whether it is the last one, and its epoch.
        """
        if self.in_batch:
            raise _disorder("accumulate() must not be entered twice", "it inside itself", "Write one 'with' per batch.")
        self._begin(join)
        self.in_batch, was_open = True, self.is_open
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            if self.networks[0].goes_on(error):
                self._join_batch()
                self._end_joined()
            elif self._awaits_batch:
                self.counter.take_back_batch()
                self.events.batches -= 1
                self.ends, self._batches = False, []
            if was_open and not self.is_open and not self.ends:
                self.counter.end_window()
        finally:
            self.in_batch = False
            self._keep_count()
            for each in self._batches:
                each.source.train(each, self._piece_rows, self._is_known)
        if error is None or self.networks[0].goes_on(error):
            for source in [each.source for each in self._batches if each.source.joins and not each.source.waiting]:
                missing, source.joins = source.joins, 0
                self.join_others(missing, self._batches[0].epoch)
        if error is not None:
            raise error

    def _follow_sums(self) -> None:
        """Go on with the windows whose sums are there: MindSpore's checkpoints have them, and how many batches."""
        if self.in_batch:
            return
        counts = [trained.count_on_host() for trained in self.networks]
        if counts != [trained.counted for trained in self.networks]:
            for trained, count in zip(self.networks, counts):
                trained.counted = count
            self.counter.go_on_at(max(counts))
            self.ends = False

    def _begin(self, join: tuple[bool, int] | None) -> None:
        check_claims(_OWNER, self.networks)
        self._follow_sums()
        if self.ends and self.is_open:
            remedy = "Call step(), or zero_grad() to throw the window away; a batch in no_sync() ends none."
            raise _disorder("a full window must be followed by step()", "the next batch", remedy)
        if self.ends:
            self.counter.end_window()
        # First: a schedule can refuse, and then nothing has begun.
        self._count_batch([] if join is not None else self.passes.coming(), join)
        for trained in self.networks:
            trained.has_batch = False
            trained.reducers[0].begin_micro_batch(self.ends)
        self.updated = False
        self.events.batches += 1

    def _count_batch(self, batches: list[Handed], join: tuple[bool, int] | None = None) -> None:
        """Count a batch that is expected to have these batches of prepared datasets."""
        found = batches[0].epoch if batches else None
        end, epoch = join or (any(each.ends_with(each.source.piece_rows) for each in batches), found)
        self._is_withheld = self._withheld > 0
        self.ends = self.counter.begin_batch(end, epoch) and not self._is_withheld
        self._batches, self._is_known, self._piece_rows = batches, False, None

    def recognise(self, inputs: object, rows: float | None = None) -> None:
        """Find out which batch of a prepared dataset ``inputs`` are, all of it or a piece with so many rows."""
        arrays = list(arrays_in(inputs))
        found = self.passes.find(arrays)
        if found:
            self._batches = list(dict.fromkeys([*self._batches, *found] if self._is_known else found))
            self.passes.trained = [each.source for each in self._batches]
            self._is_known, self._piece_rows = True, None
        elif not self._is_known:
            # A weight counts tokens, too: it tells of pieces where there were some before.
            cuts = any(each.source.pieces_before_that_of(each) > 1 for each in self._batches)
            self._piece_rows = rows if cuts and rows is not None else rows_of(arrays)
        if self._batches:
            end = any(each.ends_with(self._piece_rows) for each in self._batches)
            self.ends = self.counter.is_full(end) and not self._is_withheld

    @property
    def _awaits_batch(self) -> bool:
        """True if the current batch is counted and nothing of it is added yet."""
        return self.in_batch and not any(trained.has_batch for trained in self.networks)

    def _begin_anew(self) -> None:
        """Begin a window, with the current batch if nothing of it was added to the last one."""
        self.counter.end_window()
        if self._awaits_batch:
            self._count_batch(self._batches)

    def _keep_count(self) -> None:
        """Write the number of batches beside the sums that they are in."""
        for trained in self.networks:
            trained.set_count(self.counter.batches if trained.is_open else 0)

    @contextmanager
    def batch_of(self, trained: TrainedNetwork) -> Iterator[None]:
        """Enclose what adds a batch of one network, inside `batch` or without it."""
        if not self.in_batch:
            if len(self.networks) > 1:
                remedy = "They share their batches: write 'with accumulator.accumulate():' around what belongs to one."
                raise _disorder("several networks must be trained in accumulate()", "a call outside it", remedy)
            with self.batch():
                yield
            return
        if trained.has_batch:
            remedy = "Put both losses into one cell, or write one 'with' per micro batch."
            raise _disorder("a network must have one backward pass in accumulate()", "a second one", remedy)
        if trained.outputs is not None:
            remedy = "The norm is that of the whole window, this batch included."
            raise _disorder("backward() must come before the clipping of its window", "it afterwards", remedy)
        yield

    def checked_weight(self, weight: object) -> float:
        """Return the weight of a batch; warn if it has none and the batch before in its window had other rows."""
        number = check_number(_OWNER, "weight", weight, "It is the number of rows or tokens of the batch.")
        batches = self._batches if self.in_batch else self.passes.coming()
        rows = None if number != 1.0 or not batches else batches[0].rows
        before, self._rows = self._rows if self.is_open else None, rows
        if None in (rows, before) or rows == before or self._has_warned_of_rows:
            return number
        self._has_warned_of_rows = True
        got = f"1.0 for one of {rows} after one of {before}, which count alike now"
        rule, remedy = "the rows of each batch where those of a window differ", "Call accumulator(grads, len(x), loss)."
        warn(argument_error(_OWNER, "weight", rule, got, remedy))
        return number

    @contextmanager
    def withheld(self) -> Iterator[None]:
        """Let no batch that begins here end the window."""
        self._withheld += 1
        try:
            yield
        finally:
            self._withheld -= 1

    def begin_pass(self, handed: HandedBatches, goes_on: bool) -> None:
        """Begin a pass, or go on with one; warn if a window was left open by the pass over the same data before."""
        is_over = bool(handed.depth) or not handed.waiting
        left = handed.current is not None and is_over and not goes_on and not self._is_withheld
        if not self.passes.begin(handed) and left and self.counter.config.sync_with_dataloader:
            self.warn_if_open("when the next pass over its data began")

    def warn_if_open(self, when: str) -> None:
        """Warn, once, if there is an unfinished window."""
        if self.counter.batches and self.is_open and not (self.in_batch or self._has_warned_of_open):
            self._has_warned_of_open = True
            warn_of_open(_OWNER, self.counter.batches, when)

    def state_dict(self) -> State:
        """Return the state of the loop, as JSON. Its networks and datasets have states of their own."""
        return {
            "ends": self.ends,
            "updated": self.updated,
            "counter": self.counter.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, saved: Any) -> None:
        """Go on from what `state_dict` has returned."""
        flags = check_saved(saved, "where its window stands", dict.fromkeys(("ends", "updated"), is_flag))
        schedulers = check_saved_list(saved.get("schedulers"), "schedulers", len(self.schedulers))
        with all_or_nothing(self):
            self.counter.load_state_dict(saved.get("counter"))
            for scheduler, its in zip(self.schedulers, schedulers):
                scheduler.load_state_dict(its)
        vars(self).update(flags)

    def check_between_batches(self, owner: str) -> None:
        """Raise unless the program is between two batches, where a state can be saved."""
        if self._awaits_batch:
            raise _disorder(f"{owner}() must come before accumulate() or after backward()", "it in between", _BETWEEN)
        if any(trained.outputs is not None or trained.clip is not None for trained in self.networks):
            raise _disorder(f"{owner}() must come before clip_grad_norm() or after step()", "it in between", _BETWEEN)
        if self.in_batch:
            self._keep_count()

    def chosen(self, network: nn.Cell | None) -> list[TrainedNetwork]:
        """Return the given network, or all networks for None."""
        chosen = [each for each in self.networks if network is None or any(network is name for name in each.names)]
        if not chosen:
            got, remedy = type(network).__name__, "Give a network that the Accumulator was built with."
            raise ValueError(argument_error(_OWNER, "network", "one of its networks", got, remedy))
        return chosen

    def only(self, network: nn.Cell | None) -> TrainedNetwork:
        """Return the given network, or the only one for None."""
        chosen = self.chosen(network)
        if len(chosen) > 1:
            remedy = "Say which one: backward(*batch, network=loss_cell)."
            raise ValueError(argument_error(_OWNER, "network", f"one of the {len(chosen)} networks", None, remedy))
        return chosen[0]

    def step(self, trained: TrainedNetwork) -> StepOutput:
        """End the window of one network."""
        self.events.update_begin()
        output = trained.close()
        if output.is_updated:
            if not self.updated:
                self.counter.count_update(float(output.weight.asnumpy()))
            self.updated = True
            for scheduler in self.schedulers:
                scheduler.is_due = True
        self.events.update_end(output)
        return output

    def flush(self) -> tuple[StepOutput, ...]:
        """End the window here."""
        self.ends, self.updated = True, False
        outputs = tuple(self.step(trained) for trained in self.networks)
        if self._awaits_batch:
            self._begin_anew()
        return outputs

    def drop(self) -> int:
        """Discard the window and return the number of its batches."""
        self._follow_sums()
        # The batches of a compiled function are counted beside the sums alone.
        batches = self.counter.batches - self._awaits_batch if self.is_open else self.networks[0].count()
        for trained in self.networks:
            trained.discard()
        self.ends = False
        self._begin_anew()
        return batches

    def join_others(self, missing: int, epoch: int) -> None:
        """Join the collectives of the last batches of an epoch, of which this process has ``missing`` fewer."""
        for i in range(missing):
            self.join((i == missing - 1, epoch))

    def join(self, join: tuple[bool, int] | None = None) -> None:
        """Join the collectives of a batch with no local data."""
        with self.batch(join):
            self._join_batch()
        self._end_joined()

    def _join_batch(self) -> None:
        """Join the collectives of a batch with no local data, or the remaining ones of a batch that has failed here."""
        for trained in filter(lambda trained: not trained.has_batch, self.networks):
            trained.join()

    def _end_joined(self) -> None:
        """End the window as the other processes do, if the batch ends it."""
        if not self.ends:
            return
        for trained in filter(lambda trained: trained.is_open, self.networks):
            trained.clip = trained.last_clip
            self.step(trained)
        for scheduler in self.schedulers:
            if scheduler.follows_updates:
                scheduler.step()


def _disorder(rule: str, got: str, remedy: str) -> Exception:
    return RuntimeError(f"For '{_OWNER}', {rule}, but got {got}. {remedy}")
