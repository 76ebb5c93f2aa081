"""Loops that use the result of a step, and steps that users have changed."""

import mindspore as ms
import numpy as np
import pytest
from harness import regression
from mindspore import Tensor, nn, ops

from ms_gradaccum import GradAccumulation, Model, TrainOneStepCell


def build(step=TrainOneStepCell, **settings):
    network = nn.WithLossCell(nn.Dense(4, 1, weight_init="ones", bias_init="zeros"), nn.MSELoss())
    return step(GradAccumulation(network, 4), nn.SGD(network.trainable_params(), 0.1), **settings)


def losses_of_stock():
    network = nn.WithLossCell(nn.Dense(4, 1, weight_init="ones", bias_init="zeros"), nn.MSELoss())
    step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1))
    return [float(step(Tensor(x), Tensor(y)).asnumpy()) for x, y in regression()]


@pytest.fixture
def outputs(eager):
    step = build()
    return [step(Tensor(x), Tensor(y)) for x, y in regression()]


@pytest.fixture
def losses(eager):
    return losses_of_stock()


def test_the_mean_of_results_is_the_mean_of_losses(outputs, losses):
    np.testing.assert_allclose(np.mean(outputs), np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    "read",
    [
        float,
        lambda out: float(out.asnumpy()),
        lambda out: out.item(),
        lambda out: float(out + 1) - 1,
        lambda out: float(1 + out) - 1,
        lambda out: float(2 * out) / 2,
        lambda out: float(out / 2) * 2,
        lambda out: float(f"{out:.6f}"),
        lambda out: float(np.asarray(out)),
        lambda out: sum([out, out]) / 2,
        lambda out: float(out.loss),
        lambda out: float(out[0]),
    ],
    ids=["float", "asnumpy", "item", "+", "1+", "2*", "/", "format", "asarray", "sum", "loss", "[0]"],
)
def test_a_result_can_be_read_as_its_loss(read, outputs, losses):
    for output, loss in zip(outputs, losses):
        assert float(read(output)) == pytest.approx(loss, rel=1e-4)


def test_three_items_are_unpacked_as_of_a_step_with_a_loss_scale(outputs, losses):
    loss, overflow, scale = outputs[0]
    assert float(loss) == pytest.approx(losses[0], rel=1e-5)
    assert not overflow and float(scale) == 1.0


def test_a_running_sum_of_results(outputs, losses):
    total = 0
    for output in outputs:
        total += output
    assert float(total) == pytest.approx(sum(losses), rel=1e-5)


class OwnStep(TrainOneStepCell):
    """A step whose user has written a way of training of their own, which nothing would call."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer(grads))


class OwnInit(TrainOneStepCell):
    """A step with nothing but another default."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer, accumulation_steps=1)


def test_a_step_with_its_own_construct_is_refused_when_built(eager):
    with pytest.raises((TypeError, ValueError), match="construct"):
        build(OwnStep)


def test_a_step_with_its_own_init_trains(eager):
    losses = [float(build_once(Tensor(x), Tensor(y))[0]) for build_once in [build(OwnInit)] for x, y in regression()]
    np.testing.assert_allclose(losses, losses_of_stock(), rtol=1e-5)


class StockStep(nn.TrainOneStepCell):
    """A step of MindSpore's with its own construct, such as one that clips."""

    def construct(self, *inputs):
        grads = self.grad(self.network, self.weights)(*inputs, Tensor(1.0, ms.float32))
        return ops.depend(self.network(*inputs), self.optimizer(ops.clip_by_global_norm(grads, 0.1)))


@pytest.mark.parametrize("build_around", [TrainOneStepCell, lambda step, opt: Model(step, optimizer=opt)])
def test_a_step_of_mindspore_inside_is_refused(build_around, eager):
    network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    inner = StockStep(network, optimizer)
    with pytest.raises((TypeError, ValueError), match="TrainOneStepCell|training step|loss cell"):
        build_around(inner, nn.SGD(inner.network.trainable_params(), 0.1))
