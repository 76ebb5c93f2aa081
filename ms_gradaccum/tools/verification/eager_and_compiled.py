"""The same window op by op and compiled, as often as need be, with something changed between two runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from mindspore import nn

from ms_gradaccum.tools.verification.comparison import Run, misfit, norm_of, relative
from ms_gradaccum.tools.verification.experiment import Experiment, Start
from ms_gradaccum.tools.verification.python_reads import PythonReads
from ms_gradaccum.tools.verification.python_state import PythonState
from ms_gradaccum.training.grad_accumulation import GradAccumulation

Change = Callable[[], AbstractContextManager[Any]]


class EagerAndCompiled:
    """Runs of one window op by op and compiled, in PYNATIVE mode, with everything that Python holds as at the start.

    Args:
        network: The loss cell and how its batch is split.
        inputs: The batch, as the loss cell takes it.
        start: Where each run begins.
        reads: The code of the network, and the spaces that it reads.
        state: What these hold, which is given back before each run.
        rtol: What differs by less is equal.
    """

    def __init__(
        self,
        network: GradAccumulation,
        inputs: tuple[Any, ...],
        start: Start,
        reads: PythonReads,
        state: PythonState,
        rtol: float,
    ) -> None:
        self.start, self.reads, self.state, self.rtol = start, reads, state, rtol
        # Their masks cannot be brought back, and both ways draw them anew.
        self.dropouts = [cell for cell in reads.cells.values() if _is_dropout(cell)]
        self.eager = Experiment(network, inputs, None, start, self.dropouts)
        self.compiled = Experiment(network, inputs, None, start, self.dropouts, compiles=True)
        # What the first micro batch gives as things are, once it is known.
        self.bases: tuple[Run, Run] | None = None

    def window(self, experiment: Experiment) -> Run:
        """Run the window."""
        self.state.restore()
        return experiment.window()

    def part(self, experiment: Experiment, change: Change = nullcontext) -> Run:
        """Run the first micro batch, with something changed if need be."""
        self.state.restore()
        with change():
            return experiment.micro_batch(0)

    def ignores(self, change: Change) -> bool:
        """Whether a change changes the eager run, and not the compiled one in the same way."""
        eager_base, compiled_base = self.bases or (self.part(self.eager), self.part(self.compiled))
        self.bases = eager_base, compiled_base
        try:
            eager = self.part(self.eager, change)
            if self.same(eager, eager_base):
                return False
            compiled = self.part(self.compiled, change)
        except Exception:  # The network does not take the other value.
            return False
        if self.same(compiled, compiled_base):
            return True
        return self.same(eager_base, compiled_base) and not self.same(eager, compiled)

    def same(self, one: Run, other: Run) -> bool:
        """Whether loss, gradients and state of two runs are equal."""
        sizes = [misfit(one, other), *self.state_misfits(one, other).values()]
        return all(size <= self.rtol for size in sizes)

    def state_misfits(self, one: Run, other: Run) -> dict[str, float]:
        """Return by how much the parameters differ that a run itself changes."""
        found = {}
        for place in sorted({*one.state, *other.state}):
            a, b = (run.state.get(place, self.start.values[place]).astype(np.float64) for run in (one, other))
            found[self.start.parameters[place].name] = relative(norm_of(a - b), max(norm_of(a), norm_of(b)))
        return found

    @contextmanager
    def frozen(self, cells: Sequence[nn.Cell]) -> Iterator[None]:
        """Run with these cells in evaluation mode, and no others."""
        experiments = self.eager, self.compiled
        before = [experiment.frozen for experiment in experiments]
        try:
            for experiment in experiments:
                experiment.frozen = list(cells)
            yield
        finally:
            for experiment, own in zip(experiments, before):
                experiment.frozen = own


def _is_dropout(cell: nn.Cell) -> bool:
    bases = type(cell).__mro__
    return any(base.__module__.startswith("mindspore.") and "Dropout" in base.__name__ for base in bases)
