"""The processes of a simulation and their reports."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_gradaccum.tools.jobs import DONE, MOMENT, Processes
from ms_gradaccum.tools.processes import ChildError, error_of
from ms_gradaccum.tools.simulation.cuda_stubs import build_cuda_home, environment

OWNER = "simulate"
# Set in the environment of all processes of a job, which must not simulate in turn.
IN_JOB = "MS_GRADACCUM_SIMULATION"


class Job(Processes):
    """A job with one process per device.

    Each runs ``main`` of the worker with ``task``, and writes what it does and what it finds into files of one folder.
    """

    def __init__(self, devices: int, task: dict[str, Any]) -> None:
        def program(folder: Path) -> str:
            arguments = f"{str(folder)!r}, {json.dumps(task)!r}"
            return f"from ms_gradaccum.tools.simulation.worker import main\nmain({arguments})"

        super().__init__(OWNER, devices, IN_JOB, program, stand_ins)

    def wait(self, timeout: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return what each rank has found, in their order; raise what one has raised, or if they take too long."""
        deadline = time.monotonic() + timeout
        reports = [self.folder / f"report_{rank}.json" for rank in range(self.count)]
        while not all(report.exists() for report in reports):
            self._raise_errors()
            tell(self._phase())
            ended = self.ended()
            if (ended or self.process.poll() is not None) and not all(report.exists() for report in reports):
                self._raise_errors()
                who = f"that of rank {ended[0]} of {self.count}" if ended else "all"
                raise RuntimeError(
                    f"For '{OWNER}', the processes must run until all are done, but {who} ended at '{self._phase()}'. "
                    "Mostly the system has killed it for want of memory: take fewer devices, or layers, or a machine "
                    f"with more of it. The last words of one: {self.last_words() or 'none'}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"For '{OWNER}', the argument 'timeout' must be more than what it takes, but got {timeout:g} s: it "
                    f"was at '{self._phase()}'. Give it more time."
                )
            time.sleep(MOMENT)
        return [json.loads(report.read_text()) for report in reports]

    def _phase(self) -> str:
        """Return what the first rank that is not done is doing. The first ones have more to do than the others."""
        files = [self.folder / f"phase_{rank}" for rank in range(self.count)]
        if not all(file.exists() for file in files):
            return f"starting {self.count} processes"
        return next((phase for file in files if (phase := file.read_text()) != DONE), DONE)

    def _raise_errors(self) -> None:
        for path in sorted(self.folder.glob("error_*.json")):
            error = json.loads(path.read_text())
            kind, text = error["type"], error["text"]
            if not text.startswith("For '"):
                rule = "what 'build' returns must compile and run"
                kind, text = "RuntimeError", f"For '{OWNER}', {rule}, but rank {error['rank']} got {kind}: {text}"
            raise error_of(kind, text) from ChildError(error["traceback"])


def stand_ins(folder: Path) -> dict[str, str]:
    """Build what stands for CUDA below ``folder``, and return the environment in which it is found."""
    found = environment(build_cuda_home(folder / "cuda"))
    # The processes are told where to look for modules.
    del found["PYTHONPATH"]
    return found
