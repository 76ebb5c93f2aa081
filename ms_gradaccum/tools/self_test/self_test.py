"""``python -m ms_gradaccum test``: check that trainings on this machine give the numbers of the whole batch."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mindspore as ms
from mindspore.communication import init

from ms_gradaccum._checks import check_choice, check_float, check_int
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.backend.device import DEVICES, is_host, this_device
from ms_gradaccum.parallel.world import current_world, gather_counts
from ms_gradaccum.tools.environment import describe
from ms_gradaccum.tools.processes import EndedError, Job, RankError
from ms_gradaccum.tools.self_test.training import ALONE, Cell, Outcome, SkippedCell
from ms_gradaccum.tools.self_test.trials import CELLS

_OWNER = "test"
# The version of the format. It changes if programs that read the old format would misread the new one.
_FORMAT = 2
_OUTCOMES = ("passed", "skipped", "failed")

Result = dict[str, Any]


def self_test(
    device: str | None = None,
    workers: int = 2,
    *,
    timeout: float = 120.0,
    show: Callable[[str], None] = print,
    tell: Callable[[str], None] = lambda text: None,
    cells: Sequence[Cell] = CELLS,
) -> Result:
    """Train small networks in windows, compare with MindSpore's own step on the whole batch, and return the results.

    ``timeout`` applies to each cell. ``show`` is called with each line of the table, ``tell`` with the current cell.
    """
    device = check_choice(
        _OWNER, "device", device or this_device(), DEVICES, "By default MindSpore chooses it."
    )
    check_int(_OWNER, "workers", workers, "It is the number of processes of jobs of several.")
    timeout = check_float(
        _OWNER, "timeout", timeout, "It is the longest time of one cell, in seconds."
    )
    start = time.monotonic()
    results: list[Result] = []
    facts: Result = {}
    with tempfile.TemporaryDirectory(prefix="ms_gradaccum_") as folder:
        planned = []
        for cell in cells:
            size = 1 if cell.parallel == ALONE else workers
            planned.append(replace(cell, size=size, workers=workers, device=device, folder=folder))

        def tell_cell(cell: Cell) -> None:
            tell(f"{len(results) + 1} of {len(planned)}: {cell.title}")

        begin = start
        for cell, outcome in _outcomes(planned, timeout, tell_cell, facts):
            result = {name: getattr(cell, name) for name in ("name", "parallel", "dtype", "mode")}
            result |= {
                "processes": cell.size,
                **outcome._asdict(),
                "seconds": _seconds_since(begin),
            }
            results.append(result)
            show(f"{cell.title:72} {outcome.outcome:8}{result['seconds']:6.1f} s  {outcome.said}")
            begin = time.monotonic()
    outcomes = [result["outcome"] for result in results]
    counts = {kind: outcomes.count(kind) for kind in _OUTCOMES}
    return {
        "format": _FORMAT,
        "device": device,
        "workers": workers,
        "seconds": _seconds_since(start),
        "environment": facts.get("environment", {}),
        **counts,
        "cells": results,
    }


def summary(found: Result) -> str:
    """Return the results in one line."""
    counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return f"{counts} on {found['device']}, {found['workers']} workers, in {found['seconds']:.0f} s"


def _seconds_since(start: float) -> float:
    return round(time.monotonic() - start, 1)


def _outcomes(
    cells: Sequence[Cell], timeout: float, tell: Callable[[Cell], None], facts: Result
) -> Iterator[tuple[Cell, Outcome]]:
    """Yield the outcome of each cell. Cells in a row on as many processes share a job.

    A failed cell, which may have raised, hung or died, ends its job; the cells after it get another one.
    """
    for size, group in itertools.groupby(cells, key=lambda cell: cell.size):
        waiting = []
        for cell in group:
            reason = _reason_to_skip(cell, facts)
            if reason:
                yield cell, Outcome("skipped", reason)
            else:
                waiting.append(cell)
        while waiting:
            with Job(size, try_cells, list(waiting)) as job:
                while waiting:
                    cell = waiting.pop(0)
                    outcome = _outcome_in(job, timeout, partial(tell, cell), facts)
                    yield cell, outcome
                    if outcome.outcome == "failed":
                        break


def _outcome_in(job: Job, timeout: float, tell: Callable[[], None], facts: Result) -> Outcome:
    """Return the outcome of a job's next cell."""
    try:
        if job.received == 0:
            facts.update(job.wait(timeout, tell)[0])
        reports: list[Outcome] = job.wait(timeout, tell)
    except RankError as error:
        return Outcome("failed", error.line)
    except TimeoutError as late:
        said = f"it hangs: {late} have not answered within {timeout:.0f} s, and were ended"
        return Outcome("failed", said)
    except EndedError:
        lines = job.last_words().split("\n")
        return Outcome("failed", f"its process ended: {lines[-1] or 'it said nothing'}")
    return max(reports, key=lambda each: (_OUTCOMES.index(each.outcome), each.difference or 0.0))


def _reason_to_skip(cell: Cell, facts: Result) -> str:
    devices = facts.get("devices", cell.size)
    if cell.workers == 1 and cell.parallel != ALONE:
        return "it takes several processes"
    if not is_host(cell.device) and devices < cell.size:
        return f"{cell.size} processes take as many devices, and there are {devices}"
    return ""


def try_cells(cells: Sequence[Cell]) -> Iterator[Result | Outcome]:
    """Run cells in one of their processes. Yield the facts about the machine, then the outcome of each cell."""
    first = cells[0]
    if first.device != this_device():
        ms.set_device(first.device)
    if first.size > 1:
        init()
    rank = current_world(_OWNER).rank
    yield {"devices": ms.hal.device_count(first.device), "environment": describe()}
    for number, cell in enumerate(cells):
        # A process that dies in a cell would end the job while others have not reported the cell before it.
        gather_counts("begins a cell of the self-test", number)
        try:
            with execution_mode(getattr(ms, f"{cell.mode}_MODE")):
                outcome = cell.function(replace(cell, rank=rank))
        except SkippedCell as why:
            outcome = Outcome("skipped", str(why))
        yield outcome
