"""The description of a saved state, and checks of the arguments of saving and loading."""

from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum._checks import argument_error, check_path
from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.averages import averages_of
from ms_gradaccum.training.train_step import TrainOneStepCell


class SavedState(NamedTuple):
    """A state on the disk.

    Attributes:
        path: Folder of the state.
        batches: Number of batches that this process had trained on.
        updates: Number of updates.
        epoch: Index of the epoch of the next batch, from 0 on; None if only the program knows it.
        extra: The `extra` that was given to :func:`save_state`.
    """

    path: Path
    batches: int
    updates: int
    epoch: int | None
    extra: dict[str, Json]


def step_of(owner: str, step: Any) -> TrainOneStepCell | Accumulator:
    """Return the training step of an argument `step`."""
    if isinstance(step, ms.Model):
        step = step.train_network
    if not isinstance(step, (TrainOneStepCell, Accumulator)):
        rule, got = "a TrainOneStepCell, an Accumulator or a Model", type(step).__name__
        raise TypeError(argument_error(owner, "step", rule, got, "Give what trains, with its optimizer."))
    averages = averages_of(step)
    if averages is not None:
        averages.check_weights_are_there(owner, "the call must come")
    if isinstance(step, Accumulator):
        step.window.check_between_batches(owner)
    return step


def check_directory(owner: str, directory: Any) -> Path:
    """Return the folder of the states as a path."""
    return Path(check_path(owner, "directory", directory, "Give a folder for the states of this training."))
