"""Settings of MindSpore that take most of the waiting out of small tests and change no number.

The samples, which run in processes of their own, do without: they are what a user runs.
"""

import inspect
import os

import mindspore as ms

_read = inspect.getsourcelines
_lines = {}


def _read_once(thing):
    code = getattr(thing, "__code__", None)
    if code is None:
        return _read(thing)
    if code not in _lines:
        _lines[code] = _read(thing)
    return _lines[code]


def install():
    """Speed up this process, and those that it starts."""
    # See ms_gradaccum/backend/cpu.py.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    # Otherwise threads hand each operator on to one another and spin meanwhile: an eager step takes 7 times as long.
    ms.runtime.launch_blocking()
    # The compiler reads the source of a function once, not in each compilation: an eighth of its time.
    inspect.getsourcelines = _read_once
