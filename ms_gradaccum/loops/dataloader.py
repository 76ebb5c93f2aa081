"""Prepared datasets, whose passes a loop trains."""

import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any

from mindspore import nn
from mindspore.dataset import Dataset
from mindspore.experimental.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from ms_gradaccum._checks import State, typed
from ms_gradaccum.loops.data_position import (
    DataPosition,
    Sources,
    is_unbatched,
    rest_of,
    warn_of_single_rows,
)
from ms_gradaccum.loops.loop_data import Handed, HandedBatches, arrays_in
from ms_gradaccum.loops.loop_driver import LoopDriver
from ms_gradaccum.loops.schedule import PreparedScheduler
from ms_gradaccum.parallel.world import current_world, gather_counts

_OWNER = "Accumulator"
_END = object()
_ITERATORS = ("create_tuple_iterator", "create_dict_iterator")

# Takes the batches of one epoch from a pipeline of MindSpore.
Iterate = Callable[[Dataset], Iterable[object]]


class PreparedDataset:
    """A dataset that knows its last batch before handing it out. Each iteration over it is an epoch.

    All processes must iterate at the same time. Those with fewer batches join the collectives of the other ones.
    """

    epoch = -1
    common = 0  # Number of batches of the current epoch that every process has.

    def __init__(self, dataset: Dataset | Iterable[object], driver: LoopDriver) -> None:
        self.dataset = dataset
        self.driver = driver
        self.handed = HandedBatches()
        self.number = next(driver.data.numbers)
        driver.data.datasets[self.number] = self
        self.ranks = current_world(_OWNER).size
        if self.ranks > 1:
            len(self)  # It raises for data without a length.

    def __len__(self) -> int:
        if isinstance(self.dataset, Dataset):
            return int(self.dataset.get_dataset_size())
        if isinstance(self.dataset, Sized):
            return len(self.dataset)
        raise TypeError(
            f"For 'Accumulator', the argument 'dataset' must have a length, but got "
            f"{type(self.dataset).__name__}. The ranks must know who has batches left: give it a "
            f"__len__."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # A copy does not have it yet.
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        if isinstance(self.dataset, Dataset):
            return functools.partial(self._call, name) if callable(value) else value
        if name in _ITERATORS:
            raise AttributeError(
                f"For 'Accumulator', the argument 'dataset' must be one of mindspore.dataset for "
                f"{name}(), but got {type(self.dataset).__name__}. Loop over the object that "
                f"prepare() returned."
            )
        return value

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        """Call a method of the pipeline. Iterators are wrapped; a new pipeline is refused, since it is not prepared."""
        method = getattr(self.dataset, name)
        if name in _ITERATORS:
            settings = inspect.signature(method).bind(*args, **kwargs).arguments | {"num_epochs": 1}
            return PreparedIterator(self, lambda data: getattr(data, name)(**settings))
        result: object = method(*args, **kwargs)
        if isinstance(result, Dataset):
            raise TypeError(
                f"For 'Accumulator', the argument 'dataset' must be complete before prepare(), but "
                f"got {name}() afterwards. Call prepare() last."
            )
        return result

    def __iter__(self) -> Iterator[object]:
        return self.passed(lambda data: data.create_tuple_iterator(num_epochs=1))

    def passed(self, iterate: Iterate) -> Generator[object, None, None]:
        """Yield the batches of one epoch. ``iterate`` takes them from a MindSpore pipeline."""
        taken, sources, random_now = self._begin()
        # The number of batches more than this process that the one with the most has left.
        missing = 0
        if self.ranks > 1:
            left = len(self) - taken
            lengths = gather_counts("begins a pass over its data", left)
            self.common = taken + min(lengths)
            missing = max(lengths) - left
        is_left = True
        try:
            with sources.begun(self.dataset, random_now):
                batches = iter(rest_of(self.dataset, taken, iterate))
                first = list(itertools.islice(batches, 1))
            # Each batch is held until the next one is fetched, so that the last one is known.
            pairs = itertools.pairwise(itertools.chain(first, batches, [_END]))
            for place, (batch, following) in enumerate(pairs, taken + 1):
                is_last = following is _END and missing == 0
                self.driver.data.hand_out(
                    Handed(self.handed, batch, self.epoch, place, is_last, sources)
                )
                yield batch
                # The loop has trained this row, and has not collected others with it.
                is_trained = place == 1 and self.handed.current is self.handed.newest
                if is_trained and self.epoch == 0 and is_unbatched(self.dataset):
                    warn_of_single_rows(_OWNER, arrays_in(batch))
            is_left = False
            if self.handed.are_fetched:
                # The other ranks' batches come after those that this rank has not trained yet.
                self.handed.joins = missing
            else:
                self.driver.join_others(missing, self.epoch)
        finally:
            self.driver.data.end(self.handed, is_left)

    def _begin(self) -> tuple[int, Sources, State | None]:
        """Begin or resume a pass. Return the batches to skip, its order, and the states after its first batch."""
        position = self.driver.data.positions.pop(self.number, None)
        if position is not None and position.length is not None:
            position = position.among(len(self), self.ranks)
        self.epoch = self.epoch + 1 if position is None else position.next_epoch
        self.driver.begin_pass(self.handed, position is not None)
        if position is None or position.batches is None:
            return 0, Sources.now(self.ranks), None
        return position.batches, position.sources or Sources.now(self.ranks), position.random_now

    def position(self) -> DataPosition:
        """Return the position of this process in its data, between two batches."""
        length = None
        if isinstance(self.dataset, (Dataset, Sized)):
            length = len(self)
        if self.number in self.driver.data.positions:
            # No batch was taken after a state was loaded.
            return self.driver.data.positions[self.number].among(length, self.ranks)
        if self.handed.is_ahead and self.handed.waiting:
            # Fetched batches that were not trained count as not taken.
            first = self.handed.waiting[0]
            return DataPosition(first.epoch, first.place - 1, length, first.origin)
        newest = self.handed.newest
        if newest is None or newest.is_last or not self.handed.is_open:
            return DataPosition(self.epoch, None, length, None)
        if self.ranks > 1 and newest.place > self.common:
            raise RuntimeError(
                f"For '{_OWNER}', all processes must still have data when a state is saved, but "
                f"got batch {newest.place} where some have only {self.common}. Save it earlier, or "
                f"after the pass."
            )
        newest.origin.check_known(self.dataset, self.ranks)
        return DataPosition(self.epoch, newest.place, length, newest.origin)


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
        # After a state was loaded, begin a new iteration, because the next batch differs.
        if self.current is None or self.dataset.number in self.dataset.driver.data.positions:
            self.current = self.dataset.passed(self.iterate)
        try:
            return next(self.current)
        except BaseException:
            self.current = None
            raise


def prepare(item: object, driver: LoopDriver) -> object:
    """Return ``item`` prepared for a loop; a Cell is returned unchanged."""
    if isinstance(item, (LRScheduler, ReduceLROnPlateau, SequentialLR)):
        scheduler = PreparedScheduler(item, lambda: driver.in_batch, driver.why_not_due)
        driver.add_scheduler(scheduler)
        return scheduler
    if isinstance(item, nn.Cell):
        return item
    if isinstance(item, Iterable) and not isinstance(item, type):
        return PreparedDataset(item, driver)
    raise TypeError(
        f"For '{_OWNER}', the argument 'objects' must be a dataset, a learning rate scheduler or a "
        f"Cell, but got {typed(item)}. Give the data of the loop."
    )
