"""What each process of the self-test does: it runs cells one after the other, and a failing one stops none of them."""

import gc
import importlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

from ms_gradaccum._checks import first_line
from ms_gradaccum.tools.environment import describe
from ms_gradaccum.tools.jobs import Meeting
from ms_gradaccum.tools.processes import depend_on
from ms_gradaccum.tools.self_test.training import Found, Place, SkippedCell
from ms_gradaccum.tools.simulation.partition import connect


def main(folder: str, task: str) -> None:
    """Run the cells that ``task`` has, report each in ``folder``, and wait to be ended."""
    depend_on(os.getppid())
    told = json.loads(task)
    # MindSpore collects garbage in every compilation. What is imported is none.
    gc.freeze()
    try:
        rank, size = _begin(told)
        facts = {"devices": ms.hal.device_count(told["device"]), "environment": describe()} if told["describes"] else {}
    except Exception as error:
        Path(folder, f"refused_{os.getpid()}").write_text(first_line(error))
        _wait_for_the_end()
    meeting = Meeting(folder, rank, size)
    if facts:
        meeting.write("facts.json", json.dumps(facts))
    place = Place(rank, size, told["workers"], told["device"], Path(told["shared"]))
    for number, cell in enumerate(told["cells"]):
        meeting.write(f"begun_{number}_{rank}", "")
        meeting.write(f"outcome_{number}_{rank}.json", json.dumps(_outcome(place, cell)))
        # What one of them sends is for the same cell of the others.
        meeting.wait_for(f"cell{number}")
    _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    """Wait to be ended. Where one process ends by itself, msrun takes long to end the others."""
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
    """Run a cell and return what there is to say about it."""
    module, _, name = cell["function"].partition(":")
    settings = {key: cell[key] for key in ("mode", "parallel", "dtype")} | cell["arguments"]
    begin, raised = time.monotonic(), False
    try:
        found = getattr(importlib.import_module(module), name)(place, **settings)
        outcome, said = judge(found)
    except SkippedCell as why:
        found, outcome, said = Found(), "skipped", str(why)
    except Exception as error:
        found, outcome, said, raised = Found(), "failed", f"{type(error).__name__}: {_told_by(error)}", True
    finite = found.difference is not None and math.isfinite(found.difference)
    return {
        "outcome": outcome,
        "raised": raised,
        "said": said,
        "difference": found.difference if finite else None,
        "tolerance": found.tolerance,
        "figures": found.figures,
        "seconds": time.monotonic() - begin,
    }


def _told_by(error: Exception) -> str:
    """Return the first line of an error that says something. MindSpore's have headings, and rules of dashes."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.startswith("-")), first_line(error))


def judge(found: Found) -> tuple[str, str]:
    """Return whether a cell has passed, and in words what it has found."""
    if found.difference is None or found.tolerance is None:
        return "passed", ", ".join(f"{name} {figure:g}" for name, figure in found.figures.items())
    # Not the other way round: a NaN is no small difference.
    if found.difference <= found.tolerance:
        return "passed", f"{found.difference:.1e} of {found.tolerance:.1e} ({found.what})"
    return "failed", f"{found.what}: a difference of {found.difference:.1e}, and {found.tolerance:.1e} is rounding"
