"""Run groups of cells in processes of their own, of which one that hangs or dies takes only its own cell with it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ms_gradaccum.tools.jobs import MOMENT, Processes
from ms_gradaccum.tools.self_test.cells import Cell, Group
from ms_gradaccum.tools.simulation.job import stand_ins

OWNER = "test"
# Set in the environment of all processes of the test.
IN_TEST = "MS_GRADACCUM_SELF_TEST"
# Seconds that the others have once one process has failed, which may wait for it in a message.
_GRACE = 10.0
# Seconds that processes have to begin: they load MindSpore, take the device and find each other.
_START = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: The cell.
        processes: Number of processes.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        said: One line: the difference, what went wrong, or why it was skipped.
        difference: The largest relative difference, on any process. None without a finite one.
        tolerance: How large it may be.
        seconds: How long it took.
        figures: What is only reported.
    """

    cell: Cell
    processes: int
    outcome: str
    said: str
    difference: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        word = "FAILED" if self.outcome == "failed" else self.outcome
        return f"{self.cell.title:66} {word:8}{self.seconds:6.1f} s  {self.said}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        values = asdict(self)
        cell = values.pop("cell")
        values["seconds"] = round(self.seconds, 1)
        return {name: cell[name] for name in ("name", "parallel", "dtype", "mode")} | values


class Runner:
    """Runs groups of cells.

    Args:
        device: The kind of device.
        workers: Number of processes of jobs of several.
        timeout: The longest time of a cell. Unit: seconds.
        shared: Where cells leave something for others.
        tell: Is told what is going on.
    """

    def __init__(self, device: str, workers: int, timeout: float, shared: Path, tell: Callable[[str], None]) -> None:
        self.device = device
        self.workers = workers
        self.timeout = timeout
        self.shared = shared
        self.tell = tell
        self.facts: dict[str, Any] = {}

    def run(self, group: Group) -> Iterator[Outcome]:
        """Give the outcome of each cell of a group, in their order."""
        rest = group.cells
        while rest:
            done = 0
            for outcome in self._in_new_processes(group, rest):
                done += 1
                yield outcome
            rest = rest[done:]

    def _in_new_processes(self, group: Group, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Run cells until one has spoiled the processes, which is the last that is given."""
        self.tell(f"starting {group.title}")
        on_stand_ins = group.partitioned and self.device == "CPU"
        task = {
            "cells": [asdict(cell) for cell in cells],
            "device": self.device,
            "workers": self.workers,
            "processes": group.processes,
            "shared": str(self.shared),
            "stands_in": on_stand_ins,
            "describes": not self.facts,
        }

        def program(folder: Path) -> str:
            arguments = f"{str(folder)!r}, {json.dumps(task)!r}"
            return f"from ms_gradaccum.tools.self_test.worker import main\nmain({arguments})"

        extra = stand_ins if on_stand_ins else lambda folder: {}
        with Processes(OWNER, group.processes, IN_TEST, program, extra) as job:
            refused = self._begin(job)
            if refused:
                yield from (Outcome(cell, group.processes, "failed", refused) for cell in cells)
                return
            for number, cell in enumerate(cells):
                self.tell(cell.title)
                outcome, goes_on = self._await(job, number, cell)
                yield outcome
                if not goes_on:
                    return

    def _begin(self, job: Processes) -> str:
        """Wait until the first cell has begun. Return why it cannot, or nothing."""
        deadline = time.monotonic() + _START
        while not list(job.folder.glob("begun_0_*")):
            for path in job.folder.glob("refused_*"):
                return f"the process cannot begin: {path.read_text()}"
            if job.process.poll() is not None:
                return f"the process ended before it began: {_last_line(job)}"
            if time.monotonic() > deadline:
                return f"the processes have not begun within {_START:g} s"
            time.sleep(MOMENT)
        facts = job.folder / "facts.json"
        if facts.exists():
            self.facts = json.loads(facts.read_text())
        return ""

    def _await(self, job: Processes, number: int, cell: Cell) -> tuple[Outcome, bool]:
        """Return the outcome of a cell, and whether its processes can go on."""
        begin = time.monotonic()
        limit = self.timeout
        while True:
            reports = [json.loads(path.read_text()) for path in job.folder.glob(f"outcome_{number}_*.json")]
            failed = [report for report in reports if report["outcome"] == "failed"]
            seconds = time.monotonic() - begin
            if len(reports) == job.count:
                # What was raised in a job may have left a message without its answer.
                spoiled = job.count > 1 and any(report["raised"] for report in reports)
                return _joined(cell, job.count, reports), not spoiled
            if failed and limit == self.timeout:
                limit = min(limit, seconds + _GRACE)
            said = ""
            if job.process.poll() is not None or job.ended():
                said = f"its process ended: {_last_line(job)}"
            elif seconds > limit:
                said = f"it hangs: {job.count - len(reports)} of {job.count} processes have not answered within "
                said += f"{seconds:.0f} s, and were ended"
            if said and failed:
                return _joined(cell, job.count, failed), False
            if said:
                return Outcome(cell, job.count, "failed", said, seconds=seconds), False
            time.sleep(MOMENT)


def _joined(cell: Cell, processes: int, reports: Sequence[dict[str, Any]]) -> Outcome:
    """Return the outcome of a cell that several processes have reported: that of the worst of them."""
    order = ("passed", "skipped", "failed")
    worst = max(reports, key=lambda report: (order.index(report["outcome"]), report["difference"] or 0.0))
    return Outcome(cell, processes, **{name: value for name, value in worst.items() if name != "raised"})


def _last_line(job: Processes) -> str:
    lines = [line.strip() for line in job.last_words().splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
