"""``load_state``: continue a training from a saved state."""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum._checks import (
    DamagedState,
    all_or_nothing,
    another_program,
    argument_error,
    check_saved,
    check_saved_list,
    is_count,
)
from ms_gradaccum.backend import random_state
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Assignments, Contents, assign
from ms_gradaccum.checkpoint.ranks import Ranks
from ms_gradaccum.checkpoint.saved_state import SavedState, check_directory, step_of
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "load_state"


def load_state(step: TrainOneStepCell | Accumulator | ms.Model, directory: str | os.PathLike[str]) -> SavedState:
    r"""Load the state that :func:`save_state` has saved into a training step.

    Build the step as before: with the same network, optimizer and settings. The whole state is checked first. If a file
    is damaged, a tensor is missing or has another shape, or a value is invalid, an error is raised and the step is
    unchanged. Nothing in the files is executed.

    The number of processes may change. Parameters and optimizer state are resharded. With fewer processes, the sums of
    an open window are added up, since a window is one sum over all processes. Datasets that are sharded over the
    processes go on with the samples that are left. Data parallelism can be replaced by HSDP. States of
    semi-auto-parallel steps hold the part of each process: load them with the same number of processes, or load the
    tensors with MindSpore's functions for distributed checkpoints.

    With the same number of processes, the training continues bit for bit as it would have. The exception are operators
    with a random state inside a kernel, such as ``nn.Dropout`` on CPU: MindSpore restarts them from their seed.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): The training step. The prepared datasets of an Accumulator
            continue from their positions, in the order in which they are prepared. A Model's dataset does so in
            ``train(..., resume=True)``.
        directory (Union[str, PathLike]): Folder of states, of which the last one is loaded, or the folder of one state.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is not a valid path, there is no state, it is damaged, or it belongs to another
            program.
        RuntimeError: If an Accumulator is in the middle of a batch.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        See :func:`save_state`.
    """
    trained = step_of(_OWNER, step)
    if isinstance(trained, Accumulator) and trained.window.in_batch:
        raise RuntimeError(
            f"For '{_OWNER}', the state must be loaded between two batches, but got a call inside accumulate(). "
            f"Call it before the loop."
        )
    return _Loading(step, trained).run(check_directory(_OWNER, directory))


class _Checked(NamedTuple):
    """The checked contents of a state, which are assigned once all ranks have accepted it."""

    tensors: Assignments
    # None on a rank that did not save: with the random state of another rank, both would draw the same numbers.
    random: dict[str, Any] | None
    places: list[PassPlace]
    told: SavedState


