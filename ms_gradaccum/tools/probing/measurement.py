"""The measurement of one micro_size in a child process, which is ended as soon as it exceeds the limit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NamedTuple

from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.probing.child import IN_CHILD, OWNER, died_of_memory, memory_of
from ms_gradaccum.tools.processes import ChildError, environment_outside_jobs, error_of, import_path

# A process takes a second to fill 1 to 3 GB.
_SECONDS_PER_LOOK = 0.01
# How far beyond the limit single rows may go, so that an error can say how much they take.
_LEAST_EXCESS = 2**30
_LAST_WORDS = 2000


class Measured(NamedTuple):
    """The results of a child. An item is None if the child ended before it was measured."""

    rows: int | None = None
    loaded: int | None = None
    peak: int | None = None
    # The memory that it had exceeded when it was ended. None if it was not.
    passed: int | None = None


def measure(builder: Builder, micro_size: int, limit: int, timeout: float, stop: Event) -> Measured:
    """Train in ``micro_size`` micro batches in a new process. Raise if it fails for another reason than memory."""
    path = import_path()
    program = f"import sys; sys.path[:] = {path!r}; from ms_gradaccum.tools.probing.child import main; main()"
    with TemporaryDirectory(prefix="ms_gradaccum_") as name:
        folder = Path(name)
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(builder), str(micro_size), name, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment_outside_jobs(), IN_CHILD: "1"},
                start_new_session=True,
            )
        try:
            return _watch(process, folder, micro_size, limit, timeout, stop)
        finally:
            # It ends with all that it has started.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _watch(
    process: subprocess.Popen[bytes], folder: Path, micro_size: int, limit: int, timeout: float, stop: Event
) -> Measured:
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        facts = _facts(folder)
        if facts.get("on_host"):
            cap = limit + (max(limit, _LEAST_EXCESS) if facts["rows"] <= micro_size else 0)
            if memory_of(process.pid, "VmHWM") > cap:
                return Measured(facts["rows"], facts["loaded"], None, cap)
        if stop.is_set():
            raise InterruptedError
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"For '{OWNER}', the argument 'timeout' must be more than what two windows of "
                f"micro_size={micro_size} take, but got {timeout:g} s. Give it more time."
            )
        time.sleep(_SECONDS_PER_LOOK)
    facts = _facts(folder)
    if "peak" not in facts and not facts.get("out_of_memory"):
        _check_end(facts, process.returncode, folder, micro_size)
    return Measured(facts.get("rows"), facts.get("loaded"), facts.get("peak"))


def _facts(folder: Path) -> dict[str, Any]:
    """Return what the child has measured until now."""
    file = folder / "facts"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return facts


def _check_end(facts: dict[str, Any], status: int, folder: Path, micro_size: int) -> None:
    """Raise if the child has ended for another reason than memory."""
    must_run = f"For '{OWNER}', the training must run, but with micro_size={micro_size}"
    if "error" in facts:
        kind, text = facts["error"]
        if "rows" in facts:
            kind, text = "RuntimeError", f"{must_run} got {kind}: {text}"
        elif not text.startswith("For '"):  # Else it says which argument is wrong.
            rule = "the function that builds the training must run in a new process"
            kind, text = "RuntimeError", f"For '{OWNER}', {rule}, but got {kind}: {text}"
        raise error_of(kind, text) from ChildError(facts["traceback"])
    said = (folder / "log").read_text(errors="replace").strip()[-_LAST_WORDS:]
    # SIGKILL comes only from the system, when it has no memory left.
    if status != -signal.SIGKILL and not died_of_memory(said):
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise RuntimeError(f"{must_run} its process ended with {how}. Its last words: {said or 'none'}")
