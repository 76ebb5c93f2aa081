"""Warnings of the first batch: what the network does otherwise in micro batches, and fewer rows than these."""

import logging
from collections.abc import Sequence

from mindspore import Parameter, nn

from ms_gradaccum._checks import counted, warn
from ms_gradaccum.advice.network_modes import warn_custom_backward, warn_of_modes
from ms_gradaccum.backend.device import warn_of_slow_convolutions
from ms_gradaccum.backend.network_code import has_backward_hook
from ms_gradaccum.batch.split import SplitBatch
from ms_gradaccum.parallel.factory import warn_of_reductions
from ms_gradaccum.parallel.reducer import GradientReducer

_LOGGER = logging.getLogger("ms_gradaccum")


class FirstBatches:
    """Warn of a network and of its first inputs, and later of hooks that come only then."""

    has_begun = False  # True once a batch was seen.
    # The largest number of hooks in the backward pass so far; -1 before the first batch.
    num_hooks = -1

    def __init__(
        self,
        owner: str,
        network: nn.Cell,
        parameters: Sequence[Parameter],
        reducer: GradientReducer,
        adds_batches: bool,
    ) -> None:
        self.owner = owner
        self.network = network
        self.parameters = parameters
        self.reducer = reducer
        self.adds_batches = adds_batches
        self.cells = [cell for _, cell in network.cells_and_names()]
        warn_of_slow_convolutions(owner, network)

    def look(self, split: SplitBatch, is_eager: bool) -> None:
        """Look at a batch."""
        is_first = not self.has_begun
        if is_eager or is_first:
            self._look_at_hooks()
        if not is_first:
            return
        self.has_begun = True
        warn_of_modes(self.owner, self.network, self.adds_batches)
        if is_eager and not self.reducer.grads_are_reduced:
            _LOGGER.warning(
                "%s: PYNATIVE mode runs the network op by op. Compiled it is often several times "
                "as fast: verify(network, batch, micro_size, compile=True) says whether it then "
                "trains the same.",
                self.owner,
            )
        micro_size = self.network.micro_size or 1
        rows = sum(each.rows for each in split.micro_batches)
        if rows < micro_size:
            warn(
                f"For 'GradAccumulation', micro_size={micro_size} exceeds the "
                f"{counted(rows, 'row')} of the batch, which is split into single rows. It is the "
                f"number of micro batches, not of rows: for an update of several small batches "
                f"give accumulation_steps."
            )

    def look_at_network(self) -> None:
        """Look at a network whose batches nobody sees."""
        warn_of_modes(self.owner, self.network, self.adds_batches)
        self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        """Warn of code in the backward pass at the first batch, and where hooks have come later."""
        if self.reducer.grads_are_reduced:  # Hooks of the network do so.
            return
        hooks = []
        for parameter in self.parameters:
            hooks += parameter.hooks()
        found = len(hooks) + sum(map(has_backward_hook, self.cells))
        if found > self.num_hooks:
            self.num_hooks = found
            warn_custom_backward(self.owner, self.network, self.parameters, self.adds_batches)
            if self.reducer.is_distributed:
                warn_of_reductions(self.owner, "the hook of a parameter", hooks, self.network)