class _Loading:
    def __init__(self, step: Any, trained: Any) -> None:
        self.ranks = Ranks(_OWNER)
        self.trained = trained
        self.model = step if isinstance(step, ms.Model) else None
        self.contents = Contents(trained)

    def run(self, directory: Path) -> SavedState:
        words = self.ranks.exchange(lambda: str(_choose(directory)) if self.ranks.is_first else "")
        found: list[_Checked] = []
        # Numbers are restored if this or another rank refuses one. Tensors are too large, so they are checked first.
        with all_or_nothing(self.contents):
            self.ranks.exchange(lambda: found.append(self._load_numbers(Path(words[0]))))
        self._assign(found[0])
        return found[0].told

    def _load_numbers(self, state: Path) -> _Checked:
        """Check everything, then load the numbers."""
        try:
            manifest = files.read_manifest(state)
            everyone = manifest.get("ranks")
            if not isinstance(everyone, list) or not everyone or not all(isinstance(each, dict) for each in everyone):
                raise DamagedState(f"{state / files.MANIFEST} says nothing of its processes")
            if not isinstance(manifest.get("extra"), dict):
                raise DamagedState(f"{state / files.MANIFEST} says nothing of what was to be kept")
            batches = self._batches(everyone)
            tensors = self._plan_tensors(state, manifest["files"], batches)
            # This rank takes the values of the saving rank with the same number, modulo the number of saving ranks.
            rank, saved = self.ranks.world.rank, len(everyone)
            numbers = everyone[rank % saved]
            random = random_state.checked(numbers.get("random"), "the state")
            places = _places(numbers.get("data"), saved, random)
            # An open window continues on all ranks, also on those that did not save.
            windows = [{**its, "batches": max(counts)} for its, counts in zip(numbers["windows"], zip(*batches))]
            self.contents.load_state_dict({**numbers, "windows": windows})
        except DamagedState as error:
            raise ValueError(_refused(state, str(error))) from None
        events, epoch = self.trained.events, places[0].next_epoch if places else None
        told = SavedState(state, events.batches, events.updates, epoch, manifest["extra"])
        return _Checked(tensors, random if rank < saved else None, places, told)

    def _batches(self, everyone: list[dict[str, Any]]) -> list[list[int]]:
        """Return the number of batches in each window of each saving rank."""
        number, size = len(self.contents.windows), self.ranks.world.size
        if self.contents.has_shards and len(everyone) != size:
            raise another_program(f"has the network's shards of {len(everyone)} processes, not {size}. Take as many")
        if self.contents.is_partitioned and len(everyone) != size:
            raise another_program(
                f"has the compiler's partition over {len(everyone)} processes, not {size}. MindSpore's "
                f"transform_checkpoints makes one of the other"
            )
        windows = [check_saved_list(each.get("windows"), "windows", number) for each in everyone]
        what = "how many batches its windows had"
        batches = [[check_saved(its, what, {"batches": is_count})["batches"] for its in each] for each in windows]
        limit = getattr(self.trained, "accumulation_steps", None)
        most = max((count for counts in batches for count in counts), default=0)
        if limit is not None and 0 < most >= limit:
            raise another_program(f"has {most} batches in its window, where accumulation_steps is {limit}")
        return batches

    def _plan_tensors(self, state: Path, written: dict[str, Any], batches: list[list[int]]) -> Assignments:
        rank, size, saved = self.ranks.world.rank, self.ranks.world.size, len(batches)

        @cache
        def own_of(number: int) -> dict[str, Any]:
            return files.read_tensors(state, written, f"rank_{number}/")

        common = files.read_tensors(state, written, "")
        return [
            *self.contents.plan_tensors(common | own_of(rank % saved)),
            *self.contents.plan_sums(common, own_of, range(rank, saved, size), batches),
        ]

    def _assign(self, checked: _Checked) -> None:
        assign(checked.tensors)
        if isinstance(self.trained, Accumulator):
            self.trained.window.resume_at(checked.places)
        elif self.model is not None and checked.places:
            self.model.resumed_place = checked.places[0]
        if checked.random is not None:
            random_state.put(checked.random)


def _places(saved: Any, ranks: int, random: dict[str, Any]) -> list[PassPlace]:
    if not isinstance(saved, list):
        raise DamagedState("the state does not say where in its data it was saved")
    return [PassPlace.of_json(place, ranks)._replace(random_now=random) for place in saved]


def _choose(directory: Path) -> Path:
    """Return the last state in a folder, or the folder itself if it is a state."""
    directory = directory.absolute()
    if files.number_of(directory) and directory.is_dir():
        return directory
    states = files.states_in(directory) if directory.is_dir() else []
    if not states:
        got, remedy = "which has none", "Give the one that save_state() has written to."
        renamed = files.renamed_states(directory)
        if renamed:
            got = f"where a state has another name, {renamed[0].name}"
            remedy = f"Call {renamed[0]} by the name that save_state() gave it, such as state-000001."
        elif not directory.exists():
            got = "which is not there"
        raise ValueError(argument_error(_OWNER, "directory", "a folder with states", f"{directory}, {got}", remedy))
    return states[-1]


def _refused(state: Path, reason: str) -> str:
    before = [other for other in files.states_in(state.parent) if files.number_of(other) < files.number_of(state)]
    remedy = f"The state before it is {before[-1]}: give that folder." if before else "There is none before it."
    return f"For '{_OWNER}', the state {state} cannot be used: {reason}. Nothing was changed. {remedy}"
