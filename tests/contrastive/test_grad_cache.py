"""Losses that look at all rows together: cached micro batches train like MindSpore's own step on the whole batch."""

import numpy as np
import pytest
from mindspore import Tensor, nn
from whole_batch_losses import LOSSES, OrdinaryLoss, WholeBatches, batch, distance, movement, parts_of, train, values_of

from ms_gradaccum import GradAccumulation, GradCacheLoss, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")
OPTIMIZERS = {
    "SGD": lambda parameters: nn.SGD(parameters, 0.1),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
    "RMSProp": lambda parameters: nn.RMSProp(parameters, 0.02),
    "Adam": lambda parameters: nn.Adam(parameters, 0.01),
}


def batches(name):
    # Micro batches of 5, 5, 4 and 4 rows, and of 5, 5, 5 and 4.
    return [batch(name, number, 18 + number % 2) for number in range(3)]


def whole(name, optimizer):
    cell = OrdinaryLoss(*parts_of(name))
    start = values_of(cell.trainable_params())
    losses = train(WholeBatches(cell, OPTIMIZERS[optimizer](cell.trainable_params())), batches(name))
    return start, values_of(cell.trainable_params()), losses


def micro_batches(name, optimizer, kind=GradCacheLoss):
    cell = kind(*parts_of(name))
    step = TrainOneStepCell(GradAccumulation(cell, 4), OPTIMIZERS[optimizer](cell.trainable_params()))
    losses = train(step, batches(name))
    return values_of(cell.trainable_params()), losses


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum", "RMSProp"])
@pytest.mark.parametrize("name", LOSSES)
def test_cached_micro_batches_train_like_the_whole_batch(name, optimizer):
    start, expected, losses = whole(name, optimizer)
    found, found_losses = micro_batches(name, optimizer)
    assert distance(found, expected) < 1e-6
    # By what the training has changed, too.
    assert distance(found, expected, movement(start, expected)) < 1e-5
    np.testing.assert_allclose(found_losses, losses, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_plain_micro_batches_do_not(name):
    start, expected, _ = whole(name, "Momentum")
    found, _ = micro_batches(name, "Momentum", OrdinaryLoss)
    assert distance(found, expected, movement(start, expected)) > 0.1


def test_elsewhere_it_is_an_ordinary_loss_cell():
    name = "supervised contrastive"
    inputs = [Tensor(array) for array in batch(name, 0, 18)]
    cell = GradCacheLoss(*parts_of(name))
    expected = OrdinaryLoss(*parts_of(name))(*inputs)
    assert cell(*inputs) == GradAccumulation(cell, 4)(*inputs) == expected
    # MindSpore's own step differentiates it as it is.
    start = values_of(cell.trainable_params())
    train(WholeBatches(cell, OPTIMIZERS["SGD"](cell.trainable_params())), batches(name))
    assert distance(values_of(cell.trainable_params()), whole(name, "SGD")[1]) < 1e-7
    assert distance(values_of(cell.trainable_params()), start) > 1e-3
