"""Messages about a batch begin with the class that the user called, and with GradAccumulation where there is one."""

import numpy as np
import pytest
from linear_toy import X, line, mse, sgd
from mindspore import Tensor, nn
from refusal import FACES, refuses, warns

from ms_gradaccum import GradAccumulation, TrainOneStepCell


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


BATCH = Tensor(X), Tensor(np.float32(2) * X)


@pytest.mark.parametrize("called", FACES)
def test_errors_of_a_batch_begin_with_the_class_that_was_called(called, mode):
    network = line()
    build = FACES[called]
    train = build(VectorLoss(network), sgd(network), *BATCH, accumulation_steps=2)
    with refuses(ValueError, f"For '{called}', the argument 'network'"):
        train()
    train = build(mse(network), sgd(network), BATCH[0], accumulation_steps=2)
    with refuses(TypeError, f"For '{called}', the inputs"):
        train()


@pytest.mark.parametrize("called", FACES)
def test_warnings_of_a_batch_begin_with_the_class_that_was_called(called):
    network = line()
    train = FACES[called](SumLoss(network), sgd(network), *BATCH, accumulation_steps=2)
    with warns(f"For '{called}', the loss of two"):
        for _ in range(2):
            train()


@pytest.mark.parametrize("called", FACES)
def test_a_grad_accumulation_keeps_its_name(called):
    network = line()
    train = FACES[called](GradAccumulation(SumLoss(network), 2), sgd(network), *BATCH, accumulation_steps=2)
    with warns("For 'GradAccumulation', the loss of two"):
        train()
    train = FACES[called](GradAccumulation(VectorLoss(network), 2), sgd(network), *BATCH, accumulation_steps=2)
    with refuses(ValueError, "For 'GradAccumulation', the argument 'network'"):
        train()


def test_a_network_in_half_precision_is_named_alike():
    network = line()
    step = TrainOneStepCell(VectorLoss(network), sgd(network), mixed_precision="fp16")
    with refuses(ValueError, "For 'TrainOneStepCell', the argument 'network'"):
        step(*BATCH)
