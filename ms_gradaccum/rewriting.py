"""Where MindSpore rewrites the sources of a network, for mixed precision of level O1."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rewriting() -> Iterator[None]:
    """Let level O1 write the sources that it rewrites elsewhere than in the user's working directory.

    What is installed below that, in a .venv, it would take for the user's own and try to rewrite. And it leaves folders
    of sources in the path of modules, of which one hides Python's own math from new processes.
    """
    here, path = os.getcwd(), list(sys.path)
    os.chdir(_folder_apart())
    try:
        yield
    finally:
        os.chdir(here)
        sys.path[:] = path


@functools.cache
def _folder_apart() -> str:
    # To the end of the process: the compiler reads the sources.
    folder = tempfile.mkdtemp(prefix="ms_gradaccum_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
