"""Optimizers that are prepared, as in Accelerate: they step at the end of a window alone."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import descend, line, mse, sgd, weight_of
from loop_toy import FOUR, adjustable_sgd, optimizer_of, own_loop
from mindspore import nn
from mindspore.experimental.optim.lr_scheduler import StepLR

from ms_gradaccum import Accumulator

pytestmark = pytest.mark.usefixtures("eager")


def test_a_loop_in_the_words_of_accelerate_makes_one_update_per_window(mode):
    network, accumulator = own_loop(2, make_optimizer=adjustable_sgd)
    optimizer = optimizer_of(accumulator)
    network, optimizer, scheduler, loader = accumulator.prepare(network, optimizer, StepLR(optimizer, 1, 0.5), FOUR)
    weights = []
    for each in loader:
        with accumulator.accumulate(network):
            optimizer.zero_grad()
            accumulator.backward(*each)
            output = optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert (output is None) != accumulator.sync_gradients
        weights.append(weight_of(network))
    first = descend((1, 2, 3, 4))
    assert weights == pytest.approx(
        [0, first, first, descend((5, 6, 7, 8), weight=first, learning_rate=0.01)], rel=1e-6
    )
    # An update in each batch would end elsewhere.
    assert not np.isclose(weights[-1], descend((1, 2), (3, 4), (5, 6), (7, 8)))


def test_two_optimizers_of_a_network_make_one_update():
    network = nn.SequentialCell(nn.Dense(1, 1, weight_init="ones"), nn.Dense(1, 1, weight_init="ones"))
    optimizers = [sgd(cell, 0.01) for cell in network]
    accumulator = Accumulator(mse(network), optimizers, 2)
    accumulator.prepare(*optimizers)
    with accumulator.accumulate():  # No update of an empty window.
        assert [optimizer.step() for optimizer in optimizers] == [None, None]
    accumulator.drop()
    outputs = []
    for each in FOUR[:2]:
        with accumulator.accumulate():
            accumulator.backward(*each)
            outputs += [optimizer.step() for optimizer in optimizers]
    assert [output is None for output in outputs] == [True, True, False, True] and accumulator.events.updates == 1


def prepared(kind, **settings):
    """An optimizer that is prepared after a backward pass, and its loop."""
    network = line()
    optimizer = kind(network.trainable_params(), **settings)
    accumulator = Accumulator(mse(network), optimizer)
    accumulator.prepare(optimizer)
    accumulator.backward(*FOUR[0])
    return optimizer, accumulator


def test_an_optimizer_that_is_prepared_again_follows_its_last_loop():
    network = line()
    optimizer = sgd(network)
    for _ in range(2):
        accumulator = Accumulator(mse(network), optimizer)
        accumulator.prepare(optimizer)
    accumulator.backward(*FOUR[0])
    assert optimizer.step() is not None and accumulator.updated


def test_a_parameter_called_step_stays():
    optimizer, _ = prepared(nn.AdaFactor, learning_rate=0.1, relative_step=False, scale_parameter=False)
    assert isinstance(optimizer.step, ms.Parameter)


class OwnStep(nn.SGD):
    def step(self, gradients):
        return self(gradients)


class OwnZero(nn.SGD):
    def zero_grad(self):
        return "mine"


def test_each_method_of_the_users_own_class_stays_and_a_loop_that_relies_on_the_other_ends_loudly():
    optimizer, _ = prepared(OwnZero)
    assert optimizer.zero_grad() == "mine" and optimizer.step().updated
    optimizer, accumulator = prepared(OwnStep)
    assert optimizer.step.__func__ is OwnStep.step
    optimizer.zero_grad()  # that of the loop
    assert accumulator.drop() == 0
    with pytest.raises(TypeError, match="gradients"):
        optimizer.step()
