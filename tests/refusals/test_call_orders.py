"""Calls in any order: each does what it says, beside a model of one weight, or is refused and changes nothing."""

import warnings
from contextlib import suppress
from tempfile import TemporaryDirectory

import loop_toy
import mindspore as ms
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from linear_toy import X, line, momentum, sgd
from loop_toy import FOUR, batch, toy_loop, updates_of
from mindspore import Tensor, nn, ops
from modelled_window import ROWS, ROWS_OF_TWO, Modelled
from refusal import refuses, warns
from step_probe import LABELS, changed, number, tensors, values_of, with_a_bad_label
from strategies import endless, examples, refusal

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell, load_state, save_state


def test_a_window_is_clipped_in_one_way():
    _, accumulator = toy_loop(1)
    accumulator.backward(*FOUR[0])
    accumulator.clip_grad_norm(2.0)
    accumulator.clip_grad_norm(1.0)
    clip = accumulator.windows[0].last_clip
    with refuses(RuntimeError, "clip_grad_norm() and clip_grad_value()"):
        accumulator.clip_grad_value(1.0)
    # A process that joins clips as this one did.
    assert accumulator.windows[0].last_clip is clip
    assert number(accumulator.step().clipped_grad_norm) == 1


def test_clipping_before_backward_would_clip_by_the_norm_of_another_gradient():
    _, accumulator = toy_loop(2)
    accumulator.backward(*FOUR[0])
    with accumulator.accumulate():
        accumulator.clip_grad_norm(1.0)
        with refuses(RuntimeError, "backward() must come"):
            accumulator.backward(*FOUR[1])
        accumulator.zero_grad()


def classifier_loop(**settings):
    network = nn.Dense(1, 3, "ones", "zeros")
    optimizer = momentum(network, 0.1)
    return optimizer, Accumulator(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, 3, **settings)


def test_a_batch_that_fails_op_by_op_leaves_its_window_as_it_was():
    found = []
    for bad in (False, True):
        optimizer, accumulator = classifier_loop()
        assert updates_of(accumulator, [tensors(X, LABELS)]) == [False]
        if bad:
            with pytest.raises(RuntimeError, match="^For 'GatherD'"):
                updates_of(accumulator, [with_a_bad_label(5)])
        assert updates_of(accumulator, [tensors(X, LABELS)] * 2) == [False, True]
        found.append(optimizer.parameters[0].asnumpy())
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], np.ones_like(found[0]))


def test_a_batch_that_fails_while_it_runs_takes_its_window_with_it():
    optimizer, accumulator = classifier_loop(compile=True)
    start = values_of(optimizer)
    assert updates_of(accumulator, [tensors(X, LABELS)]) == [False]
    with pytest.raises(RuntimeError, match="^For 'GatherD'"), warns("batch failed") as warned:
        updates_of(accumulator, [with_a_bad_label(5)])
    assert warned[0].filename == loop_toy.__file__
    assert accumulator.flush() is None
    assert not changed(start, values_of(optimizer))
    assert updates_of(accumulator, [tensors(X, LABELS)] * 3) == [False, False, True]
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


def test_a_schedule_that_refuses_a_batch_does_not_count_it():
    _, accumulator = toy_loop(schedule=lambda updates: 1 if updates == 0 else "two")
    accumulator.backward(*FOUR[0])
    accumulator.step()
    for _ in range(2):
        with refuses(TypeError, "'schedule(1)'"):
            accumulator.backward(*FOUR[1])
        assert (accumulator.driver.events.batches, accumulator.sync_gradients, accumulator.updated) == (1, True, True)


# What a saved state holds of the model.
STATE = "last_limit weight grad total updates skipped batches count ends updated is_open".split()


