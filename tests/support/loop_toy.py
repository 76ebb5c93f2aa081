"""The linear toy in a loop that its user writes: four batches of two rows each, [1, 2], [3, 4], [5, 6] and [7, 8]."""

import functools
from collections import Counter

import mindspore.experimental.optim as experimental
import numpy as np
from linear_toy import X, line, mse, sgd
from mindspore import Tensor, ops
from step_probe import tensors

from ms_gradaccum import AccumulationConfig, Accumulator
from ms_gradaccum.loops.loop_driver import LoopDriver
from ms_gradaccum.training import window
from ms_gradaccum.training.events import Events


def batch(*rows):
    x = np.array(rows, np.float32).reshape(-1, 1)
    return tensors(x, 2 * x)


FOUR = [batch(1, 2), batch(3, 4), batch(5, 6), batch(7, 8)]


def adjustable_sgd(network, learning_rate=0.02):
    """An optimizer whose learning rate a scheduler can move."""
    return experimental.SGD(network.trainable_params(), learning_rate)


@functools.cache
def _built(make_optimizer, advisor):
    """Compiled once for each kind of Advisor.

    Neither the weight nor the number of batches of a window is a constant of a graph.
    """
    network = line()
    return network, Accumulator(mse(network), make_optimizer(network))


def own_loop(*steps, make_optimizer=sgd, **settings):
    """A network and an Accumulator that nothing else uses."""
    network = line()
    return network, Accumulator(mse(network), make_optimizer(network), *steps, **settings)


def renew(accumulator, config=None):
    """Let an Accumulator begin as if it were new. What it has compiled stays."""
    accumulator.drop()
    accumulator.events = Events("Accumulator")
    for trained in accumulator.windows:
        trained.micro_steps.events, trained.mistakes, trained.last_clip = accumulator.events, Counter(), None
    accumulator.driver = LoopDriver(config or accumulator.config, accumulator.windows, accumulator.events)


def toy_loop(accumulation_steps=1, make_optimizer=sgd, **settings):
    """The weight of y = weight * x at 0, and an Accumulator as if it were new."""
    network, accumulator = _built(make_optimizer, window.Advisor)
    renew(accumulator, AccumulationConfig(accumulation_steps, **settings))
    network.weight.set_data(ops.zeros_like(network.weight))
    optimizer = optimizer_of(accumulator)
    if make_optimizer is adjustable_sgd:
        optimizer.lrs[0].set_data(Tensor(np.float32(0.02)))
    else:
        optimizer.global_step.set_data(ops.zeros_like(optimizer.global_step))
    return network, accumulator


def optimizer_of(accumulator):
    return accumulator.windows[0].optimizers[0]


def train(accumulator, batches, scheduler=None):
    """Accelerate's loop. Yields the accumulator after each batch, when its weights are as the batch leaves them."""
    for each in batches:
        with accumulator.accumulate():
            accumulator.backward(*each)
            accumulator.clip_grad_norm(1e6)
            accumulator.step()
            if scheduler is not None:
                scheduler.step()
            accumulator.zero_grad()
        yield accumulator


def updates_of(accumulator, batches, scheduler=None):
    return [each.updated for each in train(accumulator, batches, scheduler)]


def global_step(accumulator):
    return int(optimizer_of(accumulator).global_step.asnumpy().item())


def rate(accumulator):
    return round(float(optimizer_of(accumulator).lrs[0].asnumpy()), 6)


def nan_batch():
    return [Tensor(np.full((1, 1), np.nan, np.float32)), Tensor(X[:1])]
