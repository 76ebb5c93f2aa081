"""Helpers of these programs: ways to train one network, how far apart they end, and how long they take."""

import argparse
import json
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

# The largest difference from the whole batch's weights, relative to their norm.
LIMIT = 1e-6
# How much further away a way must end that is known to be wrong, or the comparison shows nothing.
CONTRAST = 10.0
# The largest relative difference of what the steps report.
REPORT_LIMIT = 1e-5
MICRO_SIZE = 4


Values = Sequence[np.ndarray]


class Way(NamedTuple):
    """A network that waits to be trained.

    Attributes:
        train: Trains it on all of the data, through the client's own loop, and returns its weights from before and
            after, in the same order for each way.
        step: Returns the training step afterwards, to be timed.
        calls: How many calls of the step make an update.
        reports: What the client's monitors read, a list of numbers for each update.
    """

    train: Callable[[], tuple[Values, Values]]
    step: Callable[[], Any]
    calls: int = 1
    reports: Sequence[Sequence[float]] = ()


class Candidate(NamedTuple):
    """One of the ways of a case.

    Attributes:
        name: How the table calls it.
        build: Builds it from the weights at the start.
        wrong: Why it trains differently from the whole batch; empty for one that must not.
    """

    name: str
    build: Callable[[], Way]
    wrong: str = ""


def compare(
    case: str, candidates: Sequence[Candidate], batch: Sequence[np.ndarray], repeat: int
) -> list[dict[str, Any]]:
    """Train in each way, the first of which is the whole batch, and return the rows of the tables."""
    rows, ways = [], {}
    start: Values = ()
    whole: Values = ()
    for candidate in candidates:
        way = candidate.build()
        before, after = way.train()
        if not ways:
            start, whole = before, after
        elif norm_of_difference(before, start) != 0:
            raise RuntimeError(f"{case}, {candidate.name}: the weights at the start are others.")
        ways[candidate.name] = way
        difference = norm_of_difference(after, whole)
        row = {"case": case, "way": candidate.name, "wrong": candidate.wrong, "calls": way.calls}
        row["difference"] = difference / norm_of_difference(whole, None)
        row["of_movement"] = difference / norm_of_difference(whole, start)
        row["reports"] = report_difference(way, next(iter(ways.values())))
        row["fails"] = fails(row)
        rows.append(row)
        print(row, flush=True)
    seconds = take_turns(ways, batch, repeat)
    for row in rows:
        row["seconds"] = seconds[row["way"]]
    return rows


def values_of(parameters: Iterable[Any]) -> Values:
    return [parameter.asnumpy().astype(np.float64) for parameter in parameters]


def norm_of_difference(weights: Values, others: Values | None) -> float:
    """The L2 norm over all weights of their difference from others, or of themselves."""
    differences = weights if others is None else [a - b for a, b in zip(weights, others, strict=True)]
    return float(np.sqrt(sum(np.sum(each**2) for each in differences)))


def report_difference(way: Way, whole: Way) -> float | None:
    """The largest relative difference of what was reported; None where there is nothing to compare."""
    if not way.reports or len(way.reports) != len(whole.reports):
        return None
    ours, theirs = np.array(way.reports, np.float64), np.array(whole.reports, np.float64)
    return float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-12)))


def fails(row: dict[str, Any]) -> bool:
    if row["wrong"]:
        return row["difference"] < CONTRAST * LIMIT
    return row["difference"] > LIMIT or (row["reports"] or 0.0) > REPORT_LIMIT


def take_turns(ways: dict[str, Way], batch: Sequence[np.ndarray], repeat: int) -> dict[str, list[float]]:
    """Return the seconds of an update of each way, all in turns. The first ones warm up."""
    calls = {name: calls_of(way, batch) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def calls_of(way: Way, batch: Sequence[np.ndarray]) -> Callable[[], None]:
    """Return a function that makes one update and waits for it."""
    step = way.step()
    parts = [[Tensor(part) for part in np.array_split(column, way.calls)] for column in batch]

    def update() -> None:
        for inputs in zip(*parts, strict=True):
            step(*inputs)
        step.optimizer.parameters[-1].asnumpy()

    return update


def source(name: str) -> Path:
    """The folder of a project that is no package; `sources.txt` names it."""
    return Path(sys.prefix, "sources", name)


def package_of(name: str, folder: Path) -> types.ModuleType:
    """Let modules of a package be imported without its own ``__init__.py``, which imports more than they need."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


def main(cases: Callable[[int], list[dict[str, Any]]]) -> None:
    """Run the cases of a program and write their rows to the file that it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path, help="the JSON file to write")
    parser.add_argument("--repeat", type=int, default=10, help="timed updates of each way")
    arguments = parser.parse_args()
    arguments.rows.write_text(json.dumps(cases(arguments.repeat)))
