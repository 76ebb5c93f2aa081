"""Child processes for measurements and tests, and jobs of several. They never outlive the process that started them."""

import builtins
import ctypes
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mindspore
import psutil

from ms_gradaccum._checks import first_line

# The environment variables that msrun sets.
_JOB_VARIABLES = frozenset(
    "MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT RANK_ID RANK_SIZE "
    "RANK_TABLE_FILE".split()
)
# The environment variable that marks the processes of a job, which must not start further jobs.
IN_JOB = "MS_GRADACCUM_JOB"
_PR_SET_PDEATHSIG = 1
# Loaded here, because a process that was forked from several threads cannot load it.
_LIBC = ctypes.CDLL(None)
_MOMENT = 0.2  # The polling interval of a folder. Unit: seconds.
_LAST_WORDS = 3000  # So many characters of a log are shown.


@dataclass(eq=False)
class RankError(Exception):
    """The error of a rank of a job."""

    kind: str
    text: str
    line: str
    traceback: str

    def __str__(self) -> str:
        return self.traceback

    def here(self, said: str) -> Exception:
        """Return the error to raise here: an error of this package unchanged, for others `said` and the first line."""
        if self.text.startswith("For '"):
            kind: type[Exception] = getattr(builtins, self.kind, RuntimeError)
            return kind(self.text)
        return RuntimeError(f"{said} got {self.line}")


class EndedError(Exception):
    """A process of a job has ended without a report."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def search_path() -> str:
    """Return $PATH with the folder of this Python first, which an environment that is not activated leaves out."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])


def find_msrun() -> str | None:
    """Return the place of msrun, or None if there is none."""
    return shutil.which("msrun", path=search_path())


class Job(ExitStack):
    """Processes that call one function in their own folder, several by msrun. A context manager, which ends them.

    The ``function``, of a module, takes the ``arguments``, and yields reports. All of them are pickled.
    """

    def __init__(
        self, count: int, function: Callable[..., Iterable[object]], *arguments: object
    ) -> None:
        super().__init__()
        self.count = count
        self.received = 0  # The number of reports of each rank that `wait` has returned.
        self.folder = Path(
            self.enter_context(
                TemporaryDirectory(prefix="ms_gradaccum_", ignore_cleanup_errors=True)
            )
        )
        try:
            (self.folder / "task").write_bytes(pickle.dumps((function, arguments)))
            self.process = self._start()
        except BaseException:
            self.close()
            raise
        self.callback(self._kill)

    def _start(self) -> subprocess.Popen[bytes]:
        # amp.auto_mixed_precision adds folders of MindSpore's layers to the path; their math.py would hide Python's.
        inside = str(Path(mindspore.__file__).parent)
        places = [os.path.abspath(place) for place in sys.path if not place.startswith(inside)]
        script = self.folder / "worker.py"
        program = (
            f"import sys\nsys.path[:] = {places!r}\nfrom {__name__} import "
            f"serve\nserve({str(self.folder)!r})\n"
        )
        script.write_text(program)
        settings = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
        # The processes are killed at the end, so their temporary files are removed with the folder.
        settings |= {IN_JOB: "1", "PATH": search_path(), "TMPDIR": str(self.folder)}
        command = [sys.executable]
        if self.count > 1:
            # More threads than cores only wait for each other.
            settings["OMP_NUM_THREADS"] = "1"
            if find_msrun() is None:
                raise RuntimeError(
                    f"{self.count} processes must be started by msrun, but it is not in PATH. It "
                    f"is part of MindSpore: call the command in the environment that has it."
                )
            command = ["msrun", f"--worker_num={self.count}", f"--local_worker_num={self.count}"]
            command += [
                f"--master_port={free_port()}",
                f"--log_dir={self.folder / 'log'}",
                "--join=True",
            ]
        with (self.folder / "msrun.log").open("wb") as log:
            return subprocess.Popen(
                [*command, str(script)],
                env=settings,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._end_with_parent,
            )

    def _end_with_parent(self) -> None:
        # A background program of a script ignores the signal at which msrun ends its processes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT if self.count > 1 else signal.SIGKILL)

    def _kill(self) -> None:
        # While it is stopped, msrun starts no others, nor does it see them end.
        self.process.send_signal(signal.SIGSTOP)
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(
        self, timeout: float, watch: Callable[[], None] = lambda: None, moment: float = _MOMENT
    ) -> list[Any]:
        """Return the next report of each rank. Raise the first RankError, an EndedError or a TimeoutError.

        Meanwhile ``watch`` is called every ``moment`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Read this first, because a process may report and end in between.
            has_ended = self.process.poll() is not None or any(
                map(self._has_ended, range(self.count))
            )
            paths = [self.folder / f"report_{self.received}_{rank}" for rank in range(self.count)]
            reports = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
            for report in reports:
                if isinstance(report, RankError):
                    raise report
            if len(reports) == self.count:
                self.received += 1
                return reports
            if has_ended:
                raise EndedError
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.count - len(reports)} of {self.count} processes")
            watch()
            time.sleep(moment)

    def _has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank is known and has ended."""
        file = self.folder / f"process_{rank}"
        try:
            return (
                file.exists()
                and psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return True

    def last_words(self) -> str:
        """Return the end of a process's log, preferably of a failed process."""
        logs = [self.folder / "msrun.log", *sorted((self.folder / "log").glob("worker_*.log"))]
        texts = [path.read_text(errors="replace").strip() for path in logs]
        failed = [text for text in texts if "Traceback" in text]
        return (failed or texts[-1:] or [""])[0][-_LAST_WORDS:]


def serve(folder: str) -> None:
    """Call the function of a job in one of its processes, pass on its reports or its error, and wait to be killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def write(name: str, content: bytes) -> None:
        """Write a file of this rank atomically."""
        partial = Path(folder, f"partial_{os.getpid()}")
        partial.write_bytes(content)
        partial.rename(Path(folder, f"{name}_{os.getenv('RANK_ID', '0')}"))

    # msrun gives its scheduler a rank, too.
    if os.getenv("MS_ROLE") != "MS_SCHED":
        write("process", str(os.getpid()).encode())
    sent = 0
    try:
        function, arguments = pickle.loads(Path(folder, "task").read_bytes())
        for report in function(*arguments):
            write(f"report_{sent}", pickle.dumps(report))
            sent += 1
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        ended = RankError(kind, str(error), f"{kind}: {first_line(error)}", traceback.format_exc())
        write(f"report_{sent}", pickle.dumps(ended))
    # If one process exits, msrun takes long to end the others, and without a GPU MindSpore would exit with an error.
    while True:
        time.sleep(1e6)
