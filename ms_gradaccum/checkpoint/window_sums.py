"""The open window in a state: on each rank the sums of its own micro batches, which can be added to any other's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from ms_gradaccum._checks import DamagedState, is_count
from ms_gradaccum.batch.weighted_loss import MOST_OTHER_LOSSES
from ms_gradaccum.checkpoint.files import another_program
from ms_gradaccum.checkpoint.plain_state import Steps
from ms_gradaccum.parallel.reducer import GradientReducer


class Held(NamedTuple):
    """A tensor of a state: the parameter that takes it, and what gives its value."""

    parameter: Parameter
    value: Callable[[], Any]
    # Whether it is the same on all ranks by construction, and taking its value is collective.
    is_gathered: bool = False


def hold(parallel: GradientReducer | None, parameter: Parameter) -> Held:
    """Return a parameter as a state has it: the whole, if this rank has a part of it alone."""
    if parallel is None or parameter.name not in parallel.gathers:
        return Held(parameter, parameter.asnumpy)
    gather = parallel.gathers[parameter.name]
    return Held(parallel.saved(parameter), lambda: gather(parameter).asnumpy(), True)


class WindowSums:
    """The buffer of an optimizer.

    Args:
        parallel: What has the buffer.
        prefix: What the names of its sums begin with.
    """

    def __init__(self, parallel: GradientReducer, prefix: str) -> None:
        self.buffer = parallel.buffer
        self.terms = list(self.buffer.terms)
        self.held = {f"{prefix}{total.name}": hold(parallel, total) for total in self.buffer.all_sums()}

    def tensors(self) -> dict[str, Held]:
        """Return the sums by name, if the window is open."""
        return self.held if int(self.buffer.batches.asnumpy()) > 0 else {}

    def numbers(self) -> dict[str, Any]:
        """Return what is no tensor, as JSON."""
        dropped, others = self.buffer.dropped, self.buffer.other_losses
        return {
            "batches": int(self.buffer.batches.asnumpy()),
            "terms": [[float(term.loss.asnumpy()), float(term.weight.asnumpy())] for term in self.terms],
            "dropped": None if dropped is None else float(dropped.asnumpy()),
            "other_losses": None if others is None else [pair for pair in others.asnumpy().T.tolist() if pair[1] > 0],
        }

    def plan_numbers(self, saved: list[Any], batches: int) -> Steps:
        """Return what gives the buffer the sums of the numbers of some ranks, which may be none."""
        totals, dropped, others = np.zeros((len(self.terms), 2)), 0.0, np.zeros((2, MOST_OTHER_LOSSES))
        for numbers in saved:
            if numbers.get("dropped") is None and self.buffer.dropped is not None:
                raise another_program("was saved with another bad_micro_batch")
            if numbers.get("other_losses") is None and self.buffer.other_losses is not None:
                raise another_program("was saved with another word for losses")
            totals += _pairs(numbers.get("terms"), len(self.terms))
            dropped += _number(numbers.get("dropped") or 0.0)
            others += _columns(numbers.get("other_losses") or [])
        steps = [_set(self.buffer.batches, batches)]
        if self.buffer.other_losses is not None:
            steps.append(_set(self.buffer.other_losses, others))
        for term, (loss, weight) in zip(self.terms, totals):
            steps += [_set(term.loss, loss), _set(term.weight, weight)]
        return steps if self.buffer.dropped is None else [*steps, _set(self.buffer.dropped, dropped)]

    def plan_tensors(
        self, common: dict[str, Any], own_of: Callable[[int], dict[str, Any]], mine: list[int], ranks: int
    ) -> Steps:
        """Return what gives the buffer its sums.

        Args:
            common: Sums that the saving ranks shared.
            own_of: Gives the sums that a saving rank had for itself.
            mine: Those ranks whose sums this one takes over.
            ranks: Number of saving ranks.
        """
        steps: Steps = []
        for name, (parameter, _, is_gathered) in self.held.items():
            parts = [own_of(rank).get(name) for rank in (range(ranks) if is_gathered else mine)]
            if is_gathered or 0 in mine:
                parts.append(common.get(name))
            steps.append(_set(parameter, _sum(name, parts, parameter.asnumpy())))
        return steps


def batches_in(saved: Any, number: int) -> list[int]:
    """Return the numbers of batches in the windows of a rank's buffers."""
    if not isinstance(saved, list) or len(saved) != number or not all(isinstance(each, dict) for each in saved):
        raise another_program(f"has not {number} buffers")
    counts = [each.get("batches") for each in saved]
    if not all(map(is_count, counts)):
        raise DamagedState("the state has no counts of the batches in its windows")
    return counts


def _sum(name: str, parts: list[Any], like: Any) -> Any:
    parts = [part for part in parts if part is not None]
    if any(part.shape != like.shape or part.dtype != like.dtype for part in parts):
        raise another_program(f"has the sums {name!r} in another shape than {like.shape}, or another dtype")
    total = parts[0] if parts else np.zeros_like(like)
    for part in parts[1:]:
        total = total + part
    return total


def _pairs(values: Any, number: int) -> Any:
    try:
        pairs = np.array(values, np.float64)
    except (TypeError, ValueError):
        pairs = np.zeros(())
    if pairs.shape != (number, 2):
        raise another_program(f"has not {number} terms of its loss")
    return pairs


def _columns(values: Any) -> Any:
    """Return the sums and weights of losses that are reported, as the buffer has them."""
    columns = np.zeros((2, MOST_OTHER_LOSSES))
    try:
        columns[:, : len(values)] = np.array(values, np.float64).reshape(len(values), 2).T
    except (TypeError, ValueError):
        raise DamagedState("the state has no sums and weights of the losses that are reported") from None
    return columns


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DamagedState(f"the state has {value!r} where a number is wanted")
    return float(value)


def _set(parameter: Parameter, value: Any) -> Callable[[], None]:
    tensor = Tensor(value, parameter.dtype)
    return lambda: parameter.set_data(tensor)
