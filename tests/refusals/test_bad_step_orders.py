"""TrainOneStepCell called in any order, beside a model of one weight, with callbacks that raise."""

import warnings

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from linear_toy import line, sgd
from mindspore import nn, ops
from modelled_window import ROWS, ROWS_OF_TWO, Modelled
from step_probe import changed, values_of
from strategies import batch_of, examples, refusal

from ms_gradaccum import GradAccumulation, TrainOneStepCell


class Stumbling:
    """A callback that raises at one of the events of a step, once."""

    at = None

    def on_micro_batch_begin(self, event):
        self.stumble(("micro_batch", event.micro_batch))

    def on_update_begin(self, event):
        self.stumble("update")

    def stumble(self, place):
        if self.at == place:
            self.at = None
            raise OSError("no more storage")


ONE, TWO = batch_of(1), batch_of(1, 2)
# None, not a tensor, one input, three inputs, rows that disagree, no rows.
BAD_BATCHES = [(), (None, None), ONE[:1], (*ONE, ONE[0]), (ONE[0], TWO[1]), batch_of()]


class StepOrders(Modelled):
    """TrainOneStepCell, two micro batches to a batch."""

    built = []

    @initialize(steps=st.integers(1, 3))
    def build(self, steps):
        if not self.built:  # Compiled once: neither the weight nor the length of a window is in a graph.
            network = line()
            step = TrainOneStepCell(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2), sgd(network))
            callback = Stumbling()
            step.add_callback(callback)
            self.built[:] = network, step, callback
        self.network, self.step, self.callback = self.built
        self.step.body.accumulation_steps = self.steps = steps
        self.step.body.buffer.clear()
        self.network.weight.set_data(ops.zeros_like(self.network.weight))
        self.step.optimizer.global_step.set_data(ops.zeros_like(self.step.optimizer.global_step))
        events = self.step.events
        events.batches = events.updates = events.skipped_updates = events.micro_batches = events._before_window = 0
        self.count = self.micro_batches = 0
        self.begin_model()

    def numbers(self):
        return values_of(self.step) | {"events": np.array([self.step.events.micro_batches, self.step.open_batches()])}

    @rule(rows=ROWS)
    def call(self, rows):
        output = self.step(*batch_of(*rows))
        self.add_rows(rows)
        self.batches += 1
        self.micro_batches += min(2, len(rows))
        self.count = (self.count + 1) % self.steps
        assert output.updated.asnumpy() == (self.update() if self.count == 0 else False)

    @rule()
    def flush(self):
        output = self.step.flush()
        if self.count == 0:
            assert output is None
        else:
            assert bool(output.updated.asnumpy()) == self.update()
            self.count = 0

    @rule()
    def drop(self):
        assert self.step.drop() == self.count
        self.throw_away()
        self.count = 0

    @rule(bad=st.sampled_from(BAD_BATCHES))
    def bad_batch(self, bad):
        before = self.numbers()
        assert refusal(self.step, *bad) is not None
        assert not changed(before, self.numbers())

    @rule(rows=ROWS_OF_TWO, micro_batch=st.integers(0, 1))
    def fail_in_a_micro_batch(self, rows, micro_batch):
        before = self.numbers()
        self.callback.at = ("micro_batch", micro_batch)
        with warnings.catch_warnings(record=True) as caught, pytest.raises(OSError):
            warnings.simplefilter("always")
            self.step(*batch_of(*rows))
        # The first micro batch cannot be taken out of the sums again.
        lost = micro_batch == 1 and self.count > 0
        assert [str(each.message).startswith("For 'TrainOneStepCell', the batch failed") for each in caught] == [
            True
        ] * lost
        if micro_batch == 0:
            assert not changed(before, self.numbers())
        else:
            self.throw_away()
            self.count = 0

    @rule(rows=ROWS)
    def fail_before_the_update(self, rows):
        if self.count + 1 < self.steps:
            return
        self.callback.at = "update"
        with pytest.raises(OSError):
            self.step(*batch_of(*rows))
        self.batches += 1
        self.micro_batches += min(2, len(rows))
        self.throw_away()
        self.count = 0

    @invariant()
    def is_as_modelled(self):
        if not hasattr(self, "step"):
            return
        self.compare(self.network, self.step.body.buffer, self.step.events)
        assert self.step.open_batches() == self.count
        assert self.step.events.micro_batches == self.micro_batches


TestStepOrders = StepOrders.TestCase
TestStepOrders.settings = examples(20, stateful_step_count=25)
