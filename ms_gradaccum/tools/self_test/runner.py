"""Run each cell in processes of its own, so that one that hangs or dies does not affect the others."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ms_gradaccum.tools.jobs import MOMENT, Processes
from ms_gradaccum.tools.self_test.cells import Cell
from ms_gradaccum.tools.simulation.cuda_stubs import why_not
from ms_gradaccum.tools.simulation.job import stand_ins

OWNER = "test"
# Set in the environment of all processes of the test.
IN_TEST = "MS_GRADACCUM_SELF_TEST"
# Seconds that the others have once one process has failed, which may wait for it in a message.
_GRACE = 10.0
_WORST_LAST = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Outcome:
    """The result of a cell.

    Attributes:
        cell: The cell.
        processes: Number of processes.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        said: One line: the difference, what went wrong, or why it was skipped.
        difference: The largest relative difference on any process. None if it is not finite.
        tolerance: The largest allowed difference.
        seconds: The time that it took, without the start of its processes.
    """

    cell: Cell
    processes: int
    outcome: str
    said: str
    difference: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        word = "FAILED" if self.outcome == "failed" else self.outcome
        return f"{self.cell.title:72} {word:8}{self.seconds:6.1f} s  {self.said}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        values = asdict(self) | {"seconds": round(self.seconds, 1)}
        cell = values.pop("cell")
        return {name: cell[name] for name in ("name", "parallel", "dtype", "mode")} | values


class Runner:
    """Runs cells.

    Args:
        device: The kind of device.
        workers: Number of processes of jobs of several.
        timeout: The longest time of a cell. Unit: seconds.
        shared: A folder to exchange files between cells.
    """

    def __init__(self, device: str, workers: int, timeout: float, shared: Path) -> None:
        self.device, self.workers, self.timeout, self.shared = device, workers, timeout, shared
        self.facts: dict[str, Any] = {}

    def run(self, cell: Cell, tell: Callable[[str], None]) -> Outcome:
        """Return the outcome of a cell."""
        count = cell.processes(self.workers)
        reason = self._why_skipped(cell, count)
        if reason:
            return Outcome(cell, count, "skipped", reason)
        tell(cell.title)
        on_stand_ins = cell.partitioned and self.device == "CPU"
        task = {
            "cell": asdict(cell),
            "device": self.device,
            "workers": self.workers,
            "processes": count,
            "shared": str(self.shared),
            "stands_in": on_stand_ins,
            "describes": not self.facts,
        }

        def program(folder: Path) -> str:
            arguments = f"{str(folder)!r}, {json.dumps(task)!r}"
            return f"from ms_gradaccum.tools.self_test.worker import main\nmain({arguments})"

        extra = stand_ins if on_stand_ins else lambda folder: {}
        with Processes(OWNER, count, IN_TEST, program, extra) as job:
            reports, why = self._await(job)
        for report in reports:
            self.facts = report.pop("facts") or self.facts
        worst = max(
            reports, key=lambda each: (_WORST_LAST.index(each["outcome"]), each.get("difference") or 0.0), default={}
        )
        if why and worst.get("outcome") != "failed":
            return Outcome(cell, count, "failed", why)
        return Outcome(cell, count, **worst)

    def _why_skipped(self, cell: Cell, count: int) -> str:
        """Return the reason why a cell cannot run here, or an empty string."""
        if self.workers == 1 and cell.parallel != "one process":
            return "it takes several processes"
        devices = self.facts.get("devices", count)
        if self.device != "CPU" and devices < count:
            return f"{count} processes take as many devices, and there are {devices}"
        lacking = why_not() if cell.partitioned and self.device == "CPU" else None
        return f"CPU compiles for GPUs that are not there, but {lacking}" if lacking else ""

    def _await(self, job: Processes) -> tuple[list[dict[str, Any]], str]:
        """Return the reports of the processes, and the reason if some are missing."""
        deadline = begin = time.monotonic()
        deadline += self.timeout
        failed = False
        while True:
            over = job.process.poll() is not None or bool(job.ended())
            reports = [json.loads(path.read_text()) for path in sorted(job.folder.glob("outcome_*.json"))]
            if len(reports) == job.count:
                return reports, ""
            if over:
                lines = [line.strip() for line in job.last_words().splitlines() if line.strip()]
                return reports, f"its process ended: {lines[-1] if lines else 'it said nothing'}"
            now = time.monotonic()
            if now > deadline:
                late = job.count - len(reports)
                return reports, (
                    f"it hangs: {late} of {job.count} processes have not answered within {now - begin:.0f} s, and were "
                    "ended"
                )
            if not failed and any(report["outcome"] == "failed" for report in reports):
                failed, deadline = True, min(deadline, now + _GRACE)
            time.sleep(MOMENT)