class AccumulatorOrders(Modelled):
    """Accumulator in a loop whose author has not read the documentation."""

    @initialize(steps=st.integers(1, 3))
    def build(self, steps):
        self.network, self.accumulator = toy_loop(steps)
        self.steps, self.count, self.limit, self.last_limit = steps, 0, None, None
        self.ends = self.updated = self.is_open = self.has_batch = self.measured = False
        self.context, self.withholding, self.was_open = None, [], False
        self.folder, self.saved = TemporaryDirectory(), None
        self.begin_model()

    def says(self, call, *args, errors=(RuntimeError, TypeError, ValueError), **kwargs):
        """Expect a sentence of ours, and that no number has changed."""
        before = values_of(self.accumulator)
        text = refusal(call, *args, errors=errors, **kwargs)
        assert text is not None and not changed(before, values_of(self.accumulator))

    # What the window does, as docs/loops.md has it.

    def can_begin(self):
        return not (self.ends and self.is_open)

    def begin(self):
        self.count = 1 if self.ends else self.count + 1
        self.has_batch = self.updated = False
        self.batches += 1
        self.ends = self.count >= self.steps and not self.withholding

    def take_back(self):
        self.count -= 1
        self.batches -= 1
        self.ends = False

    def begin_anew(self):
        self.count = 0
        if self.context is not None and not self.has_batch:
            self.count = 1
            self.ends = self.count >= self.steps and not self.withholding

    def close(self):
        self.throw_away()
        self.is_open, self.limit, self.measured = False, None, False

    def step_model(self):
        updated = self.update(self.limit)
        self.close()
        self.updated = self.updated or updated

    def may_add(self):
        """Return whether a batch can be added here; outside accumulate() it begins one."""
        if self.context is None:
            return self.can_begin()
        return not self.has_batch and not self.measured

    def add_batch(self, add):
        if self.context is None:
            self.begin()
        add()
        self.is_open = self.has_batch = True

    @rule(rows=ROWS)
    def backward(self, rows):
        if not self.may_add():
            self.says(self.accumulator.backward, *batch(*rows), errors=RuntimeError)
            return
        loss = self.accumulator.backward(*batch(*rows))
        expected = np.mean(np.square(np.array(rows) * (self.weight - 2)))
        np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-3, atol=1e-4)
        self.add_batch(lambda: self.add_rows(rows))

    @rule(grad=st.sampled_from([1.0, -2.0, np.inf]), weight=st.sampled_from([0, 1, 2.5]))
    def grads(self, grad, weight):
        grads = (Tensor([[grad]], self.network.weight.dtype),)
        if not self.may_add():
            self.says(self.accumulator, grads, weight, errors=RuntimeError)
            return
        output = self.accumulator(grads, weight)
        self.add_batch(lambda: self.add(grad, weight))
        if self.ends:
            self.step_model()
        assert output.updated.asnumpy() == (self.ends and self.updated)

    @rule(bad=st.sampled_from([{"grads": "g"}, {"loss": "l"}, {"grads": (Tensor([1.0]),)}]))
    def wrong_gradients(self, bad):
        self.says(self.accumulator, **{"grads": (Tensor([[1.0]]),), **bad})
        if self.context is None and self.can_begin():
            self.begin(), self.take_back()

    @rule()
    def enter(self):
        context = self.accumulator.accumulate()
        if self.context is not None or not self.can_begin():
            self.says(context.__enter__, errors=RuntimeError)
            return
        self.was_open = self.is_open
        context.__enter__()
        self.begin()
        self.context = context

    @precondition(lambda self: self.context is not None)
    @rule()
    def leave(self):
        self.context.__exit__(None, None, None)
        self.context = None

    @precondition(lambda self: self.context is not None)
    @rule()
    def leave_with_an_error(self):
        with suppress(OSError):
            assert not self.context.__exit__(OSError, OSError(), None)
        if not self.has_batch:
            self.take_back()
        if self.was_open and not self.is_open and not self.ends:
            self.count = 0
        self.context = None

    @precondition(lambda self: len(self.withholding) < 2)
    @rule()
    def withhold(self):
        self.withholding.append(self.accumulator.no_sync())
        self.withholding[-1].__enter__()

    @precondition(lambda self: self.withholding)
    @rule()
    def withhold_no_more(self):
        self.withholding.pop().__exit__(None, None, None)

    @rule(limit=st.sampled_from([0.5, 1e6]))
    def clip(self, limit):
        norm = self.accumulator.clip_grad_norm(limit)
        self.last_limit = limit  # of a flush, too
        full = self.ends and self.is_open
        assert (norm is not None) == full
        if full:
            self.limit, self.measured = limit, True

    @rule()
    def clip_otherwise(self):
        self.says(self.accumulator.clip_grad_norm, 0)
        if self.measured:
            self.says(self.accumulator.clip_grad_value, 1.0, errors=RuntimeError)

    @rule()
    def step(self):
        output = self.accumulator.step()
        assert (output is not None) == self.ends
        if self.ends:
            before = self.updates
            self.step_model()
            assert output.updated.asnumpy() == self.updates - before

    @rule()
    def zero_grad(self):
        self.accumulator.zero_grad()
        if self.ends and self.is_open and (self.has_batch or self.context is None):
            self.close()

    @rule()
    def flush(self):
        output = self.accumulator.flush()
        assert (output is not None) == self.is_open
        if self.is_open:
            self.ends, self.updated, self.limit = True, False, self.last_limit
            self.step_model()
            if self.context is not None and not self.has_batch:
                self.begin_anew()

    @rule()
    def drop(self):
        awaits = self.context is not None and not self.has_batch
        assert self.accumulator.drop() == (self.count - awaits if self.is_open else 0)
        self.close()
        self.ends = False
        self.begin_anew()

    @rule()
    def save(self):
        if self.measured or (self.context is not None and not self.has_batch):
            self.says(save_state, self.accumulator, self.folder.name, errors=RuntimeError)
            return
        save_state(self.accumulator, self.folder.name, keep_checkpoint_max=1)
        self.saved = {name: getattr(self, name) for name in STATE}

    @rule()
    def load(self):
        if self.measured or self.context is not None:
            self.says(load_state, self.accumulator, self.folder.name, errors=RuntimeError)
        elif self.saved is None:
            self.says(load_state, self.accumulator, self.folder.name, errors=ValueError)
        else:
            load_state(self.accumulator, self.folder.name)
            vars(self).update(self.saved)

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()
            # Contexts that are left open would end whenever they are collected, in the loop of the next example.
            if self.context is not None:
                self.leave()
            while self.withholding:
                self.withhold_no_more()

    @invariant()
    def is_as_modelled(self):
        if not hasattr(self, "network"):
            return
        (parallel,) = self.accumulator.windows[0].reducers
        self.compare(self.network, parallel.buffer, self.accumulator.driver.events)
        assert (self.accumulator.sync_gradients, self.accumulator.updated) == (self.ends, self.updated)


