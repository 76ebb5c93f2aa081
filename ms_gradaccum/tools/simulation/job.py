"""The processes of a simulation: msrun starts them, and none of them outlives it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_gradaccum.tools.processes import (
    ChildError,
    end_with_parent,
    environment_outside_jobs,
    error_of,
    free_port,
    import_path,
)
from ms_gradaccum.tools.simulation.cuda_stubs import build_cuda_home, environment

OWNER = "simulate"
# Set in the environment of all processes of a job, which must not simulate in turn.
IN_JOB = "MS_GRADACCUM_SIMULATION"
# Seconds between two looks at the folder.
_MOMENT = 0.2
_DONE = "done"
# So many characters of a log go into an error.
_LAST_WORDS = 3000


class Job:
    """As many processes as there are devices. It is a context manager, which ends them.

    Each runs ``main`` of the worker with ``task``, and writes what it does and what it finds into files of one folder.
    """

    def __init__(self, devices: int, task: dict[str, Any]) -> None:
        self.devices = devices
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="ms_gradaccum_"))
        try:
            self.process = self._start(task)
        except BaseException:
            self._clean_up()
            raise

    def _start(self, task: dict[str, Any]) -> subprocess.Popen[bytes]:
        script = self.folder / "worker.py"
        script.write_text(
            f"import sys\nsys.path[:] = {import_path()!r}\n"
            f"from ms_gradaccum.tools.simulation.worker import main\nmain({str(self.folder)!r}, {json.dumps(task)!r})\n"
        )
        cuda = environment(build_cuda_home(self.folder / "cuda"))
        here = str(Path(sys.executable).parent)
        # The processes are killed in the end: what they would delete themselves goes with the folder.
        found = {"PATH": os.pathsep.join([here, os.getenv("PATH", "")]), "TMPDIR": str(self.folder), IN_JOB: self.mark}
        # More threads than cores only wait for each other.
        settings = {**environment_outside_jobs(), **cuda, **found, "OMP_NUM_THREADS": "1"}
        msrun = shutil.which("msrun", path=settings["PATH"])
        if msrun is None:
            raise RuntimeError(
                f"For '{OWNER}', msrun must be found, but it is not in the PATH. MindSpore comes with it."
            )
        count = self.devices
        command = [msrun, f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={free_port()}"]
        command += [f"--log_dir={self.folder / 'log'}", "--join=True", str(script)]
        with (self.folder / "msrun.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=settings,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGINT),
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        self._clean_up()

    def wait(self, timeout: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return what each rank has found, in their order; raise what one has raised, or if they take too long."""
        deadline = time.monotonic() + timeout
        reports = [self.folder / f"report_{rank}.json" for rank in range(self.devices)]
        while not all(report.exists() for report in reports):
            self._raise_errors()
            tell(self._phase())
            if self.process.poll() is not None and not all(report.exists() for report in reports):
                self._raise_errors()
                raise RuntimeError(f"For '{OWNER}', the processes must run, but they ended. {self._last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"For '{OWNER}', the argument 'timeout' must be more than what it takes, but got {timeout:g} s: it "
                    f"was at '{self._phase()}'. Give it more time."
                )
            time.sleep(_MOMENT)
        return [json.loads(report.read_text()) for report in reports]

    def _phase(self) -> str:
        """Return what the first rank that is not done is doing. The first ones have more to do than the others."""
        files = [self.folder / f"phase_{rank}" for rank in range(self.devices)]
        if not all(file.exists() for file in files):
            return f"starting {self.devices} processes"
        return next((phase for file in files if (phase := file.read_text()) != _DONE), _DONE)

    def _raise_errors(self) -> None:
        for path in sorted(self.folder.glob("error_*.json")):
            error = json.loads(path.read_text())
            kind, text = error["type"], error["text"]
            if not text.startswith("For '"):
                rule = "what 'build' returns must compile and run"
                kind, text = "RuntimeError", f"For '{OWNER}', {rule}, but rank {error['rank']} got {kind}: {text}"
            raise error_of(kind, text) from ChildError(error["traceback"])

    def _last_words(self) -> str:
        logs = [self.folder / "msrun.log", *sorted((self.folder / "log").glob("worker_*.log"))]
        texts = [path.read_text(errors="replace").strip() for path in logs if path.exists()]
        failed = next((text for text in texts if "Traceback" in text), texts[-1] if texts else "")
        return f"The last words of one: {failed[-_LAST_WORDS:] or 'none'}"

    def _end(self) -> None:
        """End msrun, which ends what it has started, and then whatever is left of that."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{IN_JOB}={self.mark}".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue

    def _clean_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Meeting:
    """Files in which the ranks of a job report to the process that has started it, and wait for each other.

    They do not wait in a message: on CPU it fails after half a minute, and one of them may compile for longer.
    """

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = Path(folder), rank, size

    def phase(self, text: str) -> None:
        """Tell what this rank does now."""
        self._write(f"phase_{self.rank}", text)

    def report(self, values: dict[str, Any]) -> None:
        """Tell what this rank has found. Nothing follows."""
        self.phase(_DONE)
        self._write(f"report_{self.rank}.json", json.dumps(values))

    def error(self, kind: str, text: str, traceback: str) -> None:
        """Tell what has gone wrong on this rank."""
        told = {"rank": self.rank, "type": kind, "text": text, "traceback": traceback}
        self._write(f"error_{self.rank}.json", json.dumps(told))

    def wait_for(self, name: str) -> None:
        """Wait until each rank has come here."""
        self._write(f"at_{name}_{self.rank}", "")
        while len(list(self.folder.glob(f"at_{name}_*"))) < self.size:
            time.sleep(_MOMENT)

    def _write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        partial = self.folder / f"partial_{self.rank}"
        partial.write_text(text)
        partial.rename(self.folder / name)
