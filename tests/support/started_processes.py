"""The processes that a job has started, found without the package's help."""

import subprocess
from pathlib import Path


def processes_with(variable):
    """Return the processes that have this variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{variable}=".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def start_another(meeting):
    """In a process of a job, start one that has not its environment."""
    return {"started": subprocess.Popen(["sleep", "600"], env={}).pid}
