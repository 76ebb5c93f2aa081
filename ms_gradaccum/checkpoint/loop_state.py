"""The window of a hand-written loop, its datasets and schedulers in a state."""

from typing import Any

from ms_gradaccum._checks import DamagedState, is_count
from ms_gradaccum.checkpoint import plain_state
from ms_gradaccum.checkpoint.files import another_program
from ms_gradaccum.checkpoint.plain_state import Steps
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.loops.dataloader import PreparedScheduler
from ms_gradaccum.loops.loop_window import LoopWindow

_COUNTS = ("batches", "updates", "steps")


def take(window: LoopWindow) -> dict[str, Any]:
    """Return the numbers of a loop, as JSON."""
    counter = window.counter
    return {
        "counter": {**{name: getattr(counter, name) for name in _COUNTS}, "tokens": counter.tokens},
        "ends": window.ends,
        "updated": window.updated,
        "open": [trained.is_open for trained in window.networks],
        "datasets": [dataset.place().as_json() for dataset in window.datasets()],
        "schedulers": [_of_scheduler(scheduler) for scheduler in window.schedulers],
    }


def _of_scheduler(scheduler: PreparedScheduler) -> dict[str, Any]:
    state = plain_state.take(scheduler.scheduler)
    return {"due": scheduler.is_due, "follows": scheduler.follows_updates, "state": state}


def plan_to_put(window: LoopWindow, saved: Any, ranks: int, random_now: dict[str, Any]) -> Steps:
    """Return what gives a loop the numbers that `take` has returned on one of so many ranks.

    ``random_now`` is what the generators of random numbers go on with.
    """
    if not isinstance(saved, dict):
        raise another_program("is of a TrainOneStepCell or a Model, not of an Accumulator")
    counter, tokens = _counter(saved.get("counter"))
    flags = [saved.get("ends"), saved.get("updated"), *_list(saved, "open", len(window.networks))]
    if not all(isinstance(flag, bool) for flag in flags):
        raise DamagedState("the state does not say where its window stands")
    datasets = _list(saved, "datasets", None)
    places = [PassPlace.of_json(place, ranks)._replace(random_now=random_now) for place in datasets]
    steps: Steps = [
        lambda: vars(window.counter).update(counter, tokens=tokens),
        lambda: window.go_on(flags[0], flags[1], flags[2:], places),
    ]
    for scheduler, its in zip(window.schedulers, _list(saved, "schedulers", len(window.schedulers))):
        steps += _plan_scheduler(scheduler, its)
    return steps


def _counter(saved: Any) -> tuple[dict[str, int], float]:
    known = isinstance(saved, dict) and isinstance(saved.get("tokens"), (int, float))
    if not known or not all(is_count(saved.get(name)) for name in _COUNTS):
        raise DamagedState("the state has no counts of batches, updates and tokens")
    return {name: saved[name] for name in _COUNTS}, float(saved["tokens"])


def _list(saved: dict[str, Any], name: str, length: int | None) -> list[Any]:
    values = saved.get(name)
    if not isinstance(values, list) or length not in (None, len(values)):
        raise another_program(f"has not {length} {'networks' if name == 'open' else name}")
    return values


def _plan_scheduler(scheduler: PreparedScheduler, saved: Any) -> Steps:
    flags = {"is_due": saved.get("due"), "follows_updates": saved.get("follows")} if isinstance(saved, dict) else {}
    if not flags or not all(isinstance(flag, bool) for flag in flags.values()):
        raise DamagedState("the state does not say where its schedulers stand")
    what = type(scheduler.scheduler).__name__
    return [
        *plain_state.plan_to_put(scheduler.scheduler, saved.get("state"), what),
        lambda: vars(scheduler).update(flags),
    ]
