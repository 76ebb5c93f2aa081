"""The number of batches of a window, which may follow a schedule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from mindspore import nn

from ms_gradaccum._checks import LOSS_INSIDE, MAX_INT, check_int, check_type, typed

_RULE = "a dict from epochs to numbers of batches, a BySamples or a function"


@dataclass(frozen=True)
class BySamples:
    """A schedule of `accumulation_steps` by the number of samples that were trained before a window.

    This is how Megatron and mindformers ramp a batch up. The number of samples is that of the batches, which all
    processes count alike, times `batch_size`.

    Args:
        steps (dict[int, int]): From numbers of samples to the batches per window from there on; 1 before the first key.
        batch_size (int): Rows of one batch, of all processes together.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `steps` is empty or has a negative key, or a number is less than 1.

    Examples:
        >>> from ms_gradaccum import BySamples
        >>> ramp = BySamples({0: 1, 1000: 2, 5000: 4}, batch_size=32)
        >>> print([ramp.steps_at(batches) for batches in (0, 31, 32, 200)])
        [1, 1, 2, 4]
    """

    steps: dict[int, int] = field(hash=False)
    batch_size: int

    def __post_init__(self) -> None:
        _check_milestones("BySamples", "steps", self.steps)
        check_int(
            "BySamples", "batch_size", self.batch_size, "It counts the rows of all processes."
        )

    def steps_at(self, batches: int) -> int:
        """Return the number of batches of a window that begins after so many batches."""
        return _reached(self.steps, batches * self.batch_size)


Schedule = dict[int, int] | BySamples | Callable[[int], int]
AccumulationSteps = int | Schedule  # The type of the argument `accumulation_steps`.


@dataclass(frozen=True)
class WindowLength:
    """The number of batches of a window, as it was given for an argument ``name``."""

    owner: str
    name: str
    steps: AccumulationSteps

    @property
    def is_fixed(self) -> bool:
        return isinstance(self.steps, int)

    @property
    def most(self) -> int:
        """The largest number that there may be."""
        return self.steps if isinstance(self.steps, int) else MAX_INT

    def as_text(self) -> str:
        """Return a text that is equal on all ranks, with a function's name in place of its address."""
        if callable(self.steps):
            return str(getattr(self.steps, "__qualname__", type(self.steps).__name__))
        return repr(self.steps)

    def at(self, epoch: int | None, updates: int, batches: int) -> int:
        """Return the length of a window that begins after so many updates and batches. The epoch may be unknown."""
        if isinstance(self.steps, int):
            return self.steps
        if isinstance(self.steps, BySamples):
            return self.steps.steps_at(batches)
        if not isinstance(self.steps, dict):
            remedy = "It is called with the number of updates so far."
            return check_int(self.owner, f"{self.name}({updates})", self.steps(updates), remedy)
        if epoch is None:
            raise ValueError(
                f"For '{self.owner}', the argument '{self.name}' counts epochs and needs a Model "
                f"or a prepared dataset, but got a batch from elsewhere. Loop over "
                f"accumulator.prepare(dataset), or count updates with a function, or samples with "
                f"BySamples."
            )
        return _reached(self.steps, epoch)


def check_window_length(owner: str, steps: AccumulationSteps) -> WindowLength:
    """Return the length of windows for the argument `accumulation_steps`, a number or a schedule."""
    if isinstance(steps, (dict, BySamples)) or _is_function(steps):
        check_schedule(owner, "accumulation_steps", steps)
    else:
        remedy = "It counts the batches of one update; 1 means an update per batch."
        if isinstance(steps, nn.Cell):
            remedy = LOSS_INSIDE
        check_int(owner, "accumulation_steps", steps, remedy)
    return WindowLength(owner, "accumulation_steps", steps)


def check_schedule(owner: str, name: str, schedule: Schedule) -> None:
    """Raise unless ``schedule``, the argument ``name``, is one."""
    if isinstance(schedule, dict):
        _check_milestones(owner, name, schedule)
    elif not (isinstance(schedule, BySamples) or _is_function(schedule)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be {_RULE}, but got {typed(schedule)}. "
            f"{_example(name)}"
        )


def _is_function(value: object) -> TypeGuard[Callable[[int], int]]:
    # A cell is callable, too: mostly an optimizer or a loss in a wrong place.
    return callable(value) and not isinstance(value, nn.Cell)


def _example(name: str) -> str:
    return f"For example {name}={{0: 1, 4: 2}}."


def _check_milestones(owner: str, name: str, milestones: dict[int, int]) -> None:
    remedy = _example(name)
    check_type(owner, name, milestones, dict, "a dict", remedy)
    if not milestones:
        raise ValueError(
            f"For '{owner}', the argument '{name}' must be {_RULE}, but got an empty dict. {remedy}"
        )
    for key, steps in milestones.items():
        check_type(owner, name, key, int, "a dict with ints as keys", remedy)
        if key < 0:
            raise ValueError(
                f"For '{owner}', the argument '{name}' must be a dict with keys of at least 0, but "
                f"got {key}. {remedy}"
            )
        check_int(owner, f"{name}[{key}]", steps, "It counts the batches of one update.")


def _reached(milestones: dict[int, int], number: int) -> int:
    """Return the value of the largest key that ``number`` has reached, 1 before the first."""
    reached = [key for key in milestones if key <= number]
    if not reached:
        return 1
    return milestones[max(reached)]
