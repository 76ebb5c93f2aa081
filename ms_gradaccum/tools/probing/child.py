"""The child process: it builds a training, trains two windows and writes what it has measured into a file."""

import json
import os
import re
import resource
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import return_memory
from ms_gradaccum.batch.nested_inputs import as_call
from ms_gradaccum.batch.split import SplitBatch, split_batch
from ms_gradaccum.parallel.semi_auto import is_semi_auto
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import depend_on
from ms_gradaccum.training.grad_accumulation import GradAccumulation, as_grad_accumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

OWNER = "find_micro_size"
# Set in the environment of each child, which must not measure in turn.
IN_CHILD = "MS_GRADACCUM_PROBE"

# After the second update the optimizer has all its state. A loss scale that starts too high skips some windows.
_UPDATES, _MOST_WINDOWS = 2, 20
# How many micro batches stand for all at either end: the second one reuses the memory of the first one.
_ENDS = 2
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad_alloc|memory (is not|isn't|not) enough|unable to allocate"
    r"|alloc\w* [^\n]*memory[^\n]* fail|memory [^\n]*alloc\w* fail",
    re.IGNORECASE,
)


def main() -> None:
    """Measure the training of the arguments: a Builder as JSON, micro_size, a folder for the facts, the parent."""
    text, micro_size, place, parent = sys.argv[1:]
    builder, folder = Builder(*json.loads(text)), Path(place)
    depend_on(int(parent))
    # The system ends this process first when it has no memory, and no image of it stays behind.
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    facts: dict[str, Any] = {}

    def tell(**more: Any) -> None:
        facts.update(more)
        (folder / "partial").write_text(json.dumps(facts))
        (folder / "partial").rename(folder / "facts")

    try:
        training = Training.of(builder.call(), int(micro_size))
        on_host = ms.get_context("device_target") == "CPU"
        # Building has left gaps, which the training would fill first.
        return_memory()
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts from the memory of now.
        loaded = memory_of("self", "VmRSS") if on_host else ms.runtime.memory_allocated()
        tell(rows=training.rows(), loaded=loaded, on_host=on_host)
        training.run()
        tell(peak=memory_of("self", "VmHWM") if on_host else ms.runtime.max_memory_allocated())
    except BaseException as error:
        report = {"error": [type(error).__name__, str(error)], "traceback": traceback.format_exc()}
        tell(**report, out_of_memory=is_out_of_memory(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Nothing is left to clean up.


def memory_of(process: int | str, key: str) -> int:
    """Return the bytes of resident memory of a process now (VmRSS) or at most (VmHWM); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was missing. MindSpore words it differently for each device."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and died_of_memory(str(error)))


def died_of_memory(last_words: str) -> bool:
    """Return whether the last output of a process says that memory was missing."""
    return _OUT_OF_MEMORY.search(last_words) is not None


class Training(NamedTuple):
    """A training step and its batch."""

    step: TrainOneStepCell
    inputs: tuple[Any, ...]

    @staticmethod
    def of(made: Any, micro_size: int) -> "Training":
        """Return the training of what a function has built, with so many micro batches, or raise."""
        if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance((*made, {})[3], dict):
            rule = "a function that returns (network, optimizer, batch) or (network, optimizer, batch, dict)"
            got = f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
            raise TypeError(argument_error(OWNER, "build", rule, got, "The dict has settings of TrainOneStepCell."))
        network, optimizer, batch, settings = (*made, {})[:4]
        if isinstance(network, ms.nn.Cell) and is_semi_auto(network):
            rule, got = (
                "a loss cell of one process",
                "one that the compiler partitions, which one process cannot measure",
            )
            raise ValueError(argument_error(OWNER, "network", rule, got, "Give the cell inside."))
        network = as_grad_accumulation(OWNER, network)
        args, kwargs = as_call(OWNER, batch)
        inputs = network.positional(args, kwargs)
        network.bind(inputs, {})
        step = TrainOneStepCell(FewMicroBatches.like(network, micro_size), optimizer, **settings)
        # In evaluation mode, in which cells are made, Dropout and BatchNorm take less memory than in training.
        if not any(cell.training for _, cell in network.network.cells_and_names()):
            step.set_train()
        return Training(step, inputs)

    def rows(self) -> int:
        """Return the rows of the batch."""
        return split_batch(self.inputs, 1, self.step.network.batch_axis).micro_batches[0].rows

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

    @staticmethod
    def like(whole: GradAccumulation, micro_size: int) -> GradAccumulation:
        """Return a cell with the settings of another one, but for its number of micro batches."""
        settings: dict[str, Any] = {"weighted": whole.weighted, "losses": whole.losses}
        return FewMicroBatches(whole.network, micro_size, batch_axis=whole.batch_axis, **settings)

    def split(self, *args: Any, **kwargs: Any) -> SplitBatch:
        """Return a few of the micro batches of one batch; the larger ones come first, the smaller ones last."""
        batch = self.whole = super().split(*args, **kwargs)
        # A loss of the whole batch takes the memory of all its rows.
        if self.is_cached or len(batch.micro_batches) <= 2 * _ENDS:
            return batch
        return SplitBatch(batch.structure, [*batch.micro_batches[:_ENDS], *batch.micro_batches[-_ENDS:]])
