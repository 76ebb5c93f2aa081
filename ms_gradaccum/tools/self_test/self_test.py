"""``python -m ms_gradaccum test``: whether trainings on this machine give the numbers of the whole batch."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms

from ms_gradaccum._checks import check_choice, check_positive_float, check_positive_int
from ms_gradaccum.tools.self_test.cells import Cell, all_cells
from ms_gradaccum.tools.self_test.runner import OWNER, Outcome, Runner

# Of the file. It is another one when programs that read the old one would misread the new one.
_FORMAT = 2
_DEVICES = ("CPU", "GPU", "Ascend")


@dataclass(frozen=True)
class SelfTest:
    """The results of a self-test.

    Attributes:
        device: The kind of device.
        workers: Number of processes of jobs of several.
        seconds: How long all of it took.
        environment: What ``python -m ms_gradaccum env`` prints.
        outcomes: One per cell.
    """

    device: str
    workers: int
    seconds: float
    environment: dict[str, str]
    outcomes: tuple[Outcome, ...]

    def count(self, outcome: str) -> int:
        """Return how many cells passed, failed or were skipped."""
        return sum(each.outcome == outcome for each in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        return {
            "format": _FORMAT,
            "device": self.device,
            "workers": self.workers,
            "seconds": round(self.seconds, 1),
            "environment": self.environment,
            **{name: self.count(name) for name in ("passed", "failed", "skipped")},
            "cells": [outcome.to_dict() for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(name)} {name}" for name in ("passed", "failed", "skipped"))
        return f"{counts} on {self.device}, {self.workers} workers, in {self.seconds:.0f} s"


def self_test(
    device: str | None = None,
    workers: int = 2,
    *,
    timeout: float = 120.0,
    show: Callable[[str], None] = print,
    tell: Callable[[str], None] = lambda text: None,
    cells: Sequence[Cell] | None = None,
) -> SelfTest:
    """Train small networks in windows, and compare with MindSpore's own step on the whole batch.

    Args:
        device: ``"CPU"``, ``"GPU"`` or ``"Ascend"``. By default the one that MindSpore takes here.
        workers: Number of processes of jobs of several. With 1 these are skipped.
        timeout: The longest time of one cell. Unit: seconds.
        show: Is given each line of the table.
        tell: Is told what is going on.
        cells: What is tried. By default all of it.
    """
    device = ms.get_context("device_target") if device is None else device
    check_choice(OWNER, "device", device, _DEVICES, "By default it is the one that MindSpore takes here.")
    check_positive_int(OWNER, "workers", workers, "It is the number of processes of jobs of several.")
    timeout = check_positive_float(OWNER, "timeout", timeout, "It is the longest time of one cell, in seconds.")
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ms_gradaccum_") as shared:
        runner = Runner(device, workers, timeout, Path(shared))
        for cell in all_cells() if cells is None else cells:
            outcomes.append(runner.run(cell, tell))
            show(str(outcomes[-1]))
    seconds = time.monotonic() - begin
    return SelfTest(device, workers, seconds, runner.facts.get("environment", {}), tuple(outcomes))
