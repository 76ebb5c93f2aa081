"""``load_state``: a training goes on where it was saved."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms

from ms_gradaccum._checks import DamagedState, sentence
from ms_gradaccum.checkpoint import files, loop_state
from ms_gradaccum.checkpoint.contents import Contents
from ms_gradaccum.checkpoint.files import another_program
from ms_gradaccum.checkpoint.plain_state import Steps
from ms_gradaccum.checkpoint.ranks import Ranks
from ms_gradaccum.checkpoint.saved_state import SavedState, check_directory, epoch_of, step_of
from ms_gradaccum.checkpoint.window_sums import batches_in
from ms_gradaccum.loops import random_state
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "load_state"


def load_state(step: TrainOneStepCell | Accumulator | ms.Model, directory: str | os.PathLike[str]) -> SavedState:
    r"""Give a training step the state that :func:`save_state` has saved, and return what is known of it.

    The step is built as it was: the same network, optimizer and settings. What is saved is checked first, all of it: a
    file that is damaged, a tensor too few or of another shape, a number that is none are refused, and then nothing of
    the step is changed. Nothing in the files is executed.

    The number of processes may be another one. Weights and optimizer state are cut anew; the sums of an open window are
    added up where there are fewer processes, since a window is one sum whoever holds its parts; datasets that deal
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


class _Loading:
    def __init__(self, step: Any, trained: Any) -> None:
        self.ranks = Ranks(_OWNER)
        self.trained = trained
        self.model = step if isinstance(step, ms.Model) else None
        self.contents = Contents(trained)

    def run(self, directory: Path) -> SavedState:
        words = self.ranks.exchange(lambda: str(_choose(directory)) if self.ranks.is_first else "")
        state = Path(words[0])
        plan: Steps = []
        found: list[SavedState] = []

        def prepare() -> None:
            try:
                manifest = files.read_manifest(state)
                plan.extend(self._plan(state, manifest))
                found.append(self._told(state, manifest))
            except DamagedState as error:
                raise ValueError(_refused(state, str(error))) from None

        self.ranks.exchange(prepare)
        for do in plan:
            do()
        return found[0]

    def _plan(self, state: Path, manifest: dict[str, Any]) -> Steps:
        numbers = manifest.get("ranks")
        if not isinstance(numbers, list) or not numbers or not all(isinstance(each, dict) for each in numbers):
            raise DamagedState(f"{state / files.MANIFEST} says nothing of its processes")
        rank, size, saved = self.ranks.world.rank, self.ranks.world.size, len(numbers)
        if self.contents.is_partitioned and saved != size:
            raise another_program(
                f"has the compiler's partition over {saved} processes, not {size}. MindSpore's transform_checkpoints "
                f"makes one of the other"
            )

        @cache
        def own_of(number: int) -> dict[str, Any]:
            return files.read_tensors(state, manifest["files"], f"rank_{number}/")

        common = files.read_tensors(state, manifest["files"], "")
        # Of those that held it for themselves, this rank takes what its own number had, or the like.
        like = rank % saved
        return [
            *self._plan_tensors(common, own_of, like, range(rank, saved, size), saved),
            *self._plan_window(numbers, range(rank, saved, size)),
            *self.contents.plan_numbers(numbers[like]),
            *self._plan_order(numbers, like, saved),
        ]

    def _plan_tensors(
        self, common: dict[str, Any], own_of: Callable[[int], dict[str, Any]], like: int, mine: range, saved: int
    ) -> Steps:
        sums = {name for each in self.contents.sums for name in each.held}
        tensors = {name: value for name, value in (common | own_of(like)).items() if name not in sums}
        steps = self.contents.plan_tensors(tensors)
        for each in self.contents.sums:
            steps += each.plan_tensors(common, own_of, list(mine), saved)
        return steps

    def _plan_window(self, numbers: list[dict[str, Any]], mine: range) -> Steps:
        buffers = self.contents.sums
        counts = [batches_in(each.get("buffers") or [], len(buffers)) for each in numbers]
        limit = getattr(self.trained, "accumulation_steps", None)
        steps: Steps = []
        for i, sums in enumerate(buffers):
            batches = max(each[i] for each in counts)
            if limit is not None and batches >= limit:
                raise another_program(f"has {batches} batches in its window, where accumulation_steps is {limit}")
            steps += sums.plan_numbers([numbers[rank]["buffers"][i] for rank in mine], batches)
        return steps

    def _plan_order(self, numbers: list[dict[str, Any]], like: int, saved: int) -> Steps:
        """Return what puts back the random states and the places in the data."""
        steps: Steps = []
        now = random_state.checked(numbers[like].get("random"), "the state")
        if isinstance(self.trained, Accumulator):
            steps += loop_state.plan_to_put(self.trained.window, numbers[like].get("loop"), saved, now)
        elif "loop" in numbers[like]:
            raise another_program("is of an Accumulator")
        data = numbers[like].get("data")
        if self.model is not None and data is not None:
            place = PassPlace.of_json(data, saved)._replace(random_now=now)
            steps.append(lambda: setattr(self.model, "resumed_place", place))
        if self.ranks.world.rank < saved:
            # A rank that was not there has its own random numbers, or two would draw the same.
            steps.append(lambda: random_state.put(now))
        return steps

    def _told(self, state: Path, manifest: dict[str, Any]) -> SavedState:
        numbers = manifest["ranks"][self.ranks.world.rank % len(manifest["ranks"])]
        extra = manifest.get("extra")
        if not isinstance(extra, dict):
            raise DamagedState(f"{state / files.MANIFEST} says nothing of what was to be kept")
        events = numbers["events"]
        return SavedState(state, events["batches"], events["updates"], epoch_of(numbers), extra)


def _choose(directory: Path) -> Path:
    """Return the state that is meant by a folder."""
    directory = directory.absolute()
    if files.number_of(directory) and directory.is_dir():
        return directory
    states = files.states_in(directory) if directory.is_dir() else []
    if not states:
        remedy = "Give the one that save_state() has written to."
        raise ValueError(sentence(_OWNER, "directory", "a folder with states", f"{directory}, which has none", remedy))
    return states[-1]


def _refused(state: Path, reason: str) -> str:
    before = [other for other in files.states_in(state.parent) if files.number_of(other) < files.number_of(state)]
    remedy = f"The state before it is {before[-1]}: give that folder." if before else "There is none before it."
    return f"For '{_OWNER}', the state {state} cannot be used: {reason}. Nothing was changed. {remedy}"
