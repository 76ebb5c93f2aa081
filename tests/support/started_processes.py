"""The processes that a job has started, found without the package's help."""

import os
import subprocess
from pathlib import Path

# What these tests start inherits it: another run of them on this machine has another number.
_OURS = f"MS_GRADACCUM_TESTS_OF={os.getpid()}"
os.environ.update([_OURS.split("=")])


def processes_with(variable):
    """Return the processes, started by this one, that have this variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
            if _OURS.encode() in environment and any(each.startswith(f"{variable}=".encode()) for each in environment):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def start_another():
    """In a process of a job, start one that has neither its environment nor its session."""
    yield {"started": subprocess.Popen(["sleep", "600"], env={}, start_new_session=True).pid}
