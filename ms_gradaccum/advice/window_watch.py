"""Checks of the first windows: what a loop changes between their batches, or does to each of their gradients."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, nn

from ms_gradaccum._checks import listed, warn
from ms_gradaccum.backend.arrays import Array, few_elements
from ms_gradaccum.backend.optimizers import settable_rates
from ms_gradaccum.gradients.buffer import BatchCount

# The number of windows that are checked: it takes reads from the device.
WATCHED_WINDOWS = 4
# The number of batches of a window between which its parameters are compared.
_WATCHED_BATCHES = 8
# A parameter that was changed and restored may differ by this share of its largest value.
_RESTORED = 1e-5


class WindowWatch:
    """Warn of changes between the batches of the first windows: their gradient would be that of no one network."""

    is_on = True  # False after the first windows, or after a warning.

    def __init__(
        self, owner: str, network: nn.Cell | None, optimizers: Sequence[nn.Cell], count: BatchCount
    ) -> None:
        self.owner = owner
        # None if its parameters are shards that the forward pass makes whole.
        self.network = network
        self.optimizers = optimizers
        self.count = count
        self.foreign_writes = 0  # Those of the `BatchCount` at the last batch.
        self.windows = 0  # The number of full windows.
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        # The learning rates at each of its batches.
        self.rates: list[list[float]] = []
        # Elements of the parameters after the last batch.
        self.values: list[tuple[Parameter, Array]] = []
        # The names of the parameters that have changed between batches.
        self.moved: list[str] = []

    def begin_batch(self) -> None:
        """Look for what has changed since the batch before in the same window."""
        if self.count.foreign_writes != self.foreign_writes:
            # A loaded checkpoint has the parameters and the sums of another window.
            self.restart()
            self.foreign_writes = self.count.foreign_writes
        if not self.moved:
            for parameter, before in self.values:
                if _differ(before, few_elements(parameter)):
                    self.moved.append(repr(parameter.name))
        self.rates.append(settable_rates(self.optimizers))

    def end_batch(self, is_last: bool = False) -> None:
        """Record the parameters after a batch, which may change some itself. The next batch must begin with them."""
        self.values = []
        if is_last or self.network is None or len(self.rates) >= _WATCHED_BATCHES:
            return
        for parameter in self.network.get_parameters():
            self.values.append((parameter, few_elements(parameter).copy()))

    def end_window(self) -> None:
        """Warn if the learning rate, or a parameter of the network, has changed between the batches of the window."""
        self.windows += 1
        rate_moved = any(rates != self.rates[0] for rates in self.rates)
        self.is_on = self.windows < WATCHED_WINDOWS and not (rate_moved or self.moved)
        if rate_moved:
            warn(
                f"For '{self.owner}', the learning rate has changed inside a window, and the "
                f"update uses only the last one. Move it once per update: "
                f"accumulator.prepare(scheduler), or where updated is true."
            )
        if self.moved:
            warn(
                f"For '{self.owner}', the gradient of this window mixes two models: the loop or "
                f"another step has changed {listed(self.moved, 3)} inside it. Change parameters "
                f"only after an update; with several networks split whole batches, with "
                f"GradAccumulation(network, micro_size), or take all gradients before the updates."
            )


def _differ(before: Array, now: Array) -> bool:
    change = np.abs(np.subtract(now, before, dtype=np.complex128)).max(initial=0.0)
    size = np.abs(before).max(initial=0.0)
    return float(change) > _RESTORED * float(size)
