"""GradAccumulation in a program that forgot to import Model or TrainOneStepCell from this package, and the reverse."""

import mindspore as ms
import pytest
from linear_toy import ALL, X, batches, descend, line, sgd, weight_of
from mindspore import Tensor, nn
from refusal import warns

from ms_gradaccum import GradAccumulation, Model


def test_stock_model_trains_our_grad_accumulation_rightly_and_warns(mode):
    # Stock Model looks for the class name of its own GradAccumulation, and with that would train nothing.
    network = line()
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 3)  # 3, 3 and 2 rows
    model = ms.Model(loss_cell, optimizer=sgd(network))
    with warns("train cell around"):
        model.train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))


def test_the_stock_training_step_trains_our_grad_accumulation_rightly_and_warns(mode):
    network = line()
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 3)
    train_step = nn.TrainOneStepCell(loss_cell, sgd(network)).set_train()
    with warns("train cell around"):
        loss = train_step(Tensor(X), Tensor(2 * X))
    assert loss.asnumpy() == pytest.approx(102.0)
    assert weight_of(network) == pytest.approx(2.04)


def test_a_model_takes_a_stock_training_step_as_stock_model_does():
    network = line()
    Model(nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), sgd(network))).train(1, batches(8))
    assert weight_of(network) == pytest.approx(2.04)
