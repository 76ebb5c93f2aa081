"""Start a child process, monitor its memory, and end it when it exceeds the limit."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from threading import Event
from typing import Any, NamedTuple

from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.probing import memory
from ms_gradaccum.tools.probing.child import IN_CHILD, OWNER, died_of_memory
from ms_gradaccum.tools.processes import ChildError, environment_outside_jobs, error_of, import_path

# A process takes a second to fill 1 to 3 GB.
_WATCH_MILLISECONDS = 10
# How far beyond the limit single rows may go, so that an error can say what they take.
_LEAST_EXCESS = 2**30
_LAST_WORDS = 2000


class Measured(NamedTuple):
    """The results of a child. An item is None if the child was ended before it was measured."""

    rows: int | None = None
    loaded: int | None = None
    peak: int | None = None
    # What it had passed when it was ended. None if it was not.
    passed: int | None = None


class Child:
    """A process that trains in ``micro_size`` micro batches. It is a context manager, which ends the process."""

    def __init__(self, builder: Builder, micro_size: int, limit: int, timeout: float) -> None:
        self.micro_size = micro_size
        self.limit = limit
        self.timeout = timeout
        self.facts: dict[str, Any] = {}
        self.cap = limit
        self.text = b""
        self.words = tempfile.TemporaryFile()
        self.reader, writer = os.pipe()
        self.poller = select.poll()
        self.poller.register(self.reader)
        start = (
            f"import sys; sys.path[:] = {import_path()!r}; from ms_gradaccum.tools.probing.child import main; main()"
        )
        arguments = (json.dumps(builder), str(micro_size), str(writer), str(os.getpid()))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self.words,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env={**environment_outside_jobs(), IN_CHILD: "1"},
                start_new_session=True,
            )
        finally:
            os.close(writer)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        os.close(self.reader)
        self.words.close()

    def watch(self, stop: Event) -> Measured:
        """Return its results when it ends or exceeds the limit. Raise if it failed for another reason."""
        deadline = time.monotonic() + self.timeout
        while self._listen():
            if stop.is_set():
                raise InterruptedError
            if self.facts.get("on_host") and memory.peak(self.process.pid) > self.cap:
                return Measured(self.facts["rows"], self.facts["loaded"], None, self.cap)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"For '{OWNER}', the argument 'timeout' must be more than what two windows of "
                    f"micro_size={self.micro_size} take, but got {self.timeout:g} s. Give it more time."
                )
        if "peak" not in self.facts:
            self._check_end()
        return Measured(self.facts.get("rows"), self.facts.get("loaded"), self.facts.get("peak"))

    def _listen(self) -> bool:
        """Wait a moment for what it says. Return whether it has more to say."""
        if self.poller.poll(_WATCH_MILLISECONDS):
            part = os.read(self.reader, 65536)
            *lines, self.text = (self.text + part).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
            # Not its end alone: what it has started can keep the pipe open.
            return bool(part) and not self.facts.keys() & {"peak", "error"}
        return self.process.poll() is None

    def _hear(self, facts: dict[str, Any]) -> None:
        self.facts |= facts
        if self.facts.get("rows", math.inf) <= self.micro_size:
            self.cap = self.limit + max(self.limit, _LEAST_EXCESS)

    def _check_end(self) -> None:
        """Raise if it has ended for another reason than memory."""
        facts = self.facts
        if "error" in facts:
            kind, text = facts["error"]
            if facts["out_of_memory"]:
                return
            if "rows" in facts:
                kind, text = "RuntimeError", f"{self._must_run()} got {kind}: {text}"
            elif not text.startswith("For '"):  # Else it says which argument is wrong.
                rule = "the function that builds the training must run in a new process"
                kind, text = "RuntimeError", f"For '{OWNER}', {rule}, but got {kind}: {text}"
            raise error_of(kind, text) from ChildError(facts["traceback"])
        status = self.process.wait()
        # Nobody but the system, when it has no memory left, ends a process in this way.
        if status == -signal.SIGKILL:
            return
        self.words.seek(0, os.SEEK_END)
        self.words.seek(max(0, self.words.tell() - _LAST_WORDS))
        said = self.words.read().decode(errors="replace").strip()
        if not died_of_memory(said):
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise RuntimeError(f"{self._must_run()} its process ended with {how}. Its last words: {said or 'none'}")

    def _must_run(self) -> str:
        return f"For '{OWNER}', the training must run, but with micro_size={self.micro_size}"

    def _end(self) -> None:
        """End it with all that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
