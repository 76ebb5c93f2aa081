"""The results of a simulation."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MessageKind:
    """The messages of an update that have the same operator, purpose and group.

    Attributes:
        operator: The operator's class in ``mindspore.ops``.
        purpose: The compiler's reason for them, such as ``"gradients"`` or ``"norm"``; otherwise ``"something else"``.
        size: Number of ranks in a group.
        ranks: The group that rank 0 is in. None if the program does not list it.
        count: Number of these messages.
        nbytes: Bytes of the tensors that each rank passes to these messages, added up.
    """

    operator: str
    purpose: str
    size: int
    ranks: tuple[int, ...] | None
    count: int
    nbytes: int


@dataclass(frozen=True)
class Program:
    """The compiled step of one device.

    Attributes:
        messages: The messages of one update, with the most bytes first.
        held_bytes: The memory between updates, by kind: ``"parameters"``, ``"optimizer state"`` and ``"buffer"``, the
            sum of a window's gradients.
        compile_seconds: Time of the compilation; with `run`, those of all devices run at the same time.
        compile_bytes: Peak memory of the process after the compilation.
    """

    messages: tuple[MessageKind, ...]
    held_bytes: dict[str, int]
    compile_seconds: float
    compile_bytes: int


@dataclass(frozen=True)
class Training:
    """The training of the partitioned programs, compared with one process that trains on the whole batch.

    Attributes:
        losses: The loss of each update.
        whole_losses: The losses of one process. None for an update that was skipped because of an Inf or NaN.
        difference: The largest difference of a weight's element, on any rank, from that of one process, at the end.
        moved: The largest change of a weight's element by the training.
        farthest: The name of the weight with the largest `difference`.
    """

    losses: tuple[float, ...]
    whole_losses: tuple[float | None, ...]
    difference: float
    moved: float
    farthest: str


@dataclass(frozen=True)
class Simulation:
    """The results of `simulate`.

    Attributes:
        devices: Number of devices.
        ours: The program of one device: its messages, memory and compilation.
        training: The training of the programs. None without `run`.
    """

    devices: int
    ours: Program
    training: Training | None


def simulation_of(devices: int, reports: list[dict[str, Any]]) -> Simulation:
    """Return the results that the ranks have reported."""
    training, runs = None, [report["run"] for report in reports if "run" in report]
    if runs:
        worst, whole = max(runs, key=lambda run: float(run["difference"])), iter(runs[0]["whole_losses"])
        whole_losses = tuple(next(whole) if updated else None for updated in runs[0]["updated"])
        moved = max(run["moved"] for run in runs)
        training = Training(tuple(runs[0]["losses"]), whole_losses, worst["difference"], moved, worst["farthest"])
    return Simulation(devices, reports[0]["ours"], training)
