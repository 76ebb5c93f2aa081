"""The learning rate of each update, computed from an optimizer's argument."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ms_gradaccum._checks import argument_error, check_number, typed
from ms_gradaccum.backend.compiled import Compiled

# A rate, one per update, a schedule, or a function of the number of updates before.
LearningRate = float | Sequence[float] | Tensor | LearningRateSchedule | Callable[[int], float]


def check_learning_rate(owner: str, value: Any, updates: int) -> Any:
    """Return ``value`` with a single rate as a float and several rates as a tuple of floats."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist() if isinstance(value, np.ndarray) else value.asnumpy().tolist()
    if isinstance(value, LearningRateSchedule) or (callable(value) and not isinstance(value, nn.Cell)):
        return value
    if _is_number(value):
        return _as_rate(owner, "learning_rate", value)
    if not isinstance(value, (list, tuple)) or not all(_is_number(rate) for rate in value):
        rule = "a number, a list of numbers, a LearningRateSchedule or a function of the update's number"
        remedy = "Give what the optimizer gets."
        raise TypeError(argument_error(owner, "learning_rate", rule, typed(value), remedy))
    if len(value) < updates:
        rule, remedy = f"as long as the {updates} updates", "An optimizer takes one entry per update, not per batch."
        raise ValueError(argument_error(owner, "learning_rate", rule, f"{len(value)} rates", remedy))
    return tuple(_as_rate(owner, f"learning_rate[{i}]", rate) for i, rate in enumerate(value))


def rates_at(owner: str, learning_rate: Any, updates: Iterable[int]) -> list[float]:
    """Return the learning rates of these updates, counted from 0."""
    if isinstance(learning_rate, float):
        return [learning_rate for _ in updates]
    if isinstance(learning_rate, tuple):
        return [learning_rate[update] for update in updates]
    if isinstance(learning_rate, LearningRateSchedule):
        # An optimizer calls it with the number of earlier updates in a tensor of shape (1,).
        schedule = Compiled(lambda: learning_rate, owner, "the learning rate")
        return [float(schedule(Tensor([update], ms.int32)).asnumpy().item()) for update in updates]
    return [_as_rate(owner, f"learning_rate({update})", learning_rate(update)) for update in updates]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_rate(owner: str, name: str, rate: Any) -> float:
    return check_number(owner, name, rate, "It is the rate of an update.")
