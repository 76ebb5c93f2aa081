"""Callbacks that raise in the middle of a batch: what they interrupt leaves no rows and no counts behind."""

import pytest
from linear_toy import Recorder, batches, descend, line, sgd, toy, weight_of
from mindspore import nn
from step_probe import number
from strategies import ALL_ROWS, batch_of

from ms_gradaccum import GradAccumulation, TrainOneStepCell


class FailsOnce:
    """Raises at one event, at one micro batch."""

    def __init__(self, event, micro_batch=None):
        self.is_over, self.micro_batch = False, micro_batch
        setattr(self, event, self.fail)

    def fail(self, event):
        if not self.is_over and event.micro_batch == self.micro_batch and event.batch > 1:
            self.is_over = True
            raise OSError("no more storage")


def new_step(accumulation_steps, *events):
    network = line()
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    step = TrainOneStepCell(loss_cell, sgd(network), accumulation_steps=accumulation_steps)
    step.add_callback(FailsOnce(*events))
    return network, step


def test_rows_of_an_update_that_a_callback_has_prevented_are_in_no_other(eager):
    network, step = new_step(1, "on_update_begin")
    step(*batch_of(1, 2))
    with pytest.raises(OSError):
        step(*batch_of(3, 4))
    output = step(*batch_of(5, 6))
    assert number(output.weight) == 2
    assert weight_of(network) == pytest.approx(descend((1, 2), (5, 6)), rel=1e-5)


def test_they_are_not_in_the_next_training_either(eager):
    network, model = toy()
    with pytest.raises(OSError):
        model.train(1, batches(2), callbacks=[AsCallback()])
    after_one = weight_of(network)
    assert after_one == pytest.approx(descend((1, 2)), rel=1e-5)
    recorder = Recorder()
    model.train(1, batches(4), callbacks=recorder)
    assert [number(output.weight) for output in recorder.outputs] == [4, 4]


class AsCallback(Recorder):
    """Raises before the second update of a Model."""

    def on_update_begin(self, event):
        if event.updates == 1:
            raise OSError("no more storage")


@pytest.mark.parametrize("event", ["on_micro_batch_begin", "on_micro_batch_end"])
def test_a_failure_before_anything_was_added_keeps_the_window(event, eager):
    network, step = new_step(2, event, 0)
    step(*batch_of(1, 2))
    counts = step.events.batches, step.events.micro_batches
    if event == "on_micro_batch_begin":
        with pytest.raises(OSError):
            step(*batch_of(3, 4))
        assert step.open_batches() == 1
    else:
        with pytest.raises(OSError), pytest.warns(UserWarning, match="also discards 1 batch before it"):
            step(*batch_of(3, 4))
        step(*batch_of(1, 2))
        counts = counts[0] + 1, counts[1] + 2
    assert (step.events.batches, step.events.micro_batches) == counts
    assert number(step(*batch_of(3, 4)).weight) == 4
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4)), rel=1e-5)


class HalfAListener:
    """Has an attribute with the name of an event that is none."""

    on_update_begin = None

    def on_update_end(self, event):
        self.updates = event.updates


def test_an_attribute_that_is_no_method_is_not_called(eager):
    network, step = new_step(1, "on_update_begin", 7)
    listener = HalfAListener()
    step.add_callback(listener)
    step(*ALL_ROWS)
    assert listener.updates == 1 and weight_of(network) == pytest.approx(2.04)
