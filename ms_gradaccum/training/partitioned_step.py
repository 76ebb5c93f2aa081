"""The body of a training step in semi-auto-parallel, which the compiler partitions over the devices as a whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mindspore import Parameter, Tensor, nn

from ms_gradaccum.backend.compiled import graph_mode
from ms_gradaccum.parallel.factory import check_noise_scale
from ms_gradaccum.parallel.partitioned import PartitionedWindow
from ms_gradaccum.parallel.semi_auto import SemiAuto, check_compiling
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput


class PartitionedStep(nn.Cell):
    """One batch, one window, one update. It has the methods of a HostDrivenStep.

    Args:
        network: The GradAccumulation.
        optimizer: Its optimizer.
        kind: The compiler's own parallelism, on Ascend and GPU.
        settings: What the step was told.
        events: Who is told of what happens.
    """

    # No window is ever open between two calls.
    accumulation_steps = 1
    several = False

    def __init__(
        self, network: Any, optimizer: nn.Cell, kind: SemiAuto, settings: StepSettings, events: Events
    ) -> None:
        super().__init__(auto_prefix=False)
        dtype = settings.precision.reduce_dtype
        if settings.notes_squares:
            check_noise_scale(settings.owner, network, kind)
        kind.check(settings.accumulation_steps, network, optimizer, settings.drops, settings.clip, dtype)
        self.network = network
        self.optimizers = [optimizer]
        self.reducers: list[Any] = []
        self.semi_auto = kind
        self.events = events
        self.loss_scale = settings.precision.loss_scale
        self.partitioned = PartitionedWindow(network, optimizer, settings.clip, self.loss_scale)

    @property
    def window(self) -> "PartitionedStep":
        """What a state is taken of."""
        return self

    def attach_to(self, step: nn.Cell) -> None:
        """Let ``step`` be compiled for training, in which alone the compiler knows accumulation.

        The user's cells keep the modes that they have.
        """
        step.add_flags(training=True)

    def saved(self, parameter: Parameter) -> Parameter:
        """Return what a checkpoint holds for ``parameter``: MindSpore knows its layout."""
        return parameter

    def compiled_cells(self) -> list[Any]:
        """Return what has a mode and settings of its own."""
        return []

    def compiling(self) -> AbstractContextManager[None]:
        """Enclose the compilation of the whole step."""
        return self.semi_auto.compiling()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], as_graph: Callable[..., Any]) -> StepOutput:
        """Run ``as_graph``, which is this step from its outermost cell on, with one batch."""
        self.events.update_begin()
        with graph_mode():
            output = StepOutput(*as_graph(*self.network.positional(args, kwargs)))
        if self.events.heard:  # Else nothing waits for the device.
            self.events.update_end(output)
        return output

    def open_batches(self) -> int:
        """Return 0: each call ends its window."""
        return 0

    def flush(self) -> None:
        """Return None: there is no unfinished window."""
        return None

    def drop(self) -> int:
        """Return 0: there is no unfinished window."""
        return 0

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The whole window as one graph. Return the items of a StepOutput."""
        check_compiling(True)
        output: tuple[Tensor, ...] = self.partitioned(*inputs)
        return output
