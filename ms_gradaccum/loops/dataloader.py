"""Prepared datasets and learning rate schedulers, which follow the window of a loop."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any

from mindspore import nn
from mindspore.dataset import Dataset
from mindspore.experimental.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from ms_gradaccum._checks import State, argument_error, check_saved, is_flag, typed, warn
from ms_gradaccum.backend import plain_state
from ms_gradaccum.loops.data_position import PassPlace, Sources, rest_of
from ms_gradaccum.loops.handed_batches import ActivePasses, Handed, HandedBatches
from ms_gradaccum.parallel.world import current_world, gather_counts

_OWNER = "Accumulator"
_END = object()
_ITERATORS = ("create_tuple_iterator", "create_dict_iterator")

# Takes the batches of one epoch from a pipeline of MindSpore.
Iterate = Callable[[Dataset], Iterable[object]]


class PreparedData:
    """The prepared datasets and schedulers of a loop. Its `LoopWindow` is one."""

    in_batch = False  # True if the program is inside a batch.

    def __init__(self) -> None:
        # By their numbers. Weak references, since a program may prepare anew for each pass.
        self.datasets: weakref.WeakValueDictionary[int, PreparedDataset] = weakref.WeakValueDictionary()
        self.numbers = itertools.count()
        self.passes = ActivePasses()
        # Positions in a loaded state at which the datasets go on, by the number of the dataset.
        self.places: dict[int, PassPlace] = {}
        self.schedulers: list[PreparedScheduler] = []

    def begin_pass(self, handed: HandedBatches, goes_on: bool) -> None:
        """Begin a pass, or go on with one."""
        raise NotImplementedError

    def join_others(self, missing: int, epoch: int) -> None:
        """Join the collectives of the last batches of an epoch, of which this process has ``missing`` fewer."""
        raise NotImplementedError


class PreparedDataset:
    """A dataset whose last batch is known before it is used. Each iteration over it is an epoch.

    All processes must iterate at the same time; those with fewer batches join the collectives of the others' last ones.
    """

    epoch, at_end = -1, False
    # For the current epoch: the batches taken, the batches that every process has, and the sources of their order.
    batches = common = 0
    sources: Sources | None = None

    def __init__(self, dataset: Dataset | Iterable[object], window: PreparedData) -> None:
        self.dataset, self.window = dataset, window
        self.number = next(window.numbers)
        window.datasets[self.number] = self
        self.handed = HandedBatches()
        self.ranks = current_world(_OWNER).size
        if self.ranks > 1:
            len(self)  # It raises for data without a length.

    def __len__(self) -> int:
        if isinstance(self.dataset, Dataset):
            return int(self.dataset.get_dataset_size())
        if isinstance(self.dataset, Sized):
            return len(self.dataset)
        got, remedy = type(self.dataset).__name__, "The ranks must know who has batches left: give it a __len__."
        raise TypeError(argument_error(_OWNER, "dataset", "one with a length", got, remedy))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # A copy does not have it yet.
            raise AttributeError(name)
        value, is_pipeline = getattr(self.dataset, name), isinstance(self.dataset, Dataset)
        if name in _ITERATORS and not is_pipeline:
            rule, got = f"a pipeline of MindSpore's for {name}()", type(self.dataset).__name__
            remedy = "Loop over what prepare() has returned."
            raise AttributeError(argument_error(_OWNER, "dataset", rule, got, remedy))
        return functools.partial(self._call, name) if is_pipeline and callable(value) else value

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        """Call a method of the pipeline. Its iterators are prepared; a new pipeline would not be."""
        method = getattr(self.dataset, name)
        if name in _ITERATORS:
            settings = inspect.signature(method).bind(*args, **kwargs).arguments | {"num_epochs": 1}
            return PreparedIterator(self, lambda data: getattr(data, name)(**settings))
        result: object = method(*args, **kwargs)
        if isinstance(result, Dataset):
            got, remedy = f"{name}() of a prepared one", "Prepare the whole pipeline, as the last step."
            raise TypeError(argument_error(_OWNER, "dataset", "prepared when it is complete", got, remedy))
        return result

    def __iter__(self) -> Iterator[object]:
        return self.passed(lambda data: data.create_tuple_iterator(num_epochs=1))

    def passed(self, iterate: Iterate) -> Generator[object, None, None]:
        """Yield the batches of one epoch, which ``iterate`` takes from a pipeline of MindSpore."""
        (sources, random_now), is_left = self._begin(), True
        left = len(self) - self.batches if self.ranks > 1 else 0
        lengths = gather_counts(left) if self.ranks > 1 else [left]
        missing, self.common = max(lengths) - left, self.batches + min(lengths)
        try:
            with sources.begun(self.dataset, random_now):
                batches = iter(rest_of(self.dataset, self.batches, iterate))
                first = list(itertools.islice(batches, 1))
            # Each batch is held until the next one is there, which tells whether it is the last one.
            for batch, following in itertools.pairwise(itertools.chain(first, batches, [_END])):
                self.at_end = following is _END and missing == 0
                self.batches += 1
                self.window.passes.enter(self.handed)
                self.handed.hand_out(Handed(self.handed, batch, self.epoch, self.batches, self.at_end, self.sources))
                yield batch
            is_left = False
            if self.handed.are_fetched:
                # The batches of the other ranks come after those that this one has not trained yet.
                self.handed.joins = missing
            else:
                self.window.join_others(missing, self.epoch)
        finally:
            self.handed.end(is_left)
            self.at_end, self.sources = False, None
            self.window.passes.leave(self.handed)

    def _begin(self) -> tuple[Sources, State | None]:
        """Begin or resume a pass. Return the sources of its order, and the random states after its first batch."""
        place, random_now = self.window.places.pop(self.number, None), None
        is_resumed, self.batches, self.sources = place is not None, 0, None
        if place is not None:
            place = place.among(None if place.length is None else len(self), self.ranks)
            self.epoch = place.next_epoch - 1
            if place.batches is not None:
                self.batches, self.sources, random_now = place.batches, place.sources, place.random_now
        self.epoch += 1
        self.sources = self.sources or Sources.now(self.ranks)
        restarts = self.handed.restarts
        self.window.begin_pass(self.handed, is_resumed)
        if self.handed.restarts and not restarts:
            warn(
                f"For '{_OWNER}', a prepared dataset that is trained together with another one has begun anew before "
                f"the end of that one, but its last batch has ended a window. Prepare only the data whose end ends "
                f"the loop."
            )
        return self.sources, random_now

    def place(self) -> PassPlace:
        """Return the position of this process in its data, between two batches."""
        length = len(self) if isinstance(self.dataset, (Dataset, Sized)) else None
        if self.number in self.window.places:
            # No batch was taken since a state was loaded.
            return self.window.places[self.number].among(length, self.ranks)._replace(ranks=self.ranks)
        if self.handed.is_ahead and self.handed.waiting:
            # Batches that were fetched and not trained are still to come.
            first = self.handed.waiting[0]
            return PassPlace(first.epoch, first.place - 1, length, first.origin, self.ranks)
        if self.sources is None or self.at_end:
            return PassPlace(self.epoch, None, length, None, self.ranks)
        if self.ranks > 1 and self.batches > self.common:
            raise RuntimeError(
                f"For '{_OWNER}', a state must be saved in a batch that all processes have, but got batch "
                f"{self.batches} of a pass in which some have {self.common}. Save it before, or after the pass."
            )
        self.sources.check_known(self.dataset, self.ranks)
        return PassPlace(self.epoch, self.batches, length, self.sources, self.ranks)


class PreparedIterator:
    """An iterator over a prepared dataset. Each loop over it is an epoch, as for an iterator of MindSpore."""

    current: Generator[object, None, None] | None = None

    def __init__(self, dataset: PreparedDataset, iterate: Iterate) -> None:
        self.dataset, self.iterate = dataset, iterate

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if self.current is not None and self.dataset.number in self.dataset.window.places:
            # A state was loaded, so the next batch is another one.
            self.current.close()
            self.current = None
        if self.current is None:
            self.current = self.dataset.passed(self.iterate)
        try:
            return next(self.current)
        except BaseException:
            self.current = None
            raise


class PreparedScheduler:
    """A learning rate scheduler that steps once per update, and not for a skipped one.

    If it is called once per epoch, outside the loop over the batches, it steps if there was an update in between.
    """

    follows_updates = False  # True if it is called in each batch; then it also steps when this process joins an update.
    is_due = False  # True if there was an update since its last step.

    def __init__(self, scheduler: LRScheduler | ReduceLROnPlateau | SequentialLR, window: PreparedData) -> None:
        self.scheduler, self.window = scheduler, window

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # A copy does not have it yet.
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> State:
        """Return the state of the scheduler and of its position in the loop, as JSON."""
        state = plain_state.take(self.scheduler)
        return {"is_due": self.is_due, "follows_updates": self.follows_updates, "scheduler": state}

    def load_state_dict(self, saved: State) -> None:
        """Load the result of `state_dict`."""
        rules = dict.fromkeys(("is_due", "follows_updates"), is_flag)
        flags = check_saved(saved, "where its schedulers stand", rules)
        plain_state.put(self.scheduler, saved.get("scheduler"))
        vars(self).update(flags)

    def step(self, *args: object, **kwargs: object) -> None:
        """Call the scheduler's ``step`` if there was an update since the last time."""
        self.follows_updates = self.follows_updates or self.window.in_batch
        if self.is_due:
            self.is_due = False
            self.scheduler.step(*args, **kwargs)


def prepare(item: object, window: PreparedData) -> object:
    """Return ``item`` prepared for ``window``; a Cell is returned unchanged."""
    if isinstance(item, (LRScheduler, ReduceLROnPlateau, SequentialLR)):
        window.schedulers.append(PreparedScheduler(item, window))
        return window.schedulers[-1]
    if isinstance(item, nn.Cell):
        return item
    if isinstance(item, Iterable) and not isinstance(item, type):
        return PreparedDataset(item, window)
    rule, remedy = "a dataset, a learning rate scheduler or a Cell", "Give what the loop iterates over."
    raise TypeError(argument_error(_OWNER, "objects", rule, typed(item), remedy))
