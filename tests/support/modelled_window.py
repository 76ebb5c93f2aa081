"""A window of the linear toy in NumPy, for machines that call a training step in any order and compare."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from ms_gradaccum import TrainingPlan

RATE = 0.02
# Small enough for a weight that does not run away; a NaN spoils its window.
ROWS = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, np.nan]), min_size=1, max_size=3)
ROWS_OF_TWO = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, np.nan]), min_size=2, max_size=3)


class Modelled(RuleBasedStateMachine):
    """One weight of y = weight * x, and the gradient and the weight of its open window."""

    def begin_model(self):
        self.weight, self.grad, self.total = 0.0, 0.0, 0.0
        self.updates = self.skipped = self.batches = 0

    def add(self, grad, weight):
        """Add a mean gradient that counts for so much; one that counts for nothing is not looked at."""
        self.grad += grad * weight if weight else 0.0
        self.total += weight

    def add_rows(self, rows):
        x = np.array(rows, np.float64)
        self.add(np.mean(2 * x * x * (self.weight - 2)), len(rows))

    def update(self, limit=None):
        """End the window; return whether it made an update."""
        mean = self.grad / self.total if self.total else np.nan
        self.grad = self.total = 0.0
        updated = bool(np.isfinite(mean))
        if updated:
            factor = 1.0 if limit is None or abs(mean) <= limit else limit / abs(mean)
            self.weight -= RATE * factor * mean
        self.updates += updated
        self.skipped += not updated
        return updated

    def throw_away(self):
        self.grad = self.total = 0.0

    def compare(self, network, buffer, events):
        np.testing.assert_allclose(network.weight.asnumpy().item(), self.weight, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(buffer.sums[0].asnumpy().item(), self.grad, rtol=1e-4, atol=1e-3)
        assert buffer.weight.asnumpy() == self.total
        assert (events.batches, events.updates, events.skipped_updates) == (self.batches, self.updates, self.skipped)


def plan(**settings):
    return TrainingPlan(**{"dataset_size": 100, "batch_size": 8, "epochs": 1, **settings})
