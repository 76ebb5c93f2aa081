"""Messages about a batch begin with the class that the user called, and with GradAccumulation where there is one."""

import numpy as np
import pytest
from linear_toy import X, line, mse, sgd
from mindspore import Tensor, nn
from refusal import FACES, refuses, warns

from ms_gradaccum import GradAccumulation, TrainOneStepCell


def loss_of(network, reduction):
    return nn.WithLossCell(network, nn.MSELoss(reduction))


BATCH = Tensor(X), Tensor(np.float32(2) * X)


@pytest.mark.parametrize("called", FACES)
def test_errors_of_a_batch_begin_with_the_class_that_was_called(called, mode):
    network = line()
    build = FACES[called]
    train = build(loss_of(network, "none"), sgd(network), *BATCH, accumulation_steps=2)
    with refuses(ValueError, f"For '{called}', the argument 'network'"):
        train()
    train = build(mse(network), sgd(network), BATCH[0], accumulation_steps=2)
    with refuses(TypeError, f"For '{called}', the inputs"):
        train()


@pytest.mark.parametrize("called", FACES)
@pytest.mark.parametrize("parts", [None, 2], ids=["of its own", "of GradAccumulation"])
def test_a_grad_accumulation_keeps_its_name_in_errors_and_warnings(called, parts):
    network = line()

    def train(reduction):
        cell = loss_of(network, reduction)
        cell = cell if parts is None else GradAccumulation(cell, parts)
        run = FACES[called](cell, sgd(network), *BATCH, accumulation_steps=2)
        for _ in range(2):
            run()

    name = called if parts is None else "GradAccumulation"
    with warns(f"For '{name}', the loss of two"):
        train("sum")
    with refuses(ValueError, f"For '{name}', the argument 'network'"):
        train("none")


def test_a_network_in_half_precision_is_named_alike():
    network = line()
    step = TrainOneStepCell(loss_of(network, "none"), sgd(network), mixed_precision="fp16")
    with refuses(ValueError, "For 'TrainOneStepCell', the argument 'network'"):
        step(*BATCH)
