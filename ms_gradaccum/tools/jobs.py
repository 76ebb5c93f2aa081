"""A job of one process, or of several under msrun. Its processes never outlive the process that started them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ms_gradaccum.tools.processes import end_with_parent, environment_outside_jobs, free_port, import_path

# The polling interval of a folder. Unit: seconds.
MOMENT = 0.2
DONE = "done"
# The prefix of the files with process ids.
_PROCESS = "process_"
# The number of characters of a log in an error.
_LAST_WORDS = 3000
_Kind = TypeVar("_Kind", bound="Processes")


class Processes:
    """Processes that run one program in a folder of their own. As a context manager it ends them.

    Args:
        owner: Class name used in error messages.
        count: Number of processes. msrun starts several processes.
        variable: Environment variable that marks the processes.
        program: Function that returns the Python code that each process runs, given the folder.
        extra: Function that returns further environment variables, given the folder.
    """

    def __init__(
        self,
        owner: str,
        count: int,
        variable: str,
        program: Callable[[Path], str],
        extra: Callable[[Path], Mapping[str, str]] = lambda folder: {},
    ) -> None:
        self.owner = owner
        self.count = count
        self.variable = variable
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="ms_gradaccum_"))
        try:
            self.process = self._start(program(self.folder), extra(self.folder))
        except BaseException:
            self._clean_up()
            raise

    def _start(self, program: str, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        script = self.folder / "worker.py"
        script.write_text(f"import sys\nsys.path[:] = {import_path()!r}\n{program}\n")
        here = str(Path(sys.executable).parent)
        # The processes are killed in the end, so their temporary files are removed together with the folder.
        found = {
            "PATH": os.pathsep.join([here, os.getenv("PATH", "")]),
            "TMPDIR": str(self.folder),
            self.variable: self.mark,
        }
        settings = {**environment_outside_jobs(), **extra, **found}
        if self.count > 1:
            # More threads than cores only wait for each other.
            settings["OMP_NUM_THREADS"] = "1"
        with (self.folder / "msrun.log").open("wb") as log:
            return subprocess.Popen(
                self._command(script, settings["PATH"]),
                env=settings,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGINT),
            )

    def _command(self, script: Path, path: str) -> list[str]:
        if self.count == 1:
            return [sys.executable, str(script)]
        msrun = shutil.which("msrun", path=path)
        if msrun is None:
            raise RuntimeError(
                f"For '{self.owner}', msrun must be found, but it is not in the PATH. MindSpore comes with it."
            )
        command = [msrun, f"--worker_num={self.count}", f"--local_worker_num={self.count}"]
        return [
            *command,
            f"--master_port={free_port()}",
            f"--log_dir={self.folder / 'log'}",
            "--join=True",
            str(script),
        ]

    def __enter__(self: _Kind) -> _Kind:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._end()
        finally:
            self._clean_up()

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended, which means that they have failed."""
        files = [self.folder / f"{_PROCESS}{rank}" for rank in range(self.count)]
        return [rank for rank, file in enumerate(files) if file.exists() and _has_ended(int(file.read_text()))]

    def last_words(self) -> str:
        """Return the end of a process's log, preferably of a failed process."""
        logs = [self.folder / "msrun.log", *sorted((self.folder / "log").glob("worker_*.log"))]
        texts = [path.read_text(errors="replace").strip() for path in logs if path.exists()]
        failed = next((text for text in texts if "Traceback" in text), texts[-1] if texts else "")
        return failed[-_LAST_WORDS:]

    def _end(self) -> None:
        """End msrun, which ends its processes, then kill the remaining ones."""
        self.process.send_signal(signal.SIGINT if self.count > 1 else signal.SIGKILL)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        finally:  # A second Ctrl-C, too, leaves nothing behind.
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{self.variable}={self.mark}".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue

    def _clean_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_ended(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Meeting:
    """Files in which the ranks of a job report to the process that started it, and with which they synchronize.

    They do not wait in a collective: on CPU it times out after half a minute, and a compilation may take longer.
    """

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = Path(folder), rank, size
        self.write(f"{_PROCESS}{rank}", str(os.getpid()))

    def phase(self, text: str) -> None:
        """Report the current phase of this rank."""
        self.write(f"phase_{self.rank}", text)

    def report(self, values: dict[str, Any]) -> None:
        """Report the results of this rank, which is then done."""
        self.phase(DONE)
        self.write(f"report_{self.rank}.json", json.dumps(values))

    def error(self, kind: str, text: str, traceback: str) -> None:
        """Report an error of this rank."""
        told = {"rank": self.rank, "type": kind, "text": text, "traceback": traceback}
        self.write(f"error_{self.rank}.json", json.dumps(told))

    def wait_for(self, name: str) -> None:
        """Wait until all ranks have reached this point."""
        self.write(f"at_{name}_{self.rank}", "")
        while len(list(self.folder.glob(f"at_{name}_*"))) < self.size:
            time.sleep(MOMENT)

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        partial = self.folder / f"partial_{self.rank}"
        partial.write_text(text)
        partial.rename(self.folder / name)
