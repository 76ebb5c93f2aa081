"""The interface of a training step, whoever drives its windows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from mindspore import nn

from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput


class Step(nn.Cell):
    """The body of a `TrainOneStepCell`, with one interface for all kinds. In this class, each call ends its window."""

    accumulation_steps = 1  # The largest number of batches of a window.
    has_claims = True  # False once a later step was built with the same optimizer.
    reducers: Sequence[GradientReducer] = ()

    def __init__(self, network: nn.Cell, settings: StepSettings) -> None:
        super().__init__(auto_prefix=False)
        self.owner = settings.owner
        self.network = network
        self.settings = settings
        self.events = Events(settings.owner)
        self.loss_scale = settings.precision.loss_scale

    def steps_of_window(self) -> int:
        """Return the number of batches of the open window, or of the next one."""
        return self.accumulation_steps

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        """Return the compiled cells, each with its own mode and settings."""
        return []

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context for the compilation of the whole step as one graph."""
        return nullcontext()

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., Tensors]) -> StepOutput:
        """Train one batch. ``as_graph`` runs the step as one graph, from its outermost cell on."""
        raise NotImplementedError

    def join(self) -> StepOutput:
        """Count a batch of the window without local data."""
        raise NotImplementedError

    def check_in_graph(self) -> None:
        """Raise if the step cannot be part of a larger graph."""
        length = self.settings.window_length
        if not length.is_fixed:
            raise ValueError(
                f"For '{self.owner}', the argument 'accumulation_steps' must be a number in a "
                f"larger graph and in data sink mode, but got {length.as_text()}. Call the step "
                f"from Python, or give dataset_sink_mode=False."
            )

    def measure_loss(self, batch: Args) -> None:
        """Measure the loss of a batch that a larger graph will train."""

    def check_between_batches(self, caller: str) -> None:
        """Raise if a method or a function that needs whole batches is called inside one."""

    def open_batches(self) -> int:
        return 0

    def flush(self) -> StepOutput | None:
        return None

    def drop(self) -> int:
        return 0
