"""What is told of a state that was saved or loaded, and of whom one is taken."""

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
        path: Its folder.
        batches: Batches that this process had trained with.
        updates: Updates made.
        epoch: Number of the pass over the data that the next batch is of, from 0 on; None if only the program knows.
        extra: What was given to :func:`save_state` to be kept with it.
    """

    path: Path
    batches: int
    updates: int
    epoch: int | None
    extra: dict[str, Json]


def step_of(owner: str, step: Any) -> TrainOneStepCell | Accumulator:
    """Return the training step that a caller means."""
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
    """Return the folder of the states."""
    return Path(check_path(owner, "directory", directory, "Give a folder for the states of this training."))
