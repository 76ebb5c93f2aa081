"""The body of a training step whose micro batches Python runs one by one, on all devices and in all modes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum.parallel.semi_auto import check_compiling
from ms_gradaccum.parallel.world import gather_counts
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window import Window

# Device matrix, tensor map, slice shape, field size, uniform split, shard group, shapes before and after a reshape.
_ANY_LAYOUT = [[], [-1], [], 0, True, "", [], []]


class HostDrivenStep(nn.Cell):
    """One call per batch, one update per window of batches. Inside a larger graph it is part of that graph.

    Args:
        network: The GradAccumulation.
        optimizer: Its optimizer.
        kind: The kind of parallelism, or None for one process.
        settings: What the step was told.
        events: Who is told of what happens.
    """

    def __init__(self, network: Any, optimizer: nn.Cell, kind: Any, settings: StepSettings, events: Events) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.events = events
        self.accumulation_steps = settings.accumulation_steps
        self.window = Window(network, [optimizer], kind, settings, {"micro_size": network.micro_size})
        self.window.events = events
        network.adds_batches = self.accumulation_steps > 1 or self.window.several
        # As parts of a larger graph.
        (self.reducer,), (self.end,) = self.window.reducers, self.window.ends
        self.buffer = self.reducer.buffer
        self.loss_scale = settings.precision.loss_scale
        self.micro_step = self.window.micro_steps.cell

    def attach_to(self, step: nn.Cell) -> None:
        """Let MindSpore's saving, which asks ``step`` for the whole of a parameter, know how to gather one."""
        step.parameter_layout_dict = dict.fromkeys(self.reducer.gathers, _ANY_LAYOUT)
        step.parallel_parameter_merge_net_dict = self.reducer.gathers

    def saved(self, parameter: Parameter) -> Parameter | None:
        """Return what a checkpoint holds for ``parameter``; None for nothing."""
        return self.reducer.saved(parameter)

    def compiled_cells(self) -> list[Any]:
        """Return what has a mode and settings of its own."""
        return self.window.compiled_cells()

    def compiling(self) -> AbstractContextManager[None]:
        """Enclose the compilation of the whole window as one graph."""
        return nullcontext()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], as_graph: Callable[..., Any]) -> StepOutput:
        """Add one batch, and end the window if it is the last one."""
        batches = self.open_batches()
        # Whether the last micro batch of the window adds up the sums over the ranks.
        reduces = self.reducer.overlaps and batches + 1 == self.accumulation_steps
        try:
            self.window.add(args, kwargs, reduces)
        except BaseException:
            self.events.batches -= 1
            raise
        return self._end_batch(batches, reduces)

    def join(self) -> StepOutput:
        """Count a batch of the window to which this process adds nothing."""
        self.window.join()
        return self._end_batch(self.open_batches())

    def _end_batch(self, batches: int, reduced: bool = False) -> StepOutput:
        """Count a batch after so many, and end the window if it is the last one."""
        if batches + 1 == self.accumulation_steps:
            return self._close(reduced)
        self.window.set_count(batches + 1)
        return self.window.so_far()

    def _close(self, reduced: bool = False) -> StepOutput:
        try:
            self.events.update_begin()
        except BaseException:
            # As after a failure in the update itself: its rows would be in the next window too.
            self.window.discard()
            raise
        output = self.window.close(reduced)
        self.events.update_end(output)
        return output

    def open_batches(self) -> int:
        """Return the number of batches in the unfinished window; 0 right after an update."""
        return 0 if self.accumulation_steps == 1 else self.window.count()

    def flush(self) -> StepOutput | None:
        """Apply an unfinished window, divided by its true weight. Return None if no process has one."""
        batches = self.open_batches()
        if (max(gather_counts(batches)) if self.window.several else batches) == 0:
            return None
        output = self._close()
        return output if output.updated.asnumpy() or output.overflow.asnumpy() else None

    def drop(self) -> int:
        """Throw an unfinished window away and return the number of batches that it had."""
        batches = self.open_batches()
        if batches:
            self.window.discard()
        return batches

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The whole window as part of one graph. Return the items of a StepOutput."""
        check_compiling(False)
        parts = self.network.split_in_graph(inputs)
        batch_rows = Tensor(0.0, ms.float32)
        for part in parts:
            batch_rows = batch_rows + part[0]
        done = Tensor(0.0, ms.float32)
        for part in parts:
            share, factor = self.micro_step.share_and_factor(part[0], batch_rows)
            done = ops.depend(self.micro_step(share, factor, *part[1:])[2], done)
        if self.accumulation_steps == 1:
            output: tuple[Tensor, ...] = self.end(done)
            return output
        # The counter includes this batch, so that the update is made at the last batch of the window.
        batches = self.buffer.count_batch()
        if batches == self.accumulation_steps:
            output = self.end(done)
        else:
            output = self.end.open(done)
        return output
