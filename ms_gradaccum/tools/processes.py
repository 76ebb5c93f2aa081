"""Helpers for processes that are started to measure or to try something."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import mindspore

# The environment variables that msrun sets.
_JOB_VARIABLES = frozenset(
    "MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT RANK_ID RANK_SIZE RANK_TABLE_FILE".split()
)
_PR_SET_PDEATHSIG = 1
# The types of errors that are raised again with their type; all others become a RuntimeError.
_KINDS = {kind.__name__: kind for kind in (MemoryError, RuntimeError, TimeoutError, TypeError, ValueError)}


class ChildError(Exception):
    """The traceback of another process, as the cause of an error here."""


def error_of(kind: str, text: str) -> Exception:
    """Recreate an error that was raised in another process."""
    return _KINDS.get(kind, RuntimeError)(text)


def refuse_inside(owner: str, variable: str) -> None:
    """Raise in a process that ``owner`` itself has started, which has ``variable`` in its environment."""
    if variable in os.environ:
        raise RuntimeError(
            f"For '{owner}', the program must not call it when a new process imports the program, but it does. Put the "
            f"call under: if __name__ == '__main__':"
        )


def environment_outside_jobs() -> dict[str, str]:
    """Return the environment of this process without the variables of a distributed job."""
    return {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}


def import_path() -> list[str]:
    """Return the module search path of this process without folders inside MindSpore.

    ``amp.auto_mixed_precision`` adds folders of MindSpore's layers, whose ``math.py`` would hide Python's module in a
    new process.
    """
    inside = str(Path(mindspore.__file__).parent)
    return [place for place in sys.path if not place.startswith(inside)]


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Make the system send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)


def depend_on(parent: int) -> None:
    """End this process with its parent, even if that has ended already."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
