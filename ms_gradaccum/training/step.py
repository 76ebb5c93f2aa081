"""The body of a training step, which is driven from Python or partitioned by the compiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mindspore import Parameter, Tensor, nn

from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.batch.nested_inputs import Args, Kwargs
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings
from ms_gradaccum.training.step_output import StepOutput


class Step(nn.Cell):
    """The body of a `TrainOneStepCell`, which need not ask which one it has. Here each call ends its window."""

    accumulation_steps = 1
    is_carried = False  # True if a Model leaves windows open at the end of its data.
    has_claims = True  # True if the optimizer belongs to no step that was built later.
    is_unmeasured = False  # True as long as a loss that should be measured has not been.

    def __init__(self, network: nn.Cell, settings: StepSettings) -> None:
        super().__init__(auto_prefix=False)
        self.owner, self.network = settings.owner, network
        self.events = Events(settings.owner)
        self.loss_scale = settings.precision.loss_scale

    def attach_to(self, step: nn.Cell) -> None:
        """Prepare ``step``, the TrainOneStepCell around this one."""
        raise NotImplementedError

    def saved(self, parameter: Parameter) -> Parameter | None:
        """Return the parameter that a checkpoint holds in place of ``parameter``, or None."""
        return parameter

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        """Return the compiled cells, which have a mode and settings of their own."""
        return []

    def compiling(self) -> AbstractContextManager[None]:
        """Enclose the compilation of the whole step as one graph."""
        return nullcontext()

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., tuple[Tensor, ...]]) -> StepOutput:
        """Train one batch. ``as_graph`` runs the step as one graph, from its outermost cell on."""
        raise NotImplementedError

    def join(self) -> StepOutput:
        """Count a batch of the window to which this process adds nothing."""
        raise NotImplementedError

    def measure_loss(self, batch: tuple[object, ...]) -> None:
        """Measure the loss of a batch that a larger graph will train."""

    def open_batches(self) -> int:
        return 0

    def flush(self) -> StepOutput | None:
        return None

    def drop(self) -> int:
        return 0
