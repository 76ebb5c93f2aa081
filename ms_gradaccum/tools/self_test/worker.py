"""A process of the self-test, which runs one cell and reports it in a file."""

import importlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.tools.environment import describe
from ms_gradaccum.tools.jobs import Meeting
from ms_gradaccum.tools.processes import depend_on
from ms_gradaccum.tools.self_test.training import Found, Place, SkippedCell
from ms_gradaccum.tools.simulation.partition import connect

_MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}


def main(folder: str, task: str) -> None:
    """Run the cell that ``task`` has, report it in ``folder``, and wait to be ended."""
    depend_on(os.getppid())
    told = json.loads(task)
    begin, facts = time.monotonic(), {}
    rank, size = 0, told["processes"]
    try:
        rank, size = _begin(told)
        if told["describes"]:
            facts = {"devices": ms.hal.device_count(told["device"]), "environment": describe()}
        place = Place(rank, size, told["workers"], told["device"], Path(told["shared"]))
        values = _outcome(place, told["cell"])
    except Exception as error:
        values = {"outcome": "failed", "said": f"{type(error).__name__}: {_told_by(error)}"}
    values |= {"seconds": time.monotonic() - begin, "facts": facts}
    Meeting(folder, rank, size).write(f"outcome_{rank}.json", json.dumps(values))
    # Where one process ends by itself, msrun takes long to end the others.
    while True:
        time.sleep(1e6)


def _begin(told: dict[str, Any]) -> tuple[int, int]:
    """Take the device and connect to the other processes. Return the rank and the number of processes."""
    if told["stands_in"]:
        return connect()
    if told["device"] != ms.get_context("device_target"):
        ms.set_device(told["device"])
    if told["processes"] == 1:
        return 0, 1
    init()
    return get_rank(), get_group_size()


def _outcome(place: Place, cell: dict[str, Any]) -> dict[str, Any]:
    module, _, name = cell["function"].partition(":")
    settings = {key: cell[key] for key in ("parallel", "dtype")} | cell["arguments"]
    try:
        with execution_mode(_MODES[cell["mode"]]):
            found = getattr(importlib.import_module(module), name)(place, **settings)
    except SkippedCell as why:
        return {"outcome": "skipped", "said": str(why)}
    outcome, said = judge(found)
    finite = found.difference if math.isfinite(found.difference) else None
    return {"outcome": outcome, "said": said, "difference": finite, "tolerance": found.tolerance}


def _told_by(error: Exception) -> str:
    """Return the first line of an error that says something. MindSpore's have headings, and rules of dashes."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.startswith("-")), first_line(error))


def judge(found: Found) -> tuple[str, str]:
    """Return whether a cell has passed, and in words what it has found."""
    # Not the other way round: a NaN is no small difference.
    if found.difference <= found.tolerance:
        return "passed", f"{found.difference:.1e} of {found.tolerance:.1e} ({found.what})"
    return "failed", f"{found.what}: a difference of {found.difference:.1e}, and {found.tolerance:.1e} is rounding"
