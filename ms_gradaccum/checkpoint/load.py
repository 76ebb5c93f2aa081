"""``load_state``: a training goes on where it was saved."""

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
    r"""Give a training step the state that :func:`save_state` has saved, and return what is known of it.

    The step is built as it was: the same network, optimizer and settings. What is saved is checked first, all of it: a
    file that is damaged, a tensor too few or of another shape, a number that is none are refused, and then nothing of
    the step is changed. Nothing in the files is executed.

    The number of processes may be another one. Parameters and optimizer state are cut anew; the sums of an open window
    are added up where there are fewer processes, since a window is one sum whoever holds its parts; datasets that deal
    their samples among the processes go on with those that are left. Data parallel can be exchanged for HSDP.
    States of the compiler's semi-auto-parallel hold each process's own part: load them with as many processes, or
    the tensors with MindSpore's functions for distributed checkpoints.

    On as many processes, what follows is what would have followed, bit for bit. An exception are operators that keep
    their random state in a kernel, as ``nn.Dropout`` does on CPU: MindSpore begins anew with their seed.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): What trains. An Accumulator's prepared datasets go on where
            they were, in the order in which they are prepared. A Model does in ``train(..., resume=True)``.
        directory (Union[str, PathLike]): Folder with states, of which the last one is taken; or one of these.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is no path that the system can have, there is no state, it is damaged, or it belongs
            to another program.
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
    """What of a state is assigned once every rank has found all of it good."""

    tensors: Assignments
    # None on a rank that was not there: with the random numbers of another one, two would draw the same.
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
        # Numbers are put back where one of them is refused, here or on another rank. Tensors are too large for that.
        with all_or_nothing(self.contents):
            self.ranks.exchange(lambda: found.append(self._load_numbers(Path(words[0]))))
        self._assign(found[0])
        return found[0].told

    def _load_numbers(self, state: Path) -> _Checked:
        """Check everything, and load the numbers last."""
        try:
            manifest = files.read_manifest(state)
            everyone = manifest.get("ranks")
            if not isinstance(everyone, list) or not everyone or not all(isinstance(each, dict) for each in everyone):
                raise DamagedState(f"{state / files.MANIFEST} says nothing of its processes")
            if not isinstance(manifest.get("extra"), dict):
                raise DamagedState(f"{state / files.MANIFEST} says nothing of what was to be kept")
            batches = self._batches(everyone)
            tensors = self._plan_tensors(state, manifest["files"], batches)
            # Of those that held it for themselves, this rank takes what its own number had, or the like.
            rank, saved = self.ranks.world.rank, len(everyone)
            numbers = everyone[rank % saved]
            random = random_state.checked(numbers.get("random"), "the state")
            places = _places(numbers.get("data"), saved, random)
            # A window goes on for all ranks, also for those that were not there.
            windows = [{**its, "batches": max(counts)} for its, counts in zip(numbers["windows"], zip(*batches))]
            self.contents.load_state_dict({**numbers, "windows": windows})
        except DamagedState as error:
            raise ValueError(_refused(state, str(error))) from None
        events, epoch = self.trained.events, places[0].next_epoch if places else None
        told = SavedState(state, events.batches, events.updates, epoch, manifest["extra"])
        return _Checked(tensors, random if rank < saved else None, places, told)

    def _batches(self, everyone: list[dict[str, Any]]) -> list[list[int]]:
        """Return how many batches each window of each rank had."""
        number, size = len(self.contents.windows), self.ranks.world.size
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
    """Return the state that is meant by a folder."""
    directory = directory.absolute()
    if files.number_of(directory) and directory.is_dir():
        return directory
    states = files.states_in(directory) if directory.is_dir() else []
    if not states:
        remedy = "Give the one that save_state() has written to."
        raise ValueError(
            argument_error(_OWNER, "directory", "a folder with states", f"{directory}, which has none", remedy)
        )
    return states[-1]


def _refused(state: Path, reason: str) -> str:
    before = [other for other in files.states_in(state.parent) if files.number_of(other) < files.number_of(state)]
    remedy = f"The state before it is {before[-1]}: give that folder." if before else "There is none before it."
    return f"For '{_OWNER}', the state {state} cannot be used: {reason}. Nothing was changed. {remedy}"
