"""What the child process does: train two windows, and tell its parent what that took."""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import mindspore as ms

from ms_gradaccum.backend.compiled import return_memory
from ms_gradaccum.tools.probing import memory, transport
from ms_gradaccum.tools.probing.training import Script, Training
from ms_gradaccum.training.train_step import TrainOneStepCell

# Set in each child, which must not measure in turn.
IN_CHILD = "MS_GRADACCUM_PROBE"

# After the second update the optimizer has what it keeps. A loss scale that starts too high skips some windows.
_UPDATES, _MOST_WINDOWS = 2, 20
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad_alloc|memory (is not|isn't|not) enough|unable to allocate"
    r"|alloc\w* [^\n]*memory[^\n]* fail|memory [^\n]*alloc\w* fail",
    re.IGNORECASE,
)


def main() -> None:
    """Measure what the arguments say: the file of the job, micro_size, a pipe to write to, the parent's number."""
    job, micro_size, pipe, parent = sys.argv[1], *map(int, sys.argv[2:])
    _depend_on(parent)
    with os.fdopen(pipe, "w", buffering=1) as out:
        try:
            _measure(Path(job), micro_size, out)
        except BaseException as error:
            report = {"error": [type(error).__name__, str(error)], "traceback": traceback.format_exc()}
            _tell(out, **report, out_of_memory=is_out_of_memory(error))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # There is nothing to clean up that its end does not.


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, which MindSpore words differently for each device, says that memory was missing."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def died_of_memory(last_words: str) -> bool:
    """Return whether what a process has written before it died says that memory was missing."""
    return _OUT_OF_MEMORY.search(last_words) is not None


def _depend_on(parent: int) -> None:
    """End with the parent, be the first that the system ends when it has no memory, and leave no image behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _measure(job: Path, micro_size: int, out: Any) -> None:
    with job.open("rb") as file:
        context = transport.load(file)
        if context is not None:
            context.enter()
        training = transport.load(file)
    if isinstance(training, Script):
        training = training.build()
    on_host = ms.get_context("device_target") == "CPU"
    # Loading has left gaps, which the training would fill first.
    return_memory()
    memory.reset_peak()
    loaded = memory.resident() if on_host else ms.runtime.memory_allocated()
    _tell(out, rows=training.rows(), loaded=loaded, on_host=on_host)
    train(training, micro_size)
    _tell(out, peak=memory.peak() if on_host else ms.runtime.max_memory_allocated())


def train(training: Training, micro_size: int) -> None:
    """Run windows until the optimizer has run twice."""
    step = TrainOneStepCell(training.in_parts(micro_size), training.optimizer, **training.settings)
    updates = 0
    for _ in range(_MOST_WINDOWS):
        updates += bool(step(*training.inputs).updated.asnumpy())
        if updates == _UPDATES:
            return


def _tell(out: Any, **facts: Any) -> None:
    out.write(json.dumps(facts) + "\n")
