"""The two ways to show progress: a bar on a terminal, lines in a log."""

import sys
import time
from typing import Protocol

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile


class Display(Protocol):
    """The interface of progress displays."""

    seconds: float  # shortest time between two calls of show

    def show(self, step: int, epoch: str, facts: str) -> None:
        """Show that ``step`` batches or updates are done."""

    def close(self) -> None:
        """End the display."""


class Lines:
    """Plain lines in a log.

    Args:
        total: Number of steps, if it is known.
        unit: The unit of a step.
        seconds: Shortest time between two lines.
    """

    def __init__(self, total: int | None, unit: str, seconds: float) -> None:
        self.total, self.unit, self.seconds = total, unit, seconds
        self.start = self.shown_at = time.monotonic()
        self.shown = 0

    def show(self, step: int, epoch: str, facts: str) -> None:
        """Print a line. The rate is that since the last one."""
        now = time.monotonic()
        elapsed = now - self.start
        rate = (step - self.shown) / max(now - self.shown_at, 1e-9)
        place, times = f"{self.unit} {step}", f"{tqdm.format_interval(elapsed)} elapsed"
        if self.total is not None:
            place += f"/{self.total} ({step / self.total:.0%})"
            times += f", {tqdm.format_interval(elapsed / step * (self.total - step))} left"
        plural = f"{self.unit}es" if self.unit == "batch" else f"{self.unit}s"
        print(", ".join(filter(None, [epoch, place, facts, f"{rate:.3g} {plural}/s", times])), flush=True)
        self.shown, self.shown_at = step, now

    def close(self) -> None:
        """Do nothing."""


class Bar:
    """A bar in the last line of the terminal."""

    seconds = 0.1

    def __init__(self, total: int | None, unit: str) -> None:
        self.bar = tqdm(total=total, unit=unit, mininterval=0, miniters=0)
        self.streams = sys.stdout, sys.stderr
        # Whole lines of what others write go above the bar.
        self.above = DummyTqdmFile(sys.stdout), DummyTqdmFile(sys.stderr)
        sys.stdout, sys.stderr = self.above

    def show(self, step: int, epoch: str, facts: str) -> None:
        """Draw the bar, with tqdm's rate."""
        self.bar.set_description(epoch, refresh=False)
        self.bar.set_postfix_str(facts, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        """Leave the bar as it is and give the streams back."""
        for stream in self.above:
            if any(stream._buf):  # The start of a line without its end.
                stream.write("\n")
        if (sys.stdout, sys.stderr) == self.above:  # else someone else redirected them since
            sys.stdout, sys.stderr = self.streams
        self.bar.close()
