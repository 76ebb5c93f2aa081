"""``python -m ms_gradaccum test``: whether trainings on this machine give the numbers of the whole batch."""

import importlib
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

from ms_gradaccum._checks import check_choice, check_positive_float, check_positive_int
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.tools.environment import describe
from ms_gradaccum.tools.processes import EndedError, Job, Meeting, RankError
from ms_gradaccum.tools.self_test.training import Found, Place, SkippedCell
from ms_gradaccum.tools.self_test.trials import Cell, all_cells
from ms_gradaccum.tools.simulation.cuda_stubs import stand_ins, why_not
from ms_gradaccum.tools.simulation.partition import connect

_OWNER = "test"
# It is set in the environment of all processes of the test.
IN_TEST = "MS_GRADACCUM_SELF_TEST"
# The format of the results. It changes when programs that read the old format would misread the new one.
_FORMAT = 2
_DEVICES = ("CPU", "GPU", "Ascend")
_MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}
_OUTCOMES = ("passed", "failed", "skipped")
_WORST_LAST = ("passed", "skipped", "failed")
_UNKNOWN = {"difference": None, "tolerance": None, "seconds": 0.0}


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

    Args:
        device: ``"CPU"``, ``"GPU"`` or ``"Ascend"``. By default the one that MindSpore takes here.
        workers: Number of processes of jobs of several. With 1 these are skipped.
        timeout: The longest time of one cell. Unit: seconds.
        show: It is called with each line of the table.
        tell: It is called with the current cell.
        cells: The cells. By default all of them.
    """
    device = ms.get_context("device_target") if device is None else device
    check_choice(_OWNER, "device", device, _DEVICES, "By default it is the one that MindSpore takes here.")
    check_positive_int(_OWNER, "workers", workers, "It is the number of processes of jobs of several.")
    timeout = check_positive_float(_OWNER, "timeout", timeout, "It is the longest time of one cell, in seconds.")
    begin, found = time.monotonic(), []
    facts: dict[str, Any] = {"environment": {}}
    with tempfile.TemporaryDirectory(prefix="ms_gradaccum_") as shared:
        for cell in all_cells() if cells is None else cells:
            tell(cell.title)
            processes = 1 if cell.parallel == "one process" else workers
            result = _run(cell, device, workers, processes, timeout, shared, facts)
            result["seconds"] = round(result["seconds"], 1)
            settings = {name: getattr(cell, name) for name in ("name", "parallel", "dtype", "mode")}
            found.append({**settings, "processes": processes, **result})
            word = result["outcome"].replace("failed", "FAILED")
            show(f"{cell.title:72} {word:8}{result['seconds']:6.1f} s  {result['said']}")
    return {
        "format": _FORMAT,
        "device": device,
        "workers": workers,
        "seconds": round(time.monotonic() - begin, 1),
        "environment": facts["environment"],
        **{outcome: sum(cell["outcome"] == outcome for cell in found) for outcome in _OUTCOMES},
        "cells": found,
    }


def summary(found: dict[str, Any]) -> str:
    """Return the results in one line."""
    counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in _OUTCOMES)
    return f"{counts} on {found['device']}, {found['workers']} workers, in {found['seconds']:.0f} s"


def _run(
    cell: Cell, device: str, workers: int, processes: int, timeout: float, shared: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Run a cell in processes of its own, so that one that hangs or dies does not affect the others."""
    simulated = cell.partitioned and device == "CPU"
    devices, lacking = facts.get("devices", processes), why_not() if simulated else None
    said = f"CPU compiles for GPUs that are not there, but {lacking}" if lacking else ""
    if device != "CPU" and devices < processes:
        said = f"{processes} processes take as many devices, and there are {devices}"
    if workers == 1 and cell.parallel != "one process":
        said = "it takes several processes"
    if said:
        return {"outcome": "skipped", "said": said, **_UNKNOWN}
    task = {"cell": asdict(cell), "device": device, "workers": workers, "size": processes, "shared": shared}
    task |= {"simulated": simulated, "describes": "devices" not in facts}
    extra = stand_ins if simulated else lambda folder: {}
    with Job(_OWNER, processes, IN_TEST, f"{__name__}:try_cell", task, extra) as job:
        try:
            reports = job.wait(timeout, lambda phase: None)
        except RankError as error:
            said = str(error)
        except EndedError:
            lines = [line.strip() for line in job.last_words().splitlines() if line.strip()]
            said = f"its process ended: {lines[-1] if lines else 'it said nothing'}"
        except TimeoutError as late:
            said = f"it hangs: {late} have not answered within {timeout:.0f} s, and were ended"
        else:
            facts.update([report.pop("facts") for report in reports][0])
            return max(reports, key=lambda each: (_WORST_LAST.index(each["outcome"]), each["difference"] or 0.0))
    return {"outcome": "failed", "said": said, **_UNKNOWN}


def try_cell(
    meeting: Meeting, cell: dict[str, Any], device: str, workers: int, size: int, shared: str, **switches: bool
) -> dict[str, Any]:
    """Run a cell in one of its processes, and return its outcome."""
    begin, facts = time.monotonic(), {}
    if switches["simulated"]:
        meeting.join(*connect())
    else:
        if device != ms.get_context("device_target"):
            ms.set_device(device)
        if size > 1:
            init()
        meeting.join(*((get_rank(), get_group_size()) if size > 1 else (0, 1)))
    if switches["describes"]:
        facts = {"devices": ms.hal.device_count(device), "environment": describe()}
    module, _, name = cell["function"].partition(":")
    found = Found(math.nan, math.nan, "")
    try:
        with execution_mode(_MODES[cell["mode"]]):
            place = Place(meeting.rank, meeting.size, workers, device, Path(shared))
            found = getattr(importlib.import_module(module), name)(place, cell["parallel"], cell["dtype"])
        outcome, said = judge(found)
    except SkippedCell as why:
        outcome, said = "skipped", str(why)
    difference, allowed = (value if math.isfinite(value) else None for value in found[:2])
    values = {"outcome": outcome, "said": said, "difference": difference, "tolerance": allowed}
    return values | {"seconds": time.monotonic() - begin, "facts": facts}


def judge(found: Found) -> tuple[str, str]:
    """Return whether a cell has passed, and a line about its difference."""
    # The comparison is this way round because a NaN must fail.
    if found.difference <= found.tolerance:
        return "passed", f"{found.difference:.1e} of {found.tolerance:.1e} ({found.what})"
    return "failed", f"{found.what}: a difference of {found.difference:.1e}, and {found.tolerance:.1e} is rounding"
