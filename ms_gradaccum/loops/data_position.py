"""The order of the samples: the random states that determine it, and the resumption of a pass in the middle.

MindSpore's pipelines follow one seed, which is random unless the program sets it. Data in Python follows the generators
of Python and NumPy. Both are recorded when a pass begins. A resumed pass restores them and skips what was taken.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mindspore.dataset as ds
from mindspore.dataset import Dataset
from mindspore.dataset.engine.datasets import ShuffleDataset
from mindspore.dataset.transforms.py_transforms_util import Implementation

from ms_gradaccum._checks import DamagedState, State, check_saved, is_count, warn
from ms_gradaccum.backend.mindspore_private import dataset_config
from ms_gradaccum.backend.random_states import (
    checked_random_states,
    host_random_states,
    put_device_random_state,
    put_random_states,
)

# The seed that MindSpore takes for "not set".
_UNSET = 5489
_PYTHON_INSIDE = (ds.NumpySlicesDataset, ds.PaddedDataset)
# The rules for the counts of a `DataPosition` in a state.
_COUNTS: dict[str, Callable[[object], bool]] = {
    "epoch": lambda epoch: is_count(epoch, -1),
    "first_epoch": is_count,
    "batches": lambda count: count is None or is_count(count),
    "length": lambda count: count is None or is_count(count),
}


class Sources(NamedTuple):
    """The seed and the random states that determine the order of the samples in an epoch."""

    seed: int  # The seed of MindSpore's pipelines.
    random: State  # The states of Python's and NumPy's generators.

    @staticmethod
    def now(ranks: int) -> "Sources":
        """Return the sources of a pass that begins now. A single process without a seed gets a known one."""
        seed = ds.config.get_seed()
        if seed == _UNSET and ranks == 1:
            # Draw from the system, so that the program's own random numbers do not change.
            seed = secrets.randbelow(2**31)
        return Sources(seed, host_random_states())

    def check_known(self, data: object, ranks: int) -> None:
        """Warn if a resumed pass will have another order."""
        if (
            self.seed == _UNSET
            and ranks > 1
            and isinstance(data, Dataset)
            and not _is_repeated(data)
        ):
            warn(
                "For 'save_state', each process shuffles with its own random seed, so that a "
                "resumed pass will have another order. Call mindspore.dataset.config.set_seed()."
            )

    @contextmanager
    def begun(self, data: object, random_now: State | None) -> Iterator[None]:
        """Take the first batch of a pass over ``data`` inside this context, after which ``random_now`` is restored."""
        before = ds.config.get_seed()
        if random_now is not None:
            put_random_states(self.random)
        # `ds.config.set_seed` would seed Python and NumPy, too.
        dataset_config.set_seed(self.seed)
        try:
            yield
        finally:
            dataset_config.set_seed(before)
        # Threads of such data have already drawn more from Python's and NumPy's generators, so leave these as they are.
        if random_now is not None and not _draws_in_python(data):
            put_random_states(random_now)


def _is_repeated(dataset: Dataset) -> bool:
    """Return whether a pipeline has the same order without a seed: sequential, or distributed among the ranks."""
    if dataset.children and not isinstance(dataset, ShuffleDataset):
        return all(map(_is_repeated, dataset.children))
    return isinstance(
        getattr(dataset, "sampler", None), (ds.DistributedSampler, ds.SequentialSampler)
    )


def _draws_in_python(dataset: object) -> bool:
    """Return whether a pipeline calls Python functions in its own threads. They may draw random numbers."""
    if not isinstance(dataset, Dataset):
        return False
    if isinstance(dataset, ds.GeneratorDataset) and not isinstance(dataset, _PYTHON_INSIDE):
        return True
    for name in ("predicate", "per_batch_map", "batch_size"):
        if callable(getattr(dataset, name, None)):
            return True
    for operation in getattr(dataset, "operations", []):
        if (
            not hasattr(operation, "parse")
            or getattr(operation, "implementation", None) == Implementation.PY
        ):
            return True
    return any(map(_draws_in_python, dataset.children))


def is_unbatched(dataset: object) -> bool:
    """Return whether a dataset is a pipeline that was not batched."""
    pipeline = [dataset]
    for each in pipeline:
        # A generator may hand out batches, and may not be asked twice.
        if (
            type(each) is ds.GeneratorDataset
            or "Batch" in type(each).__name__
            or not isinstance(each, Dataset)
        ):
            return False
        pipeline += each.children
    return True


def warn_of_single_rows(owner: str, columns: Iterable[Any]) -> None:
    """Warn if these columns of a dataset that was not batched are those of a single row, where one has no axis."""
    if any(not column.shape for column in columns):
        warn(
            f"For '{owner}', the dataset has no batch(): it hands out single rows. Call "
            f"dataset.batch(32), for example."
        )


def first_batch(dataset: Dataset) -> tuple[Any, ...]:
    """Return the first batch of a pass that is not trained. The random states stay as they are."""
    before = host_random_states()
    iterator = dataset.create_tuple_iterator(num_epochs=1)
    batch = tuple(next(iterator, ()))
    iterator.stop()  # Its threads draw random numbers, too.
    put_random_states(before)
    return batch


@contextmanager
def skipping(dataset: Dataset, batches: int) -> Iterator[None]:
    """Make iterators over ``dataset`` that begin in this context skip its first batches, as if they had been taken."""
    before = ds.config.get_fast_recovery()
    # Fast recovery would not draw the random numbers of the skipped batches.
    ds.config.set_fast_recovery(False)
    dataset.set_init_step(batches)
    try:
        yield
    finally:
        dataset.set_init_step(0)
        ds.config.set_fast_recovery(before)


def rest_of(
    data: Dataset | Iterable[object], batches: int, passed: Callable[[Dataset], Iterable[object]]
) -> Iterable[object]:
    """Return the rest of a pass over ``data`` after its first ``batches``; ``passed`` makes a pass over a pipeline."""
    if isinstance(data, Dataset):
        if batches == 0:
            return passed(data)
        if batches >= data.get_dataset_size():
            return ()
        with skipping(data, batches):
            return passed(data)
    return itertools.islice(data, batches, None)


class DataPosition(NamedTuple):
    """The position of a process in its data."""

    epoch: int  # Number of the pass, from 0 on; -1 before the first one.
    batches: int | None  # Number of batches taken in this pass; None between two passes.
    length: int | None  # Number of batches of a pass on this rank, if known.
    sources: Sources | None  # Sources of the order of this pass.
    ranks: int = 1  # Number of processes that have saved a loaded position, and shared the data.
    # States of Python and NumPy to restore after the resumed pass has begun.
    random_now: State | None = None
    first_epoch: int = 0  # Number of the pass that the sources belong to.

    def state_dict(self) -> State:
        """Return the position as JSON."""
        return {
            "epoch": self.epoch,
            "first_epoch": self.first_epoch,
            "batches": self.batches,
            "length": self.length,
            "sources": self.sources and self.sources._asdict(),
        }

    @staticmethod
    def of_state_dict(saved: State, ranks: int, random_now: State) -> "DataPosition":
        """Return the position in a state that ``ranks`` ranks have saved. Raise if it is invalid."""
        counts = check_saved(saved, "where in its data it was saved", _COUNTS)
        sources = saved.get("sources")
        if sources is not None or counts["batches"] is not None:
            rules = {
                "seed": lambda seed: is_count(seed) and int(seed) < 2**32,
                "random": lambda states: True,
            }
            checked = check_saved(sources, "the seed of its data", rules)
            states = checked_random_states(checked["random"], "the state", has_device=False)
            sources = Sources(checked["seed"], states)
        return DataPosition(**counts, sources=sources, ranks=ranks, random_now=random_now)

    @property
    def next_epoch(self) -> int:
        """Number of the pass of the next batch."""
        return self.epoch + (self.batches is None)

    def taken(self, length: int) -> int:
        """Return the number of batches taken since the first epoch, in passes of so many batches."""
        return (self.next_epoch - self.first_epoch) * length + (self.batches or 0)

    def among(self, length: int | None, ranks: int) -> "DataPosition":
        """Return the place for another number of ranks, each with ``length`` batches in a pass.

        The remaining samples are shared anew. If they do not divide evenly, some come twice.
        """
        if self.length is None or length is None or length == self.length:
            return self
        if abs(self.length * self.ranks - length * ranks) >= max(self.ranks, ranks):
            raise DamagedState(
                f"the state belongs to data with {self.length} batches on each of {self.ranks} "
                f"processes, but got data with {length} on each of {ranks}"
            )
        if self.batches is None:
            return self._replace(length=length)
        batches = min(self.batches * self.ranks // ranks, length - 1)
        return self._replace(batches=batches, length=length)


class SampleOrder:
    """The order of the samples in a Model's training, which is recorded, or restored from a loaded state."""

    sources: Sources | None = None  # None before the data begins.
    # The position of a loaded state, until its first batch is taken.
    resumed: DataPosition | None = None

    def __init__(self, dataset: Dataset, ranks: int, first_epoch: int) -> None:
        self.dataset = dataset
        self.ranks = ranks
        self.first_epoch = first_epoch
        self.length: int = dataset.get_dataset_size()
        self._until_first_batch = ExitStack()

    def resume(self, position: DataPosition) -> DataPosition:
        """Go on from a loaded position. Return the position among the present ranks."""
        position = position.among(self.length, self.ranks)
        self.resumed = position
        self.first_epoch = position.first_epoch
        self.sources = position.sources
        return position

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Begin passes in this context, in which the samples come in a recorded order, or in that of a loaded state."""
        if self.sources is None:
            self.sources = Sources.now(self.ranks)
        position = self.resumed
        with self._until_first_batch as stack:
            stack.enter_context(self.sources.begun(self.dataset, position and position.random_now))
            if position is not None:
                stack.enter_context(skipping(self.dataset, position.taken(self.length)))
            yield

    def end_begin(self) -> None:
        """End the begin once the pipeline has its first batch."""
        self._until_first_batch.close()
        if self.resumed is not None and self.resumed.random_now is not None:
            put_device_random_state(self.resumed.random_now)
            self.resumed = None

    def position(self, passes: int, batches: int) -> DataPosition:
        """Return the position after so many passes and batches of the next one."""
        if self.sources is not None:
            self.sources.check_known(self.dataset, self.ranks)
        epoch = self.first_epoch + passes
        place: int | None = batches
        if batches == 0:  # Between two passes, it is the end of the last one.
            epoch -= 1
            place = None
        return DataPosition(epoch, place, self.length, self.sources, first_epoch=self.first_epoch)
