"""The number of batches of an update, and its changes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ms_gradaccum._checks import (
    argument_error,
    check_accumulation_steps,
    check_bool,
    check_choice,
    check_positive_int,
    require,
    typed,
)

_OWNER = "AccumulationConfig"
_SCHEDULE = "AccumulationSchedule"
_Unit = Literal["epoch", "update", "token"]


@dataclass(frozen=True)
class AccumulationSchedule:
    """`accumulation_steps` that change while training. A new number begins with a window, never inside one.

    Nothing is compiled anew: a micro step does not know how long its window is.

    Args:
        milestones (dict[int, int]): Numbers of batches of a window by the count from which they apply, for example
            ``{0: 1, 4: 2}``. Before the first milestone a window has one batch.
        unit (str): The unit of the counts: ``"epoch"``, passes over the prepared dataset, from 0 on, as in PyTorch
            Lightning's ``GradientAccumulationScheduler``; ``"update"``, updates made so far; ``"token"``, the weight of
            all updates so far (rows, if the loss does not count tokens). Default: ``"epoch"``.

    Raises:
        TypeError: If an argument, a milestone or a number of steps has the wrong type.
        ValueError: If `milestones` is empty, a milestone is negative, a number of steps is less than 1, or `unit` is
            unknown.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import AccumulationSchedule
        >>> schedule = AccumulationSchedule({1: 2, 3: 4})
        >>> print([schedule.steps_at(epoch) for epoch in range(5)])
        [1, 2, 2, 4, 4]
    """

    milestones: dict[int, int] = field(hash=False)
    unit: _Unit = "epoch"

    def __post_init__(self) -> None:
        rule, remedy = "a dict from counts to numbers of batches", "For example {0: 1, 4: 2}."
        if not isinstance(self.milestones, dict):
            raise TypeError(argument_error(_SCHEDULE, "milestones", rule, typed(self.milestones), remedy))
        require(self.milestones, _SCHEDULE, "milestones", rule, "an empty one", remedy)
        for count, steps in self.milestones.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(
                    argument_error(_SCHEDULE, "milestones", "a dict whose keys are ints", typed(count), remedy)
                )
            require(count >= 0, _SCHEDULE, "milestones", "a dict whose keys are not negative", count, remedy)
            check_positive_int(_SCHEDULE, f"milestones[{count}]", steps, "It counts the batches of one update.")
        check_choice(_SCHEDULE, "unit", self.unit, get_args(_Unit), "It says what the milestones count.")

    def steps_at(self, count: float) -> int:
        """Return the number of batches of a window that begins after ``count`` epochs, updates or tokens."""
        if isinstance(count, bool) or not isinstance(count, (int, float)):
            got, remedy = typed(count), "It counts epochs, updates or tokens."
            raise TypeError(argument_error(_SCHEDULE, "count", "a number", got, remedy))
        reached = [milestone for milestone in self.milestones if milestone <= count]
        return self.milestones[max(reached)] if reached else 1


Schedule = AccumulationSchedule | dict[int, int] | Callable[[int], int]


@dataclass(frozen=True)
class AccumulationConfig:
    """Options of an :class:`Accumulator`: the end of its windows, and the communication of its ranks.

    The first three names are those of Hugging Face Accelerate's ``GradientAccumulationPlugin``.

    Args:
        accumulation_steps (int): Number of batches of one update. Default: ``1``.
        sync_with_dataloader (bool): Whether a window ends with the prepared dataset: its last update has the batches
            that are left and is divided by their true weight. If ``False``, the window goes on with the next pass.
            Default: ``True``.
        sync_each_batch (bool): Whether the ranks add up their gradients in each micro batch instead of once per
            update, see :class:`DataParallel`. Default: ``False``.
        schedule (Union[AccumulationSchedule, dict[int, int], Callable, None]): `accumulation_steps` that change: a
            schedule; its milestones in epochs; or a function of the number of updates so far that returns the number
            of batches of the next one, as ``every_k_schedule`` of optax's ``MultiSteps``. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `accumulation_steps` is less than 1, or both it and `schedule` are given.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import AccumulationConfig
        >>> config = AccumulationConfig(schedule={0: 2, 2: 1})
        >>> print(config.steps_for(epoch=0, updates=0, tokens=0), config.steps_for(epoch=2, updates=10, tokens=80))
        2 1
    """

    accumulation_steps: int = 1
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    schedule: Schedule | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_accumulation_steps(_OWNER, self.accumulation_steps)
        check_bool(_OWNER, "sync_with_dataloader", self.sync_with_dataloader, "False carries the last window over.")
        check_bool(_OWNER, "sync_each_batch", self.sync_each_batch, "The default is False.")
        if isinstance(self.schedule, dict):
            AccumulationSchedule(self.schedule)
        elif not (self.schedule is None or isinstance(self.schedule, AccumulationSchedule) or callable(self.schedule)):
            rule, remedy = "an AccumulationSchedule, a dict, a function or None", "For example schedule={0: 1, 4: 2}."
            raise TypeError(argument_error(_OWNER, "schedule", rule, typed(self.schedule), remedy))
        is_once = self.schedule is None or self.accumulation_steps == 1
        got = f"{self.accumulation_steps} and a schedule"
        remedy = "Put the number into the schedule, for example schedule={0: 1, 4: 2}."
        require(is_once, _OWNER, "accumulation_steps", "1 with a schedule", got, remedy)

    def as_text(self) -> str:
        """Return the settings as a text that is the same on all ranks, with the name of a function, not its address."""
        if not callable(self.schedule):
            return repr(self)
        return repr(replace(self, schedule=None)) + getattr(self.schedule, "__qualname__", type(self.schedule).__name__)

    def steps_for(self, epoch: int | None, updates: int, tokens: float) -> int:
        """Return the number of batches of the window that begins now; ``epoch`` is None outside a prepared dataset."""
        schedule = self.schedule
        if schedule is None:
            return self.accumulation_steps
        if isinstance(schedule, dict):
            schedule = AccumulationSchedule(schedule)
        if not isinstance(schedule, AccumulationSchedule):
            remedy = "It is called with the number of updates so far."
            return check_positive_int(_OWNER, f"schedule({updates})", schedule(updates), remedy)
        if schedule.unit == "epoch":
            if epoch is None:
                raise ValueError(
                    f"For '{_OWNER}', the argument 'schedule' counts epochs, which takes a prepared dataset, but got a "
                    f"batch from elsewhere. Loop over accumulator.prepare(dataset), or count updates."
                )
            return schedule.steps_at(epoch)
        return schedule.steps_at(updates if schedule.unit == "update" else tokens)


def merge_config(owner: str, accumulation_steps: object, config: object) -> AccumulationConfig:
    """Return the settings that a number and a config give together."""
    accumulation_steps = check_accumulation_steps(owner, accumulation_steps)
    if config is None:
        return AccumulationConfig(accumulation_steps)
    if not isinstance(config, AccumulationConfig):
        rule, remedy = "an AccumulationConfig or None", "Build one, or leave it out."
        raise TypeError(argument_error(owner, "config", rule, typed(config), remedy))
    if accumulation_steps in (1, config.accumulation_steps):
        return config
    theirs = config.accumulation_steps if config.schedule is None else "a schedule"
    rule, got = "the same as that of config", f"{accumulation_steps} and a config with {theirs}"
    require(theirs == 1, owner, "accumulation_steps", rule, got, "Give it in one place.")
    return replace(config, accumulation_steps=accumulation_steps)
