"""Let MindSpore's compiler read the source of a function once per process: that saves an eighth of its time."""

import inspect

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
    """Remember what was read by the code of the function, which no other definition shares."""
    inspect.getsourcelines = _read_once
