"""``save_state``: write everything that a training needs to continue, atomically."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mindspore as ms

from ms_gradaccum._checks import State, argument_error, check_positive_int, typed, warn
from ms_gradaccum.backend import random_state
from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import KEPT, Contents, SavedState, check_arguments, exchange
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.parallel.world import current_world, digest
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "save_state"


def save_state(
    step: TrainOneStepCell | Accumulator | ms.Model,
    directory: str | os.PathLike[str],
    *,
    keep_checkpoint_max: int = 5,
    extra: Mapping[str, Json] | None = None,
) -> SavedState:
    r"""Save everything that a training needs to continue as if it had not stopped, also in the middle of a window.

    This includes all parameters, the averages of an :class:`EMA`, the optimizer's state, the sums of the open window,
    counts, the loss scale, learning rate schedulers, the position in the data, the states of the random number
    generators of Python, NumPy and MindSpore, and `extra`.

    A state is a folder ``state-000001``, ``state-000002``, ... in `directory`, which gets its name once all files are
    on the disk: a program that is killed at any time leaves the previous state intact. ``mindspore.load_checkpoint``
    reads its safetensors files. All processes of a job call it, with a folder that all can access.

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
    trained, folder = check_arguments(_OWNER, step, directory)
    check_positive_int(_OWNER, "keep_checkpoint_max", keep_checkpoint_max, KEPT)
    checked = _check_extra(extra)
    contents, places = Contents(trained), _places(step, trained)
    numbers = {**contents.state_dict(), "random": random_state.take(), "data": [place.as_json() for place in places]}
    name = _Saving(contents, folder).run(numbers, checked, keep_checkpoint_max)
    return contents.described(folder / name, places, checked)


def _places(step: object, trained: TrainOneStepCell | Accumulator) -> list[PassPlace]:
    """Return the position of this process in its data: for an Accumulator, in each prepared dataset."""
    if isinstance(trained, Accumulator):
        return [dataset.place() for dataset in trained.window.datasets()]
    place = getattr(step, "data_place", None)  # Of a Model.
    return [] if place is None else [place]


class _Saving:
    def __init__(self, contents: Contents, directory: Path) -> None:
        self.contents, self.directory, self.world = contents, directory, current_world(_OWNER)
        self.is_first = self.world.rank == 0

    def run(self, numbers: State, extra: dict[str, Json], keep_checkpoint_max: int) -> str:
        """Write a state on all ranks or on none, and return its name."""
        try:
            name, own_names = self._begin()
            written = self._exchange(lambda: (self._write(files.partial_of(self.directory, name), own_names), numbers))
            found = {file: facts for each, _ in written for file, facts in each.items()}
            ranks = [each for _, each in written]
            manifest = {"versions": {"mindspore": ms.__version__}, "extra": extra, "files": found, "ranks": ranks}
            self._exchange(lambda: files.commit(self.directory, name, manifest) if self.is_first else None)
        except BaseException:
            if self.is_first:
                files.remove_partial(self.directory)
            raise
        try:
            if self.is_first:
                files.keep_last(self.directory, keep_checkpoint_max)
        except OSError as error:
            warn(f"For '{_OWNER}', the state is saved, but an old one cannot be removed ({error}).")
        return name

    def _exchange(self, work: Callable[[], object]) -> list[Any]:
        def explained() -> object:
            try:
                return work()
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"For '{_OWNER}', the state cannot be written to {self.directory}: {error.strerror}. The states "
                    f"before it are whole. Make room, or give a folder that all processes can write to",
                ) from error

        return exchange(self.world.size, explained)

    def _begin(self) -> tuple[str, set[str]]:
        """Agree on the name of the state, and return it with the names of the tensors that each rank writes."""
        held, is_partitioned = self.contents.held, self.contents.is_partitioned
        sums = {name for name, each in held.items() if each.window is not None and not each.gather}
        compared = [name for name, each in held.items() if each.window is None and not each.gather]
        compared = [] if self.world.size == 1 or is_partitioned else compared

        def first_words() -> tuple[str, list[str]]:
            state = files.begin(self.directory) if self.is_first else ""
            return state, [digest([held[name].source]) for name in compared]

        words = self._exchange(first_words)
        digests = zip(*(each for _, each in words))
        differing = {name for name, each in zip(compared, digests) if len(set(each)) > 1}
        shared = {id(parameter) for reducer in self.contents.reducers for parameter in reducer.shared()}
        strangers = sorted(name for name in differing if id(held[name].source) in shared)
        if strangers:
            raise RuntimeError(
                f"For '{_OWNER}', the processes must have the same parameters, but got different ones of "
                f"{strangers[0]!r}. Look for what changes parameters outside the optimizer, or load the last state."
            )
        return words[0][0], set(held) if is_partitioned else differing | sums

    def _write(self, partial: Path, own_names: set[str]) -> files.Files:
        """Write the tensors that are this rank's own, and on rank 0 those that the ranks share."""
        is_open = [window.count.read() > 0 for window in self.contents.windows]
        present = [pair for pair in self.contents.held.items() if pair[1].window is None or is_open[pair[1].window]]
        own = ((name, held.value()) for name, held in present if name in own_names)
        shared = iter([(name, held) for name, held in present if name not in own_names])
        try:
            values = ((name, held.value()) for name, held in shared)
            written = files.write_tensors(partial, "", values) if self.is_first else {}
        finally:
            # The gathers are collective: all ranks join them, and they go on if rank 0 fails to write.
            for _, held in shared:
                if held.gather:
                    held.value()
        return written | files.write_tensors(partial, f"rank_{self.world.rank}/", own)


def _check_extra(extra: Mapping[str, Json] | None) -> dict[str, Json]:
    try:
        held = json.loads(json.dumps({} if extra is None else extra))
    except (TypeError, ValueError, RecursionError):
        held = None
    if not isinstance(held, dict):
        rule, remedy = "a dict of JSON values or None", "Keep numbers, strings, lists and dicts of them."
        raise TypeError(argument_error(_OWNER, "extra", rule, typed(extra), remedy))
    return held
