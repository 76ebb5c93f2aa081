"""``python -m ms_gradaccum test``: check that trainings on this machine give the numbers of the whole batch."""

import importlib
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import mindspore as ms
from mindspore.communication import get_rank, init

from ms_gradaccum._checks import check_choice, check_positive_float, check_positive_int
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.backend.device import DEVICES, can_partition, is_host, this_device
from ms_gradaccum.tools.environment import describe
from ms_gradaccum.tools.processes import EndedError, Job, Meeting, RankError
from ms_gradaccum.tools.self_test.training import ALONE, Cell, Found, SkippedCell
from ms_gradaccum.tools.self_test.trials import all_cells

_OWNER = "test"
# The version of the format. It changes if programs that read the old format would misread the new one.
_FORMAT = 2
_OUTCOMES = ("passed", "skipped", "failed")


def self_test(
    device: str | None = None,
    workers: int = 2,
    *,
    timeout: float = 120.0,
    show: Callable[[str], None] = print,
    tell: Callable[[str], None] = lambda text: None,
    cells: Sequence[Cell] | None = None,
) -> dict[str, Any]:
    """Train small networks in windows, compare with MindSpore's own step on the whole batch, and return the results.

    ``timeout`` applies to each cell. ``show`` is called with each line of the table, ``tell`` with the current cell.
    """
    device = this_device() if device is None else device
    check_choice(_OWNER, "device", device, DEVICES, "By default MindSpore chooses it.")
    check_positive_int(_OWNER, "workers", workers, "It is the number of processes of jobs of several.")
    timeout = check_positive_float(_OWNER, "timeout", timeout, "It is the longest time of one cell, in seconds.")
    start, results = time.monotonic(), []
    facts: dict[str, Any] = {"environment": {}}
    with tempfile.TemporaryDirectory(prefix="ms_gradaccum_") as folder:
        for cell in all_cells() if cells is None else cells:
            tell(cell.title)
            begin, size = time.monotonic(), 1 if cell.parallel == ALONE else workers
            here = replace(cell, size=size, workers=workers, device=device, folder=folder)
            result = {name: getattr(cell, name) for name in ("name", "parallel", "dtype", "mode")}
            result |= {"processes": size, **_run(here, timeout, facts), "seconds": round(time.monotonic() - begin, 1)}
            results.append(result)
            show(f"{cell.title:72} {result['outcome']:8}{result['seconds']:6.1f} s  {result['said']}")
    found = {"format": _FORMAT, "device": device, "workers": workers, "seconds": round(time.monotonic() - start, 1)}
    counts = {outcome: sum(result["outcome"] == outcome for result in results) for outcome in _OUTCOMES}
    return {**found, "environment": facts["environment"], **counts, "cells": results}


def summary(found: dict[str, Any]) -> str:
    """Return the results in one line."""
    counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return f"{counts} on {found['device']}, {found['workers']} workers, in {found['seconds']:.0f} s"


def _run(cell: Cell, timeout: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Run a cell in its own processes, so that a cell that hangs or dies does not affect the others."""
    devices = facts.get("devices", cell.size)
    if cell.workers == 1 and cell.parallel != ALONE:
        return _result("skipped", "it takes several processes")
    if not is_host(cell.device) and devices < cell.size:
        return _result("skipped", f"{cell.size} processes take as many devices, and there are {devices}")
    if cell.partitioned and not can_partition(cell.device):
        return _result("skipped", "CPU has no semi-auto-parallel")
    task = {"cell": asdict(cell), "describes": "devices" not in facts}
    with Job(cell.size, f"{__name__}:try_cell", task) as job:
        try:
            reports = job.wait(timeout, lambda phase: None)
        except RankError as error:
            return _result("failed", error.line)
        except EndedError:
            lines = [line.strip() for line in job.last_words().splitlines() if line.strip()]
            return _result("failed", f"its process ended: {lines[-1] if lines else 'it said nothing'}")
        except TimeoutError as late:
            return _result("failed", f"it hangs: {late} have not answered within {timeout:.0f} s, and were ended")
    facts.update([report.pop("facts") for report in reports][0])
    return max(reports, key=lambda each: (_OUTCOMES.index(each["outcome"]), each["difference"] or 0.0))


def try_cell(meeting: Meeting, cell: dict[str, Any], describes: bool) -> dict[str, Any]:
    """Run a cell in one of its processes, and return its outcome."""
    here = Cell(**cell)
    if here.device != this_device():
        ms.set_device(here.device)
    if here.size > 1:
        init()
        here = replace(here, rank=get_rank())
    meeting.join(here.rank, here.size)
    facts = {"devices": ms.hal.device_count(here.device), "environment": describe()} if describes else {}
    module, _, name = here.function.partition(":")
    try:
        with execution_mode(getattr(ms, f"{here.mode}_MODE")):
            found = getattr(importlib.import_module(module), name)(here)
    except SkippedCell as why:
        return _result("skipped", str(why)) | {"facts": facts}
    return _result(*judge(found), *found[:2]) | {"facts": facts}


def _result(outcome: str, said: str, *numbers: float) -> dict[str, Any]:
    difference, allowed = (value if math.isfinite(value) else None for value in numbers or (math.nan, math.nan))
    return {"outcome": outcome, "said": said, "difference": difference, "tolerance": allowed}


def judge(found: Found) -> tuple[str, str]:
    """Return "passed" or "failed", and a line about the difference."""
    # Not '>' for "failed", because a NaN must fail.
    if found.difference <= found.tolerance:
        return "passed", f"{found.difference:.1e} of {found.tolerance:.1e} ({found.what})"
    return "failed", f"{found.what}: a difference of {found.difference:.1e}, and {found.tolerance:.1e} is rounding"
