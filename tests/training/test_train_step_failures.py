"""A batch that fails: what it has added is taken back, and the training can go on."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, momentum, mse, sgd
from mindspore import Tensor, nn
from step_probe import LABELS, changed, number, tensors, values_of, with_a_bad_label

from ms_gradaccum import GradAccumulation, TrainOneStepCell


def classifier_step(accumulation_steps, micro_size=4):
    network = nn.Dense(1, 3, "ones")
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.CrossEntropyLoss()), micro_size)
    return network, TrainOneStepCell(loss_cell, momentum(network, 0.1), accumulation_steps=accumulation_steps)


def test_a_bad_label_in_the_third_micro_batch_leaves_everything_as_it_was():
    network, step = classifier_step(1)
    step(*tensors(X, LABELS))
    before = values_of(step)
    with pytest.raises(RuntimeError, match=r"^For 'GatherD', the value of 'index' must be in \[-3, 3\), but got: 7"):
        step(*with_a_bad_label(5))
    assert not changed(before, values_of(step)) and ms.get_context("mode") == ms.PYNATIVE_MODE
    # A graph that failed runs no more: it is compiled anew.
    assert number(step(*tensors(X, LABELS)).updated)
    assert "weight" in changed(before, values_of(step)) and np.isfinite(network.weight.asnumpy()).all()


def test_a_batch_of_a_wrong_shape_at_the_start_of_a_window_changes_nothing(mode):
    _, step = classifier_step(2, micro_size=2)
    before = values_of(step)
    with pytest.raises(ValueError, match="MatMul"):
        step(Tensor(np.ones((8, 2), np.float32)), Tensor(LABELS))
    assert not changed(before, values_of(step)) and ms.get_context("mode") == mode
    assert [number(step(*tensors(X, LABELS)).updated) for _ in range(2)] == [False, True]


def test_an_update_that_fails_takes_its_window_with_it():
    network = line()
    step = TrainOneStepCell(mse(network), sgd(network, [0.02]), accumulation_steps=2)
    start = values_of(step)
    batch = tensors(X, 2 * X)
    step(*batch), step(*batch)
    trained = values_of(step)
    assert changed(start, trained) == {"weight", "global_step"}
    step(*batch)
    # The list of learning rates has one entry, for the first update.
    with pytest.raises(RuntimeError, match="^For 'Gather', the 'input_indices' should be in the range"):
        step(*batch)
    # The rows of this window must not be in the next one, should the training go on.
    assert not changed(trained, values_of(step)) and step.open_batches() == 0
