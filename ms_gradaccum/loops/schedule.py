"""The schedules of a loop: the number of batches of an update, and the learning rate."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mindspore.experimental.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from ms_gradaccum._checks import State, check_bool, check_saved, check_type, is_flag, warn
from ms_gradaccum.backend.plain_state import PlainState
from ms_gradaccum.training.window_length import (
    AccumulationSteps,
    Schedule,
    WindowLength,
    check_schedule,
    check_window_length,
)

_OWNER = "AccumulationConfig"
EARLY = (
    "For 'Accumulator', scheduler.step() came before the update and was ignored; MindSpore's own "
    "scheduler would move the rate. Call it after accumulator.step(), and move a scheduler ahead "
    "before prepare()."
)
UNSEEN = (
    "For 'Accumulator', scheduler.step() was ignored, because a prepared scheduler does not see "
    "the updates of a compiled accumulator. Leave the scheduler out of prepare(), and call its "
    "step() where the output's `updated` is true."
)


@dataclass(frozen=True)
class AccumulationConfig:
    """Options of an :class:`Accumulator`: the end of its windows, and the communication of its ranks.

    The first three names are those of Hugging Face Accelerate's ``GradientAccumulationPlugin``.

    Args:
        accumulation_steps (Union[int, dict[int, int], BySamples, Callable]): Number of batches of one update, which may
            change at the begin of a window: a dict from passes over the prepared dataset, counted from 0, to the
            batches per window from that pass on (1 before the first key); a :class:`BySamples`; or a function from the
            number of updates so far to the batches of the next update, as ``every_k_schedule`` of optax's
            ``MultiSteps``. Default: ``1``.
        sync_with_dataloader (bool): Whether a window ends with the prepared dataset: the last update has the remaining
            batches and is divided by their true weight. If ``False``, the window continues in the next pass. Default:
            ``True``.
        sync_each_batch (bool): Whether the ranks add up their gradients in each micro batch instead of once per
            update, see :class:`DataParallel`. Default: ``False``.
        schedule (Union[dict[int, int], BySamples, Callable, None]): Earlier name of `accumulation_steps` that change.
            Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number of batches is less than 1, `schedule` is empty or has a negative key, or both it and
            `accumulation_steps` are given.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import AccumulationConfig
        >>> config = AccumulationConfig({1: 2, 3: 4})
        >>> print([config.steps_for(epoch, updates=0) for epoch in range(5)])
        [1, 2, 2, 4, 4]
    """

    accumulation_steps: AccumulationSteps = field(default=1, hash=False)
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    schedule: Schedule | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_window_length(_OWNER, self.accumulation_steps)
        check_bool(
            _OWNER,
            "sync_with_dataloader",
            self.sync_with_dataloader,
            "False carries the last window over.",
        )
        check_bool(_OWNER, "sync_each_batch", self.sync_each_batch, "The default is False.")
        if self.schedule is not None:
            check_schedule(_OWNER, "schedule", self.schedule)
            if self.accumulation_steps != 1:
                raise ValueError(
                    f"For '{_OWNER}', the argument 'accumulation_steps' must be 1 with a schedule, "
                    f"but got {self.accumulation_steps!r} and a schedule. Leave the schedule out, "
                    f"or put the number into it."
                )

    @property
    def window_length(self) -> WindowLength:
        if self.schedule is None:
            return WindowLength("Accumulator", "accumulation_steps", self.accumulation_steps)
        return WindowLength("Accumulator", "schedule", self.schedule)

    def as_text(self) -> str:
        """Return the settings as a text that is equal on all ranks."""
        return (
            repr(replace(self, accumulation_steps=1, schedule=None)) + self.window_length.as_text()
        )

    def steps_for(self, epoch: int | None, updates: int, batches: int = 0) -> int:
        """Return the number of batches of the window that begins now; ``epoch`` is None outside a prepared dataset."""
        return self.window_length.at(epoch, updates, batches)


def merge_config(
    owner: str, accumulation_steps: AccumulationSteps, config: object
) -> AccumulationConfig:
    """Merge `accumulation_steps` and a config into one config."""
    check_window_length(owner, accumulation_steps)
    if config is None:
        return AccumulationConfig(accumulation_steps)
    rule = "an AccumulationConfig or None"
    config = check_type(
        owner, "config", config, AccumulationConfig, rule, "Build one, or leave it out."
    )
    its_steps = config.window_length.steps
    if accumulation_steps in (1, its_steps):
        return config
    if its_steps != 1:
        raise ValueError(
            f"For '{owner}', the argument 'accumulation_steps' must be that of the config, but got "
            f"{accumulation_steps!r} and a config with {its_steps!r}. Give it only once."
        )
    return replace(config, accumulation_steps=accumulation_steps)


class PreparedScheduler:
    """A learning rate scheduler that steps once per update, and not for a skipped one.

    If `step` is called once per epoch, outside the loop over the batches, it steps if there was an update in between.
    """

    # True if it is called in each batch; then it also steps when this process joins an update.
    follows_updates = False
    is_due = False  # True if there was an update since its last step.

    def __init__(
        self,
        scheduler: LRScheduler | ReduceLROnPlateau | SequentialLR,
        in_batch: Callable[[], bool],
        why_not_due: Callable[[], str] = str,
    ) -> None:
        self.scheduler = scheduler
        self.in_batch = in_batch
        self.why_not_due = why_not_due

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # A copy does not have it yet.
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> State:
        """Return the state of the scheduler and of its position in the loop, as JSON."""
        state = PlainState(self.scheduler).state_dict()
        return {"is_due": self.is_due, "follows_updates": self.follows_updates, "scheduler": state}

    def load_state_dict(self, saved: State) -> None:
        rules = dict.fromkeys(("is_due", "follows_updates"), is_flag)
        flags = check_saved(saved, "where its schedulers stand", rules)
        PlainState(self.scheduler).load_state_dict(saved.get("scheduler"))
        vars(self).update(flags)

    def note_update(self) -> None:
        """Let the next `step` call the scheduler."""
        self.is_due = True

    def step(self, *args: object, **kwargs: object) -> None:
        """Call the scheduler's ``step`` if there was an update since the last time."""
        self.follows_updates = self.follows_updates or self.in_batch()
        if self.is_due:
            self.is_due = False
            self.scheduler.step(*args, **kwargs)
        elif why := self.why_not_due():
            warn(why)
