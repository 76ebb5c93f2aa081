"""A step that is built again over the same network and optimizer, as when a cell of a notebook is run twice."""

import numpy as np
import pytest
from linear_toy import momentum
from mindspore import Tensor, nn, ops
from optimizer_parity import WholeBatch, batches, one_layer
from refusal import refuses

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell

BATCHES = [[Tensor(part) for part in each] for each in batches()]
OPTIMIZERS = {
    "Momentum": momentum,
    "Adam on a schedule": lambda network: nn.Adam(network.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 1)),
}


def built(optimizer="Momentum"):
    cell = one_layer()
    return cell, OPTIMIZERS[optimizer](cell)


def assert_trained(cell, batches, optimizer="Momentum"):
    by_stock = WholeBatch(one_layer, OPTIMIZERS[optimizer], batches)
    for each in cell.trainable_params():
        np.testing.assert_allclose(each.asnumpy(), by_stock.values[each.name], rtol=1e-5, atol=1e-6)


def train_step(cell, optimizer):
    step = TrainOneStepCell(GradAccumulation(cell, 2), optimizer, accumulation_steps=2)
    return step, lambda half: step(*half)


def halves(batch):
    return zip(*(ops.split(tensor, 6) for tensor in batch))


def loop(cell, optimizer):
    accumulator = Accumulator(cell, optimizer, 2)

    def train(half):
        with accumulator.accumulate():
            accumulator.backward(*half)
            accumulator.step()

    return accumulator, train


@pytest.mark.parametrize("build, optimizer", list(zip((train_step, loop), OPTIMIZERS)))
def test_a_step_that_is_built_again_goes_on_with_the_optimizer(build, optimizer, mode):
    cell, of_it = built(optimizer)
    kept = []
    for index, batch in enumerate(BATCHES):
        if index % 2 == 0:
            # The step before is kept, as the outputs of a notebook keep it.
            kept.append(build(cell, of_it))
        for half in halves(batch):
            kept[-1][1](half)
    assert_trained(cell, batches(), optimizer)


@pytest.mark.parametrize("build", (train_step, loop))
def test_the_earlier_step_is_refused_and_the_later_one_begins_a_window(build, eager):
    cell, optimizer = built()
    earlier, train = build(cell, optimizer)
    train(next(halves(BATCHES[3])))
    before = [each.asnumpy() for each in cell.trainable_params()]
    later = build(cell, optimizer)
    first, second = halves(BATCHES[0])
    for call in (lambda: train(first), earlier.flush, earlier.join):
        with refuses(RuntimeError, "was built later"):
            call()
    later[1](first)
    assert all((now.asnumpy() == then).all() for now, then in zip(cell.trainable_params(), before))
    with refuses(RuntimeError, "was built later"):
        train(second)
    later[1](second)
    assert_trained(cell, batches()[:1])
    # What was refused has changed nothing: once the later one is gone, the earlier one ends its window.
    del later
    assert earlier.drop() == 1
    for half in halves(BATCHES[1]):
        train(half)
    assert optimizer.global_step.asnumpy() == [2]


def test_a_step_takes_over_all_optimizers_of_a_loop(eager):
    cells, optimizers = zip(*(built() for _ in range(2)))
    earlier = Accumulator(cells, optimizers)
    step, _ = train_step(cells[1], optimizers[1])
    with refuses(RuntimeError, "was built later"), earlier.accumulate():
        pass
    step(*BATCHES[0])
    assert step.open_batches() == 1


def test_what_is_refused_when_it_is_built_takes_no_optimizer(eager):
    cell, optimizer = built()
    step = TrainOneStepCell(cell, optimizer)
    for wrong in ({"accumulation_steps": 0}, {"clip": 1.0}):
        with pytest.raises((TypeError, ValueError)):
            TrainOneStepCell(cell, optimizer, **wrong)
    assert step(*BATCHES[0]).updated
