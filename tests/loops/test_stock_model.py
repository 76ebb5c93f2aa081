"""GradAccumulation in a program that forgot to import Model from this package."""

import mindspore as ms
import pytest
from linear_toy import ALL, batches, descend, line, mse, sgd, weight_of
from refusal import warns

from ms_gradaccum import GradAccumulation


def test_stock_model_trains_our_grad_accumulation_rightly_and_warns(mode):
    # Stock Model looks for the class name of its own GradAccumulation, and with that would train nothing.
    network = line()
    loss_cell = GradAccumulation(mse(network), 3)  # 3, 3 and 2 rows
    model = ms.Model(loss_cell, optimizer=sgd(network))
    with warns("train cell around"):
        model.train(2, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL, ALL))
