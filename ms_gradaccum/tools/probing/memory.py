"""Memory sizes: parsing, formatting, and the memory of a process."""

import re
from pathlib import Path
from typing import Any

from ms_gradaccum._checks import argument_error, check_positive_int

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_RULE = "a number of bytes, as an int or a text"
_REMEDY = "For example 4 * 2**30, '4GiB' or '500MB'."
_MOST = 2**63 - 1


def check_memory_limit(owner: str, limit: Any) -> int:
    """Return a number of bytes, given as an int or a text such as '4GiB' (of 1024) or '500MB' (of 1000)."""
    if isinstance(limit, str):
        match = _TEXT.fullmatch(limit)
        if match is None:
            raise ValueError(argument_error(owner, "memory_limit", _RULE, repr(limit), _REMEDY))
        limit = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    elif isinstance(limit, bool) or not isinstance(limit, int):
        got = f"{limit!r} of type {type(limit).__name__}"
        raise TypeError(argument_error(owner, "memory_limit", _RULE, got, _REMEDY))
    return check_positive_int(owner, "memory_limit", limit, _REMEDY, _MOST)


def as_text(count: int) -> str:
    """Format a number of bytes."""
    if count < 2**20:
        return f"{count} bytes"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def resident(process: int | str = "self") -> int:
    """Return the bytes of memory that a process has now."""
    return _status(process, "VmRSS:")


def peak(process: int | str = "self") -> int:
    """Return the most bytes that a process has had since `reset_peak`; 0 if it has ended."""
    return _status(process, "VmHWM:")


def reset_peak() -> None:
    """Let `peak` of this process start from what it has now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(process: int | str, key: str) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
