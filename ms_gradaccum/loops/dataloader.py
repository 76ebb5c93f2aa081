"""Prepared datasets, whose passes a loop trains."""

import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sized
from typing import Any

from mindspore import nn
from mindspore.dataset import Dataset
from mindspore.experimental.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from ms_gradaccum._checks import State, argument_error, typed
from ms_gradaccum.loops.data_position import DataPosition, Sources, rest_of
from ms_gradaccum.loops.handed_batches import Handed, HandedBatches
from ms_gradaccum.loops.loop_window import LoopWindow
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

    def __init__(self, dataset: Dataset | Iterable[object], window: LoopWindow) -> None:
        self.dataset, self.window, self.handed = dataset, window, HandedBatches()
        self.number = next(window.numbers)
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
        """Call a method of the pipeline. Iterators are wrapped; a new pipeline is refused, since it is not prepared."""
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
        """Yield the batches of one epoch. ``iterate`` takes them from a MindSpore pipeline."""
        (taken, sources, random_now), is_left = self._begin(), True
        left = len(self) - taken if self.ranks > 1 else 0
        lengths = gather_counts("begins a pass over its data", left) if self.ranks > 1 else [left]
        missing, self.common = max(lengths) - left, taken + min(lengths)
        try:
            with sources.begun(self.dataset, random_now):
                batches = iter(rest_of(self.dataset, taken, iterate))
                first = list(itertools.islice(batches, 1))
            # Each batch is held until the next one is fetched, so that the last one is known.
            pairs = itertools.pairwise(itertools.chain(first, batches, [_END]))
            for place, (batch, following) in enumerate(pairs, taken + 1):
                is_last = following is _END and missing == 0
                self.window.passes.hand_out(Handed(self.handed, batch, self.epoch, place, is_last, sources))
                yield batch
            is_left = False
            if self.handed.are_fetched:
                # The other ranks' batches come after those that this rank has not trained yet.
                self.handed.joins = missing
            else:
                self.window.join_others(missing, self.epoch)
        finally:
            self.window.passes.end(self.handed, is_left)

    def _begin(self) -> tuple[int, Sources, State | None]:
        """Begin or resume a pass. Return the batches to skip, its order, and the states after its first batch."""
        resumed = self.window.places.pop(self.number, None)
        place = resumed or DataPosition(self.epoch, None, None, None)
        place = place.among(None if place.length is None else len(self), self.ranks)
        self.epoch = place.next_epoch
        self.window.begin_pass(self.handed, resumed is not None)
        if place.batches is None:
            return 0, Sources.now(self.ranks), None
        return place.batches, place.sources or Sources.now(self.ranks), place.random_now

    def place(self) -> DataPosition:
        """Return the position of this process in its data, between two batches."""
        length = len(self) if isinstance(self.dataset, (Dataset, Sized)) else None
        if self.number in self.window.places:
            # No batch was taken after a state was loaded.
            return self.window.places[self.number].among(length, self.ranks)._replace(ranks=self.ranks)
        if self.handed.is_ahead and self.handed.waiting:
            # Fetched batches that were not trained count as not taken.
            first = self.handed.waiting[0]
            return DataPosition(first.epoch, first.place - 1, length, first.origin, self.ranks)
        newest = self.handed.newest
        if newest is None or newest.is_last or not self.handed.is_open:
            return DataPosition(self.epoch, None, length, None, self.ranks)
        if self.ranks > 1 and newest.place > self.common:
            raise RuntimeError(
                f"For '{_OWNER}', a state must be saved in a batch that all processes have, but got batch "
                f"{newest.place} of a pass in which some have {self.common}. Save it before, or after the pass."
            )
        newest.origin.check_known(self.dataset, self.ranks)
        return DataPosition(self.epoch, newest.place, length, newest.origin, self.ranks)


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
        if self.current is None or self.dataset.number in self.dataset.window.places:
            self.current = self.dataset.passed(self.iterate)
        try:
            return next(self.current)
        except BaseException:
            self.current = None
            raise


def prepare(item: object, window: LoopWindow, datasets: MutableMapping[int, PreparedDataset]) -> object:
    """Return ``item`` prepared for ``window``, a dataset noted in ``datasets``; a Cell is returned unchanged."""
    if isinstance(item, (LRScheduler, ReduceLROnPlateau, SequentialLR)):
        window.schedulers.append(PreparedScheduler(item, lambda: window.in_batch, window.why_not_due))
        return window.schedulers[-1]
    if isinstance(item, nn.Cell):
        return item
    if isinstance(item, Iterable) and not isinstance(item, type):
        prepared = PreparedDataset(item, window)
        datasets[prepared.number] = prepared
        return prepared
    rule, remedy = "a dataset, a learning rate scheduler or a Cell", "Give what the loop iterates over."
    raise TypeError(argument_error(_OWNER, "objects", rule, typed(item), remedy))
