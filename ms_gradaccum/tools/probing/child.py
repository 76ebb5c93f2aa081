"""The child process of a measurement: it builds a training and trains two windows."""

import json
import os
import re
import resource
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import return_memory
from ms_gradaccum.batch.nested_inputs import as_call
from ms_gradaccum.batch.split import SplitBatch, split_batch
from ms_gradaccum.parallel.semi_auto import is_semi_auto
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import Meeting
from ms_gradaccum.training.grad_accumulation import GradAccumulation, as_grad_accumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

OWNER = "find_micro_size"
# The file with what is known before the first window.
_BEGUN = "begun"
# How far beyond the limit single rows may go, so that an error can say how much they take.
_LEAST_EXCESS = 2**30
# After the second update the optimizer has all its state. A loss scale that starts too high skips some windows.
_UPDATES, _MOST_WINDOWS = 2, 20
# The micro batches at either end that run in place of all: the second one reuses the memory of the first one.
_ENDS = 2
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad_alloc|memory (is not|isn't|not) enough|unable to allocate"
    r"|alloc\w* [^\n]*memory[^\n]* fail|memory [^\n]*alloc\w* fail",
    re.IGNORECASE,
)


class Measured(NamedTuple):
    """The memory of a training, in bytes. An item is None if its process ended before it was known."""

    rows: int | None = None
    # In use before the first window, and the most in use from then on.
    loaded: int | None = None
    peak: int | None = None
    # The process is killed if it takes more than this. None if the memory is that of a device.
    cap: int | None = None
    is_killed: bool = False


def work(meeting: Meeting, builder: list[Any], micro_size: int, limit: int, home: str) -> dict[str, int]:
    """Build a training in the folder ``home``, train it in ``micro_size`` micro batches, and return its peak."""
    os.chdir(home)
    # When memory runs out, the system kills this process first, without a core dump.
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    training, on_host = Training(Builder(*builder).call(), micro_size), ms.get_context("device_target") == "CPU"
    # Building has left gaps, which the training would fill first.
    return_memory()
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts from the memory of now.
    loaded = memory_of("self", "VmRSS") if on_host else ms.runtime.memory_allocated()
    cap = limit + (max(limit, _LEAST_EXCESS) if training.rows <= micro_size else 0)
    meeting.write(_BEGUN, json.dumps(Measured(training.rows, loaded, None, cap if on_host else None)))
    training.run()
    return {"peak": memory_of("self", "VmHWM") if on_host else ms.runtime.max_memory_allocated()}


def begun(folder: Path) -> Measured:
    """Return what a child has written before its first window."""
    file = folder / _BEGUN
    return Measured(*json.loads(file.read_text())) if file.exists() else Measured()


def memory_of(process: int | str, key: str) -> int:
    """Return the bytes of resident memory of a process now (VmRSS) or at most (VmHWM); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def is_out_of_memory(kind: str, text: str) -> bool:
    """Return whether an error means that memory ran out. MindSpore words it differently for each device."""
    return "MemoryError" in kind or (kind == "RuntimeError" and _OUT_OF_MEMORY.search(text) is not None)


class Training:
    """The training that a function has built: its step with so many micro batches, its batch, and the rows of that."""

    def __init__(self, made: Any, micro_size: int) -> None:
        if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance((*made, {})[3], dict):
            rule = "a function that returns (network, optimizer, batch) or (network, optimizer, batch, dict)"
            got = f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
            raise TypeError(argument_error(OWNER, "build", rule, got, "The dict has settings of TrainOneStepCell."))
        network, optimizer, batch, settings = (*made, {})[:4]
        if isinstance(network, ms.nn.Cell) and is_semi_auto(network):
            got = "one that the compiler partitions, which one process cannot measure"
            rule = "a loss cell of one process"
            raise ValueError(argument_error(OWNER, "network", rule, got, "Give the cell inside."))
        whole = as_grad_accumulation(OWNER, network)
        args, kwargs = as_call(OWNER, batch)
        self.inputs = whole.positional(args, kwargs)
        whole.bind(self.inputs, {})
        network, axis = whole.network, whole.batch_axis
        few = FewMicroBatches(network, micro_size, weighted=whole.weighted, batch_axis=axis, losses=whole.losses)
        self.step = TrainOneStepCell(few, optimizer, **settings)
        self.rows = split_batch(self.inputs, 1, axis).micro_batches[0].rows
        # In evaluation mode, in which cells are made, Dropout and BatchNorm take less memory than in training.
        if not any(cell.training for _, cell in network.cells_and_names()):
            self.step.set_train()

    def run(self) -> None:
        """Train windows of one batch until the optimizer has run twice."""
        updates = 0
        for _ in range(_MOST_WINDOWS):
            output = self.step(*self.inputs)
            flushed = self.step.flush()  # With accumulation_steps the window is still open.
            updates += (output if flushed is None else flushed).is_updated
            if updates == _UPDATES:
                return


class FewMicroBatches(GradAccumulation):
    """Split a batch whole, and train with only the first and the last micro batches.

    The others have the same shapes and reuse the same memory. All of them exist, as in training: where rows are
    copied, that takes as much as the batch.
    """

    def split(self, *inputs: object) -> SplitBatch:
        """Return a few of the micro batches of one batch; the larger ones come first, the smaller ones last."""
        batch = self.whole = super().split(*inputs)
        # A loss of the whole batch takes the memory of all its rows.
        if self.is_cached or len(batch.micro_batches) <= 2 * _ENDS:
            return batch
        return SplitBatch(batch.structure, [*batch.micro_batches[:_ENDS], *batch.micro_batches[-_ENDS:]])
