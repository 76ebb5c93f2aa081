"""A step that is built again over the same network and optimizer, as when a cell of a notebook is run twice."""

import functools

import numpy as np
import pytest
from linear_toy import mse
from mindspore import Tensor, nn, ops
from quick_mindspore import eagerly
from refusal import refuses

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell

RANDOM = np.random.default_rng(0)
BATCHES = [tuple(Tensor(RANDOM.normal(size=(8, n)).astype(np.float32)) for n in (3, 2)) for _ in range(4)]
OPTIMIZERS = {
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9),
    "Adam on a schedule": lambda parameters: nn.Adam(parameters, nn.ExponentialDecayLR(0.1, 0.5, 1)),
}


def mlp():
    network = nn.SequentialCell(nn.Dense(3, 4), nn.Tanh(), nn.Dense(4, 2))
    random = np.random.default_rng(1)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32)))
    return network


def built(optimizer="Momentum"):
    network = mlp()
    return network, mse(network), OPTIMIZERS[optimizer](network.trainable_params())


def weights_of(network):
    return [parameter.asnumpy() for parameter in network.get_parameters()]


@functools.cache
def by_the_stock_step(optimizer):
    network, cell, of_it = built(optimizer)
    step = nn.TrainOneStepCell(cell, of_it)
    with eagerly():
        for batch in BATCHES:
            step(*batch)
    return weights_of(network)


def halves(batch):
    return zip(*(ops.split(tensor, 4) for tensor in batch))


def train_step(cell, optimizer):
    step = TrainOneStepCell(GradAccumulation(cell, 2), optimizer, accumulation_steps=2)
    return step, lambda half: step(*half)


def loop(cell, optimizer):
    accumulator = Accumulator(cell, optimizer, 2)

    def train(half):
        with accumulator.accumulate():
            accumulator.backward(*half)
            accumulator.step()

    return accumulator, train


@pytest.mark.parametrize("build, optimizer", list(zip((train_step, loop), OPTIMIZERS)))
def test_a_step_that_is_built_again_goes_on_with_the_optimizer(build, optimizer, mode):
    network, cell, of_it = built(optimizer)
    kept = []
    for index, batch in enumerate(BATCHES):
        if index % 2 == 0:
            # The step before is kept, as the outputs of a notebook keep it.
            kept.append(build(cell, of_it))
        for half in halves(batch):
            kept[-1][1](half)
    for ours, stock in zip(weights_of(network), by_the_stock_step(optimizer)):
        np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build, owner", ((train_step, "TrainOneStepCell"), (loop, "Accumulator")))
def test_the_earlier_step_is_refused_and_the_later_one_begins_a_window(build, owner, eager):
    network, cell, optimizer = built()
    earlier, train = build(cell, optimizer)
    # A window of the earlier step, which is left open.
    train(next(halves(BATCHES[3])))
    before = weights_of(network)
    later = build(cell, optimizer)
    for call in (lambda: train(next(halves(BATCHES[0]))), earlier.flush, earlier.join):
        with refuses(RuntimeError, "was built later"):
            call()
    first, second = halves(BATCHES[0])
    later[1](first)
    assert all((now == then).all() for now, then in zip(weights_of(network), before))
    with refuses(RuntimeError, "was built later"):
        train(second)
    later[1](second)
    stock, stock_cell, of_it = built()
    nn.TrainOneStepCell(stock_cell, of_it)(*BATCHES[0])
    for ours, whole in zip(weights_of(network), weights_of(stock)):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)
    # What was refused has changed nothing: once the later one is gone, the earlier one ends its window.
    del later
    assert earlier.drop() == 1
    for half in halves(BATCHES[1]):
        train(half)
    assert optimizer.global_step.asnumpy() == [2]


def test_a_step_takes_over_all_optimizers_of_a_loop(eager):
    cells = [built()[1:] for _ in range(2)]
    earlier = Accumulator([cell for cell, _ in cells], [optimizer for _, optimizer in cells])
    step, _ = train_step(*cells[1])
    with refuses(RuntimeError, "was built later"), earlier.accumulate():
        pass
    step(*BATCHES[0])
    assert step.open_batches() == 1


def test_what_is_refused_when_it_is_built_takes_no_optimizer(eager):
    _, cell, optimizer = built()
    step = TrainOneStepCell(cell, optimizer)
    for wrong in ({"accumulation_steps": 0}, {"clip": 1.0}):
        with pytest.raises((TypeError, ValueError)):
            TrainOneStepCell(cell, optimizer, **wrong)
    assert step(*BATCHES[0]).updated
