"""Memory of the process."""

import math
import sys
from pathlib import Path


def status(key: str) -> float:
    """Return a figure of this process in MB: VmRSS is now, VmHWM the peak. NaN on systems other than Linux."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), math.nan)


def reset_peak() -> None:
    """Set VmHWM back to what is resident now."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
