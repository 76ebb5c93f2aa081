"""Checks of the first windows: what a loop changes between their batches, or does to each of their gradients."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import listed, warn
from ms_gradaccum.backend.optimizers import settable_rates
from ms_gradaccum.backend.snapshot import Array, as_array, few_elements
from ms_gradaccum.gradients.buffer import BatchCount

# The number of windows that are checked: it takes reads from the device.
WATCHED_WINDOWS = 4
# The number of batches of a window between which its parameters are compared.
_WATCHED_BATCHES = 8
# A parameter that was changed and restored may differ by this share of its largest value.
_RESTORED = 1e-5
# The norms of the first _SEEN_NORMS gradients from the caller are compared, which are copied from the device for that.
# Gradients of fewer or of more elements are not looked at: a few signs have one norm, too.
_SEEN_NORMS, _FEWEST, _MOST = 4, 8, 2**24
# Relative differences: norms that differ by less are the same, and gradients whose sums differ by more are not.
_SAME, _OTHER = 1e-6, 1e-3


class WindowWatch:
    """Warn of changes between the batches of the first windows: their gradient would be that of no one network."""

    is_on = True  # False after the first windows, or after a warning.

    def __init__(self, owner: str, network: nn.Cell | None, optimizers: Sequence[nn.Cell], count: BatchCount) -> None:
        # There is no ``network`` if its parameters are shards that the forward pass makes whole.
        self.owner, self.network, self.optimizers, self.count = owner, network, optimizers, count
        self.writes = 0  # `BatchCount.writes` at the last batch.
        self.norms: list[tuple[float, float]] = []
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        # The learning rates at each of its batches, elements of the parameters after the last batch, and the names of
        # the parameters that have changed between batches.
        self.rates: list[list[float]] = []
        self.values: list[tuple[Parameter, Array]] = []
        self.moved: list[str] = []

    def begin_batch(self) -> None:
        """Look for what has changed since the batch before in the same window."""
        if self.count.writes != self.writes:  # A loaded checkpoint has the parameters and the sums of another window.
            self.restart()
            self.writes = self.count.writes
        if not self.moved:
            self.moved = [repr(each.name) for each, before in self.values if _differ(before, few_elements(each))]
        self.rates.append(settable_rates(self.optimizers))

    def end_batch(self, is_last: bool = False) -> None:
        """Record the parameters after a batch, which may change some itself. The next batch must begin with them."""
        network = None if is_last or len(self.rates) >= _WATCHED_BATCHES else self.network
        parameters = [] if network is None else network.trainable_params()
        self.values = [(each, few_elements(each).copy()) for each in parameters]

    def end_window(self, is_last: bool) -> None:
        """Warn if the learning rate, or a parameter of the network, has changed between the batches of the window."""
        rate_moved = any(rates != self.rates[0] for rates in self.rates)
        self.is_on = not (is_last or rate_moved or self.moved)
        if rate_moved:
            warn(
                f"For '{self.owner}', the learning rate has changed between the batches of a window, but an update has "
                f"one rate, the last. Move it once per update: accumulator.prepare(scheduler), or where updated is "
                f"true."
            )
        if self.moved:
            warn(
                f"For '{self.owner}', the parameters of the network must stay as they are in a window, but the loop or "
                f"another step has changed {listed(self.moved, 3)} in it, so that its gradient is a mixture. Change "
                f"them where updated is true; of several networks split whole batches, with GradAccumulation(network, "
                f"micro_size), or take all gradients before the updates."
            )

    def note_gradients(self, grads: Sequence[Tensor]) -> None:
        """Warn if three of the first gradients differ but have one norm, which means that each batch was clipped."""
        if len(self.norms) == _SEEN_NORMS or not _FEWEST <= sum(each.size for each in grads) <= _MOST:
            return
        arrays = [as_array(each) for each in grads]
        norm = math.sqrt(sum(float(np.square(each, dtype=np.float64).sum()) for each in arrays))
        total = float(sum(each.sum(dtype=np.float64) for each in arrays))
        alike = [known for other, known in self.norms if abs(norm - other) <= _SAME * norm]
        self.norms.append((norm, total))
        if len(alike) != 2 or any(abs(a - b) <= _OTHER * norm for a, b in itertools.combinations([total, *alike], 2)):
            return
        sizes = np.abs(np.concatenate([each[each != 0.0] for each in arrays]))
        if sizes.max() > sizes.min():  # Signs have one norm, too.
            warn(
                f"For '{self.owner}', the gradients of a batch should be given as they are, but different ones have "
                f"the norm {norm:.3g}, as if each was clipped. An update clips their mean: give the Accumulator "
                f"clip=ClipByGlobalNorm({norm:.3g}) in place of your own clip."
            )


def _differ(before: Array, now: Array) -> bool:
    return float(np.abs(now - before).max(initial=0.0)) > _RESTORED * float(np.abs(before).max(initial=0.0))
