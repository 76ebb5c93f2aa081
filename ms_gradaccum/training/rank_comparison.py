"""The comparison of the ranks of a training: their first inputs, learning rates and parameters."""

from collections.abc import Sequence

from mindspore import nn

from ms_gradaccum.advice.advisor import SilentAdvisor
from ms_gradaccum.advice.rank_inputs import NO_INPUT, FirstInput
from ms_gradaccum.backend.optimizers import settable_rates
from ms_gradaccum.batch.split import Flattened
from ms_gradaccum.parallel.reducer import GradientReducer, shared_by
from ms_gradaccum.parallel.world import RanksDiffer, digest, gather_values, unlike_first
from ms_gradaccum.training.events import Events


class RankComparison:
    """The comparison of this rank with the others, which all must make at the same time.

    One process has nothing to compare: its callers ask `is_on` first.
    """

    # This rank's first batch or gradients since the last comparison.
    first: FirstInput | None = None
    ended = 0  # The number of ended windows.

    def __init__(
        self,
        owner: str,
        optimizers: Sequence[nn.Cell],
        reducers: Sequence[GradientReducer],
        events: Events,
        advisor: SilentAdvisor,
    ) -> None:
        self.owner = owner
        self.is_on = reducers[0].is_distributed
        self.optimizers = optimizers
        self.reducers = reducers
        self.events = events
        self.advisor = advisor

    def note_first(self, what: str, inputs: object) -> None:
        """Record the first batch or gradients of this rank."""
        if self.first is not None:
            return
        tensors = Flattened((inputs,)).tensors
        self.first = FirstInput(what, digest(tensors)) if tensors else NO_INPUT

    def end_window(self) -> None:
        """Compare in windows 1, 2, 4, 8 and so on."""
        self.ended += 1
        if self.ended.bit_count() == 1:
            self.compare()

    def compare(self) -> None:
        """Raise if learning rates, parameters or averages differ. Collective: all ranks must call it."""
        alike = {
            "averages (EMA)": sorted(extra.agreed() for extra in self.events.extras),
            "learning rate": settable_rates(self.optimizers),
            "parameters": digest(shared_by(self.reducers), sampled=True),
        }
        everyone = gather_values("ends a window", [self.first or NO_INPUT, alike])
        self.first = NO_INPUT
        self.advisor.after_first_inputs([FirstInput(*first) for first, _ in everyone])
        for what in alike:
            ranks = unlike_first([its[what] for _, its in everyone])
            if ranks:
                raise RanksDiffer(
                    f"For '{self.owner}', the ranks must have the same {what} in an update, but "
                    f"ranks {ranks} differ from rank 0. Give all optimizers the same numbers; load "
                    f"a checkpoint, add an EMA, step a scheduler and change parameters on all "
                    f"ranks or on none."
                )
