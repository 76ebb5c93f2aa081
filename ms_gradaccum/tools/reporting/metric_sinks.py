"""Sinks of reports: a file of JSON lines, a TensorBoard event file, a function."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

from ms_gradaccum._checks import argument_error, check_path, warn

_OWNER = "MetricsLogger"
_number = itertools.count()


class JsonLines:
    """A file with one JSON object per line."""

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self.path = check_path(_OWNER, "path", path, "For example 'log_output/run.jsonl'.")
        self.unwritten = b""
        self.has_failed = False
        self.file: Any = None
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._open()
            has_lines = os.path.getsize(self.path) > 0
            self.unwritten = self._end_of_torn_line() if has_lines else b""
        except OSError as error:
            raise _not_writable("path", self.path, error) from None
        if has_lines and not append:
            remedy = "Give another one, delete it, or go on in it with append=True."
            raise ValueError(
                argument_error(_OWNER, "path", "a new or empty file", f"{self.path} with lines in it", remedy)
            )

    def write(self, record: dict[str, Any], scalars: dict[str, float], step: int) -> None:
        """Write a line, preceded by lines that could not be written before."""
        record = {"time": round(time.time(), 3), **record}
        self.unwritten += json.dumps(_as_json(record), allow_nan=False).encode() + b"\n"
        error = self._try()
        if error is not None and not self.has_failed:
            self.has_failed = True
            warn(
                f"For '{_OWNER}', {self.path} cannot be written now ({error.strerror}). The training goes on; the "
                f"lines are kept and tried again with the next one."
            )

    def close(self) -> None:
        """Close the file after a last attempt to write."""
        if self._try() is not None:
            number = self.unwritten.count(b"\n")
            lines = "1 line" if number == 1 else f"{number} lines"
            warn(f"For '{_OWNER}', {lines} could not be written to {self.path}.")
            self.unwritten = b""
        if self.file is not None:
            self.file.close()
        self.file = None

    def _try(self) -> OSError | None:
        """Write the pending lines and return the error if that fails."""
        try:
            while self.unwritten:
                if self.file is None:
                    self._open()
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            return error
        return None

    def _open(self) -> None:
        # Unbuffered, so that it is known which lines are in the file.
        self.file = open(self.path, "ab", buffering=0)

    def _end_of_torn_line(self) -> bytes:
        """Return a newline if the last line is incomplete because a program was killed while writing it."""
        with open(self.path, "rb") as lines:
            lines.seek(-1, os.SEEK_END)
            return b"" if lines.read() == b"\n" else b"\n"


class EventFile:
    """A TensorBoard event file.

    It is written by this thread: the thread of tensorboardX's SummaryWriter ends silently on a full disk, and the
    training would then wait for it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary
        except ImportError as error:
            raise ImportError(
                f"For '{_OWNER}', the argument 'tensorboard_dir' takes the package tensorboardX, but got: {error}. "
                f"Install it with: pip install 'ms_gradaccum[tensorboard]'."
            ) from None
        self.folder = check_path(_OWNER, "tensorboard_dir", folder, "For example 'log_output/events'.")
        self.make_writer = EventsWriter
        self.make_event, self.make_summary = Event, Summary
        self.has_failed = False
        self.writer: Any = None
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._open()
        except OSError as error:
            raise _not_writable("tensorboard_dir", self.folder, error) from None

    def write(self, record: dict[str, Any], scalars: dict[str, float], step: int) -> None:
        """Write the numbers by name. After an error nothing more is written, since the lines have them, too."""
        if self.has_failed:
            return
        values = [self.make_summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            if self.writer is None:
                self._open()
            event = self.make_event(wall_time=time.time(), step=step, summary=self.make_summary(value=values))
            self.writer.write_event(event)
            self.writer.flush()
        except OSError as error:
            self.has_failed = True
            warn(
                f"For '{_OWNER}', the event file in {self.folder} cannot be written ({error.strerror}). The training "
                f"goes on without it."
            )

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None and not self.has_failed:
            self.writer.close()
        self.writer = None

    def _open(self) -> None:
        # The name has the time in seconds and the machine; a file of the same second would be overwritten.
        suffix = f".{os.getpid()}.{next(_number)}"
        self.writer = self.make_writer(os.path.join(self.folder, "events"), suffix)
        self.writer.flush()


class Call:
    """A function of the user, whose errors are not caught."""

    def __init__(self, function: Callable[[dict[str, float], int], Any]) -> None:
        self.function = function

    def write(self, record: dict[str, Any], scalars: dict[str, float], step: int) -> None:
        """Call the function."""
        self.function(dict(scalars), step)

    def close(self) -> None:
        """Do nothing."""


def _not_writable(name: str, path: str, error: OSError) -> OSError:
    return type(error)(argument_error(_OWNER, name, "writable", f"{path} ({error.strerror})", "Give another one."))


def _as_json(value: Any) -> Any:
    """Return ``value`` with None for each Inf and NaN."""
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
