"""A process that runs windows when it is asked to, so that frameworks with threads of their own can take turns."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from workload import WORKLOADS, Workload


class Row(NamedTuple):
    """One way to run a window."""

    # Runs one window to its end and returns its loss; None where it has none of its own.
    run: Callable[[], float | None]
    # Returns the weights as they are now.
    weights: Callable[[], Sequence[np.ndarray]]


# Returns the row of a name.
Builder = Callable[[Workload, int, str], Row]


def serve(build: Builder, versions: str) -> None:
    """Answer questions on standard input, one JSON value a line, until it ends."""
    # Whatever else is printed must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows: dict[str, Row] = {}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        question, *arguments = json.loads(line)
        try:
            answer: Any = None
            if question == "forget":
                rows.clear()
            elif question == "build":
                network, micro_size, name = arguments
                rows[name] = build(WORKLOADS[network], micro_size, name)
            else:
                answer = _run_window(rows[arguments[0]], *arguments[1:])
        except Exception as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps(answer), file=answers, flush=True)


def _run_window(row: Row, file: str | None = None) -> tuple[float, float | None]:
    """Return the seconds of a window and its loss. ``file`` gets what it adds to the weights."""
    before = [weight.copy() for weight in row.weights()] if file else []
    if not file:
        # After a window of another row caches are cold and threads asleep, so one that is not counted goes before.
        row.run()
    start = time.perf_counter()
    loss = row.run()
    seconds = time.perf_counter() - start
    if file:
        np.savez(file, *(after - first for after, first in zip(row.weights(), before)))
    return seconds, loss


class Worker:
    """The other end of the pipe."""

    def __init__(self, python: str, program: str, threads: int, **variables: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOG_v": "3"} | variables
        command = [python, str(Path(__file__).with_name(program)), str(threads)]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.versions = self._answer()

    def ask(self, *question: Any) -> Any:
        """Return the answer; an error is a string."""
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{Path(self.process.args[1]).name} ended with status {self.process.wait()}, see above")
        return json.loads(line)
