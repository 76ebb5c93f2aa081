"""Subclasses, hooks and training cells: what would never be called, or in each micro batch, is refused."""

import pytest
from linear_toy import X, line, mse, sgd, weight_of
from loop_toy import adjustable_sgd
from mindspore import nn
from refusal import refuses
from step_probe import Around, OwnTrainStep, tensors

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell


class ClippingStep(TrainOneStepCell):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, self.sens)
        return loss, self.optimizer(grads)


class LaterStep(ClippingStep):
    pass


class NamedStep(TrainOneStepCell):
    def rate(self):
        return 0.5


class DoubledLoss(GradAccumulation):
    def construct(self, *inputs):
        return 2 * self.network(*inputs)


class CountingSplit(GradAccumulation):
    def split(self, *args, **kwargs):
        batch = super().split(*args, **kwargs)
        self.found = len(batch.micro_batches)
        return batch


def loss_cell():
    network = line()
    return network, mse(network)


@pytest.mark.parametrize("kind", [ClippingStep, LaterStep])
def test_a_step_with_its_own_construct_is_refused(kind):
    network, cell = loss_cell()
    optimizer = sgd(network)
    with refuses(TypeError, "would never be called"):
        kind(cell, optimizer)
    TrainOneStepCell(cell, optimizer)  # The refusal has not taken it.


def test_a_loss_cell_with_its_own_construct_is_refused():
    with refuses(TypeError, "would never be called"):
        DoubledLoss(loss_cell()[1], 2)


def test_other_subclasses_train(eager):
    network, cell = loss_cell()
    split = CountingSplit(cell, 4)
    step = NamedStep(split, sgd(network))
    step(*tensors(X, 2 * X))
    assert weight_of(network) == pytest.approx(2.04) and split.found == 4 and step.rate() == 0.5


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook"])
def test_a_hook_of_a_step_is_refused(kind):
    network, cell = loss_cell()
    step, loop = TrainOneStepCell(cell, sgd(network)), Accumulator(cell, sgd(network))
    for each in (step, loop):
        with refuses(TypeError, "a hook of a training step"):
            getattr(each, f"register_{kind}")(lambda *_: None)


def test_a_hook_of_the_loss_cell_is_called_in_each_micro_batch(eager):
    weights = []
    for build in (lambda cell: GradAccumulation(cell, 4), lambda cell: cell):
        network, cell = loss_cell()
        optimizer, trained = sgd(network), build(cell)
        trained.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2, inputs[1]))
        step = TrainOneStepCell(trained, optimizer) if trained is not cell else nn.TrainOneStepCell(cell, optimizer)
        step(*tensors(X, 2 * X))
        weights.append(weight_of(network))
    assert weights[0] == pytest.approx(weights[1]) and weights[0] != pytest.approx(2.04)


@pytest.mark.parametrize("make_optimizer", [sgd, adjustable_sgd])
@pytest.mark.parametrize("wrap", [lambda cell: cell, Around])
@pytest.mark.parametrize("build", [lambda cell, _: GradAccumulation(cell, 4), TrainOneStepCell, Accumulator])
def test_a_network_with_an_optimizer_inside_is_refused(build, wrap, make_optimizer, eager):
    network, cell = loss_cell()
    optimizer = make_optimizer(network)
    with refuses(ValueError, "loss cell inside"):
        build(wrap(OwnTrainStep(cell, optimizer)), optimizer)
    build(wrap(cell), optimizer)
