"""What processes that are started to measure or to try something have in common."""

import ctypes
import os
import signal
import sys
from pathlib import Path

import mindspore

# What msrun tells a process about its job; the child is alone.
JOB_VARIABLES = frozenset(
    "MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT RANK_ID RANK_SIZE RANK_TABLE_FILE".split()
)
_PR_SET_PDEATHSIG = 1


def import_path() -> list[str]:
    """Return where this process looks for modules, but not inside MindSpore.

    Its ``amp.auto_mixed_precision`` puts the folders of its layers first, where their ``math.py`` hides Python's from a
    process that begins.
    """
    inside = str(Path(mindspore.__file__).parent)
    return [place for place in sys.path if not place.startswith(inside)]


def depend_on(parent: int) -> None:
    """End this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
