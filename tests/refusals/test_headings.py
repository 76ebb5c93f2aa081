"""Messages about a batch begin with the class that the user called, and with GradAccumulation where there is one."""

import numpy as np
import pytest
from linear_toy import X, line, mse, sgd
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from refusal import refuses, warns

from ms_gradaccum import Accumulator, GradAccumulation, Model, TrainOneStepCell


class VectorLoss(nn.Cell):
    """A loss that is not reduced."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y):
        return (self.network(x) - y).reshape(-1)


class SumLoss(VectorLoss):
    """A loss that is no mean over rows."""

    def construct(self, x, y):
        return ((self.network(x) - y) ** 2).sum()


def by_step(cell, optimizer, *batch):
    step = TrainOneStepCell(cell, optimizer, accumulation_steps=2)
    return lambda: step(*batch)


def by_loop(cell, optimizer, *batch):
    accumulator = Accumulator(cell, optimizer, 2)

    def train():
        with accumulator.accumulate():
            accumulator.backward(*batch)
            accumulator.step()

    return train


def by_model(cell, optimizer, *batch):
    model = Model(cell, optimizer=optimizer, accumulation_steps=2)
    data = NumpySlicesDataset(tuple(each.asnumpy() for each in batch), shuffle=False).batch(4)
    return lambda: model.train(1, data)


CALLED = {"TrainOneStepCell": by_step, "Accumulator": by_loop, "Model": by_model}
BATCH = Tensor(X), Tensor(np.float32(2) * X)


@pytest.mark.parametrize("called", CALLED)
def test_errors_of_a_batch_begin_with_the_class_that_was_called(called, mode):
    network = line()
    build = CALLED[called]
    train = build(VectorLoss(network), sgd(network), *BATCH)
    with refuses(ValueError, f"For '{called}', the argument 'network'"):
        train()
    train = build(mse(network), sgd(network), BATCH[0])
    with refuses(TypeError, f"For '{called}', the inputs"):
        train()


@pytest.mark.parametrize("called", CALLED)
def test_warnings_of_a_batch_begin_with_the_class_that_was_called(called):
    network = line()
    train = CALLED[called](SumLoss(network), sgd(network), *BATCH)
    with warns(f"For '{called}', the loss of two"):
        for _ in range(2):
            train()


@pytest.mark.parametrize("called", CALLED)
def test_a_grad_accumulation_keeps_its_name(called):
    network = line()
    train = CALLED[called](GradAccumulation(SumLoss(network), 2), sgd(network), *BATCH)
    with warns("For 'GradAccumulation', the loss of two"):
        train()
    train = CALLED[called](GradAccumulation(VectorLoss(network), 2), sgd(network), *BATCH)
    with refuses(ValueError, "For 'GradAccumulation', the argument 'network'"):
        train()


def test_a_network_in_half_precision_is_named_alike():
    network = line()
    step = TrainOneStepCell(VectorLoss(network), sgd(network), mixed_precision="fp16")
    with refuses(ValueError, "For 'TrainOneStepCell', the argument 'network'"):
        step(*BATCH)
