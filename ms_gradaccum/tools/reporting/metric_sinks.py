"""Files of reports: JSON lines and TensorBoard events. Errors of a disk are warnings during the training."""

import json
import math
import os
import time
from typing import Any

from ms_gradaccum._checks import argument_error, check_path, counted, warn

_OWNER = "MetricsLogger"


class JsonLines:
    """A file with one JSON object per line. It is opened for each line, and has it afterwards."""

    def __init__(self, path: Any, append: bool) -> None:
        # Absolute, since the program may change its folder.
        self.path = os.path.abspath(check_path(_OWNER, "path", path, "For example 'log_output/run.jsonl'."))
        self.unwritten, self.has_failed = b"", False
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, "ab"):  # It may be a pipe.
                has_lines = os.path.getsize(self.path) > 0
            if has_lines:
                with open(self.path, "rb") as file:
                    file.seek(-1, os.SEEK_END)
                    # A program that was killed can leave the start of a line.
                    self.unwritten = b"" if file.read() == b"\n" else b"\n"
        except OSError as error:
            raise _not_writable("path", self.path, error) from None
        if has_lines and not append:
            remedy = "Give another one, delete it, or go on in it with append=True."
            got = f"{self.path} with lines in it"
            raise ValueError(argument_error(_OWNER, "path", "a new or empty file", got, remedy))

    def write(self, record: dict[str, Any]) -> None:
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
        """Try to write the lines that could not be written before, or warn of them."""
        if self.unwritten and self._try() is not None:
            lines = counted(self.unwritten.count(b"\n"), "line")
            warn(f"For '{_OWNER}', {lines} could not be written to {self.path}.")
            self.unwritten = b""

    def _try(self) -> OSError | None:
        try:
            # Unbuffered, so that it is known which lines are in the file.
            with open(self.path, "ab", buffering=0) as file:
                while self.unwritten:
                    self.unwritten = self.unwritten[file.write(self.unwritten) :]
        except OSError as error:
            return error
        return None


class EventFile:
    """A TensorBoard event file.

    tensorboardX's SummaryWriter is not used: its thread ends silently on a full disk, and the training would hang.
    """

    def __init__(self, folder: Any) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary
        except ImportError as error:
            raise ImportError(
                f"For '{_OWNER}', the argument 'tensorboard_dir' takes the package tensorboardX, but got: {error}. "
                f"Install it with: pip install 'ms_gradaccum[tensorboard]'."
            ) from None
        folder = check_path(_OWNER, "tensorboard_dir", folder, "For example 'log_output/events'.")
        self.folder = os.path.abspath(folder)
        self.make_writer, self.make_event, self.make_summary = EventsWriter, Event, Summary
        self.has_failed = False
        self.writer: Any = None
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._open()
        except OSError as error:
            raise _not_writable("tensorboard_dir", self.folder, error) from None

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Write numbers by name. After an error nothing more is written."""
        if self.has_failed:
            return
        values = [self.make_summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self.make_event(wall_time=time.time(), step=step, summary=self.make_summary(value=values))
        try:
            if self.writer is None:
                self._open()
            self.writer.write_event(event)
            self.writer.flush()
        except OSError as error:
            self.has_failed = True
            warn(
                f"For '{_OWNER}', the event file in {self.folder} cannot be written ({error.strerror}). The training "
                f"goes on without it."
            )

    def close(self) -> None:
        """Close the file. `write` opens another one."""
        if self.writer is not None and not self.has_failed:
            self.writer.close()
        self.writer = None

    def _open(self) -> None:
        # The name has the time in seconds and the machine; a file of the same second would be overwritten.
        self.writer = self.make_writer(os.path.join(self.folder, "events"), f".{os.getpid()}.{time.time_ns()}")
        self.writer.flush()


def _not_writable(name: str, path: str, error: OSError) -> OSError:
    return type(error)(argument_error(_OWNER, name, "writable", f"{path} ({error.strerror})", "Give another one."))


def _as_json(value: Any) -> Any:
    """Return ``value`` with None for each Inf and NaN."""
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
