"""One process that stands in for the processes of many jobs of one, which take seconds each to begin."""

import atexit
import os
import pickle
import time
import traceback
from itertools import count
from pathlib import Path

from ms_gradaccum._checks import first_line
from ms_gradaccum.tools.processes import Job, RankError

_END = "end of the task"


def answer():
    """In the process: call the functions of all tasks, and pass on their reports, errors and ends."""
    for number in count():
        file = Path(os.environ["TMPDIR"], f"task_{number}")
        while not file.exists():
            time.sleep(0.02)
        try:
            function, arguments = pickle.loads(file.read_bytes())
            yield from function(*arguments)
        except (Exception, SystemExit) as error:
            # The Job raises an error that it gets, and this process goes on.
            yield {"error": [type(error).__name__, str(error), first_line(error), traceback.format_exc()]}
        yield _END


class SharedJob:
    """Stands in for a Job of one process."""

    server = None
    received = 0

    @staticmethod
    def end():
        if SharedJob.server is not None:
            SharedJob.server.__exit__()
        SharedJob.server = None

    def __init__(self, size, function, *arguments):
        assert size == 1
        if SharedJob.server is None:
            SharedJob.server = Job(1, answer)
            SharedJob.numbers = count()
            atexit.register(SharedJob.end)
        self.process, self.has_ended = self.server.process, False
        file = self.server.folder / f"task_{next(self.numbers)}"
        file.with_suffix(".new").write_bytes(pickle.dumps((function, arguments)))
        file.with_suffix(".new").rename(file)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        while not self.has_ended:
            self.next(300)

    def next(self, *settings):
        (report,) = self.server.wait(*settings)
        self.has_ended = report == _END
        return report

    def wait(self, *settings, moment=None):
        report = self.next(*settings)
        self.received += 1
        if isinstance(report, dict) and "error" in report:
            raise RankError(*report["error"])
        return [report]