TestAccumulatorOrders = AccumulatorOrders.TestCase
TestAccumulatorOrders.settings = examples(20, stateful_step_count=25)


class Stumbling:
    at = None

    def on_micro_batch_begin(self, event):
        self.stumble(("micro_batch", event.micro_batch))

    def on_update_begin(self, event):
        self.stumble("update")

    def stumble(self, place):
        if self.at == place:
            self.at = None
            raise OSError("no more storage")


THREE_X, THREE_Y = batch(1, 2, 3)
BAD = {
    "nothing": (),
    "no tensor": (None, "y"),
    "one input": (THREE_X,),
    "three inputs": (THREE_X, THREE_Y, THREE_Y),
    "rows that disagree": (THREE_X, THREE_Y[:2]),
    "no rows": batch(),
    "no axes": (Tensor(1.0), Tensor(2.0)),
    "one without rows": (THREE_X, np.zeros((0, 1), np.float32)),
    "an array of objects": (np.array([[None]] * 3), THREE_Y),
    "long doubles": (np.ones((3, 1), np.longdouble), THREE_Y),
    "a nest without an end": (THREE_X, endless()),
    "an unknown name": {"data": THREE_X, "target": THREE_Y},
    "a name twice": {"args": (THREE_X,), "data": THREE_X},
}


def call(step, bad):
    if not isinstance(bad, dict):
        return step(*bad)
    return step(*bad.get("args", ()), **{name: value for name, value in bad.items() if name != "args"})


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
        self.step.drop()
        self.step.body.accumulation_steps = self.steps = steps
        self.network.weight.set_data(ops.zeros_like(self.network.weight))
        self.step.optimizer.global_step.set_data(ops.zeros_like(self.step.optimizer.global_step))
        events = self.step.events
        events.batches = events.updates = events.skipped_updates = events.micro_batches = 0
        self.count = self.micro_batches = 0
        self.begin_model()

    def numbers(self):
        return values_of(self.step) | {"events": np.array([self.step.events.micro_batches, self.step.open_batches()])}

    @rule(rows=ROWS)
    def call(self, rows):
        output = self.step(*batch(*rows))
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
            assert output.is_updated == self.update()
            self.count = 0

    @rule()
    def drop(self):
        assert self.step.drop() == self.count
        self.throw_away()
        self.count = 0

    @rule(name=st.sampled_from(sorted(BAD)))
    def bad_batch(self, name):
        before = self.numbers()
        assert refusal(call, self.step, BAD[name]) is not None
        assert not changed(before, self.numbers())

    @rule(rows=ROWS_OF_TWO, micro_batch=st.integers(0, 1))
    def fail_in_a_micro_batch(self, rows, micro_batch):
        before = self.numbers()
        self.callback.at = ("micro_batch", micro_batch)
        with warnings.catch_warnings(record=True) as caught, pytest.raises(OSError):
            warnings.simplefilter("always")
            self.step(*batch(*rows))
        # The first micro batch cannot be taken out of the sums again.
        lost = micro_batch == 1 and self.count > 0
        said = [each for each in caught if "a batch failed" in str(each.message)]
        assert len(said) == lost
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
            self.step(*batch(*rows))
        self.batches += 1
        self.micro_batches += min(2, len(rows))
        self.throw_away()
        self.count = 0

    @invariant()
    def is_as_modelled(self):
        if not hasattr(self, "step"):
            return
        self.compare(self.network, self.step.body.reducer.buffer, self.step.events)
        assert self.step.open_batches() == self.count
        assert self.step.events.micro_batches == self.micro_batches


TestStepOrders = StepOrders.TestCase
TestStepOrders.settings = examples(20, stateful_step_count=25)
