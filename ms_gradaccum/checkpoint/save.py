"""``save_state``: write everything that a training needs to continue, atomically."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mindspore as ms

from ms_gradaccum._checks import argument_error, check_positive_int, typed, warn
from ms_gradaccum.backend import random_state
from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Contents, Held
from ms_gradaccum.checkpoint.ranks import Ranks
from ms_gradaccum.checkpoint.saved_state import SavedState, check_directory, step_of
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "save_state"
Named = list[tuple[str, Held]]
_Result = TypeVar("_Result")


def save_state(
    step: TrainOneStepCell | Accumulator | ms.Model,
    directory: str | os.PathLike[str],
    *,
    keep_checkpoint_max: int = 5,
    extra: Mapping[str, Json] | None = None,
) -> SavedState:
    r"""Save everything that a training needs to continue as if it had not stopped, also in the middle of a window.

    This includes all parameters, the averages of an :class:`EMA`, the optimizer's state, the sums of the open window
    and their weight, the counts of batches and updates, the loss scale, learning rate schedulers, the position in the
    data, the states of the random number generators of Python, NumPy and MindSpore, and `extra`.

    A state is a folder ``state-000001``, ``state-000002``, ... in `directory`. Tensors are in the safetensors format
    with the names of MindSpore's checkpoints, so that ``mindspore.load_checkpoint`` reads them; all other values, sizes
    and checksums are in ``manifest.json``. There is no pickle. The folder gets its name once all files are on the disk,
    so a program that is killed at any time leaves the previous state intact.

    With several processes, all of them must call it at the same time, with one folder that all can access. Shards are
    gathered tensor by tensor, and each process writes its own sums of an open window. It fails on all processes or on
    none.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): The training step.
        directory (Union[str, PathLike]): Folder of the states of this training. It is created if it is missing.

    Keyword Args:
        keep_checkpoint_max (int): Number of states to keep; older ones are removed once the new one is written.
            Default: ``5``.
        extra (dict, optional): Further values to save, in types of JSON; :func:`load_state` returns them.
            Default: ``None``.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is not a valid path, or `keep_checkpoint_max` is less than 1.
        OSError: If the state cannot be written, for example on a full disk. Earlier states stay intact.
        RuntimeError: If an Accumulator is in the middle of a batch, or the processes' parameters differ.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import GradAccumulation, TrainOneStepCell, load_state, save_state
        >>> def build():
        ...     network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        ...     loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
        ...     return TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.02), accumulation_steps=2)
        >>> x = ops.arange(1, 9).float().reshape(8, 1)
        >>> train_step = build()
        >>> output = train_step(x[:4], 2 * x[:4])
        >>> folder = tempfile.TemporaryDirectory()
        >>> saved = save_state(train_step, folder.name, extra={"seen": 4})
        >>> train_step = build()
        >>> loaded = load_state(train_step, folder.name)
        >>> output = train_step(x[4:], 2 * x[4:])
        >>> print(loaded.batches, loaded.extra, output.loss, train_step.network.trainable_params()[0].value())
        1 {'seen': 4} 102.0 [[2.04]]
        >>> folder.cleanup()
    """
    trained = step_of(_OWNER, step)
    path = check_directory(_OWNER, directory)
    remedy = "It counts the states that are left after this one is saved."
    check_positive_int(_OWNER, "keep_checkpoint_max", keep_checkpoint_max, remedy)
    extra = _check_extra(extra)
    return _Saving(step, trained, path).run(keep_checkpoint_max, extra)


class _Saving:
    def __init__(self, step: Any, trained: Any, directory: Path) -> None:
        self.ranks = Ranks(_OWNER)
        self.directory = directory
        self.trained = trained
        self.model = step if isinstance(step, ms.Model) else None
        self.contents = Contents(trained)
        self.name = ""

    def run(self, keep_checkpoint_max: int, extra: dict[str, Any]) -> SavedState:
        places = self._places()
        data = [place.as_json() for place in places]
        numbers = {**self.contents.state_dict(), "random": random_state.take(), "data": data}
        try:
            own_names = self._begin()
            written = self.ranks.exchange(lambda: [self._write(own_names), numbers])
            self.ranks.exchange(lambda: self._commit(written, extra))
        except BaseException:
            if self.ranks.is_first:
                files.give_up(self.directory, self.name)
            raise
        if self.ranks.is_first:
            self._remove_old(keep_checkpoint_max)
        events, epoch = self.trained.events, places[0].next_epoch if places else None
        return SavedState(self.directory / self.name, events.batches, events.updates, epoch, extra)

    def _places(self) -> list[PassPlace]:
        """Return the position of this process in its data: for an Accumulator, in each prepared dataset."""
        if isinstance(self.trained, Accumulator):
            return [dataset.place() for dataset in self.trained.window.datasets()]
        place = None if self.model is None else getattr(self.model, "data_place", None)
        return [] if place is None else [place]

    def _begin(self) -> set[str]:
        """Agree on the name of the state, and return the names of the tensors that differ between ranks."""
        is_partitioned = self.contents.is_partitioned
        compares = self.ranks.world.size > 1 and not is_partitioned

        def first_words() -> Any:
            name = ""
            if self.ranks.is_first:
                name = files.next_name(self.directory)
                files.begin(self.directory, name)
            return name, self.contents.digests() if compares else {}

        words = self.ranks.exchange(lambda: self._explained(first_words))
        self.name = words[0][0]
        if is_partitioned:
            return set(self.contents.tensors)
        digests = [each for _, each in words]
        differing = {name for name in digests[0] if any(each.get(name) != digests[0][name] for each in digests)}
        strangers = sorted(differing & set(self.contents.trained))
        if strangers:
            raise RuntimeError(
                f"For '{_OWNER}', the processes must have the same parameters, but got different ones of "
                f"{strangers[0]!r}. Look for what changes parameters outside the optimizer, or load the last state."
            )
        return differing

    def _write(self, own_names: set[str]) -> dict[str, Any]:
        sums = list(self.contents.open_sums().items())
        tensors = list(self.contents.tensors.items())
        own = [(name, held) for name, held in tensors if name in own_names]
        own += [(name, held) for name, held in sums if not held.is_gathered]
        common = [(name, held) for name, held in tensors if name not in own_names]
        common += [(name, held) for name, held in sums if held.is_gathered]
        return self._explained(lambda: self._write_common(common) | self._write_files(f"rank_{self._rank}/", own))

    @property
    def _rank(self) -> int:
        return self.ranks.world.rank

    def _write_common(self, common: Named) -> dict[str, Any]:
        """Write the shared tensors on rank 0. The others join its gathers, which go on if rank 0 fails to write."""
        pending = [held for _, held in common if held.is_gathered]
        try:
            return self._write_files("", common, pending) if self.ranks.is_first else {}
        finally:
            for held in pending:
                held.value()

    def _write_files(self, prefix: str, tensors: Named, pending: list[Held] | None = None) -> dict[str, Any]:
        def values() -> Iterator[tuple[str, Any]]:
            for name, held in tensors:
                if pending and pending[0] is held:
                    del pending[0]
                yield name, held.value

        return files.write_tensors(files.partial_of(self.directory, self.name), prefix, values())

    def _commit(self, written: list[Any], extra: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        found = {name: facts for each, _ in written for name, facts in each.items()}
        numbers = [each for _, each in written]
        manifest = {"versions": {"mindspore": ms.__version__}, "extra": extra, "files": found, "ranks": numbers}
        self._explained(lambda: files.commit(self.directory, self.name, manifest))

    def _remove_old(self, keep_checkpoint_max: int) -> None:
        try:
            files.keep_last(self.directory, keep_checkpoint_max)
        except OSError as error:
            warn(f"For '{_OWNER}', the state is saved, but an old one cannot be removed ({error}).")

    def _explained(self, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except OSError as error:
            raise OSError(
                error.errno,
                f"For '{_OWNER}', the state cannot be written to {self.directory}: {error.strerror}. The states before "
                f"it are whole. Make room, or give a folder that all processes can write to",
            ) from error


def _check_extra(extra: Any) -> dict[str, Any]:
    remedy = "Keep numbers, strings, lists and dicts of them."
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        got = typed(extra)
        raise TypeError(argument_error(_OWNER, "extra", "a dict or None", got, remedy))
    try:
        text = json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(argument_error(_OWNER, "extra", "one that JSON holds", f"{error}", remedy)) from None
    held: dict[str, Any] = json.loads(text)
    return held
