"""An optimizer that leaves out the update of a spike: what counts updates follows it."""

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import mse
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental.optim.lr_scheduler import StepLR
from step_probe import Around, Listener

from ms_gradaccum import EMA, Accumulator, GradAccumulation, TrainOneStepCell

LIMIT = 20.0
SPIKE = 2
UPDATED = [True, True, False, True]


def data():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(3, 1)).astype(np.float32)
    inputs = [rng.normal(size=(8, 3)).astype(np.float32) for _ in UPDATED]
    inputs[SPIKE] *= 30
    return [(Tensor(each), Tensor(each @ truth)) for each in inputs]


def global_norm(grads):
    """A function: after its call the compiler drops a branch if the gradients are parameters."""
    return ops.sqrt(ops.addn([ops.square(each).sum() for each in grads]))


class SkipLarge(nn.Optimizer):
    def __init__(self, inner):
        super().__init__(0.1, inner.parameters)
        self.inner = inner

    def construct(self, grads):
        norm = global_norm(grads)
        if norm < LIMIT:
            self.inner(grads)
        return norm


class SkippingMomentum(nn.Momentum):
    def construct(self, grads):
        norm = ops.sqrt(ops.addn([ops.square(each).sum() for each in grads]))
        if norm < LIMIT:
            super().construct(grads)
        return norm


def around(make):
    return lambda parameters: SkipLarge(make(parameters))


MAKERS = {
    "around Momentum": around(lambda parameters: nn.Momentum(parameters, 0.05, 0.9)),
    "around SGD without a count": around(lambda parameters: experimental.SGD(parameters, 0.05)),
    "subclass": lambda parameters: SkippingMomentum(parameters, 0.05, 0.9),
}


def build(make):
    network = nn.Dense(3, 1, weight_init="zeros")
    return network, mse(network), make(network.trainable_params())


@pytest.mark.parametrize("maker", MAKERS)
def test_the_output_the_events_and_an_ema_follow_the_optimizer(mode, maker):
    network, loss, optimizer = build(MAKERS[maker])
    step = TrainOneStepCell(GradAccumulation(loss, 4), optimizer, check_loss=False)
    ema, listener, expected = EMA(0.5, warmup_updates=0), Listener(), 0.0
    step.add_callback(ema)
    step.add_callback(listener)
    for batch, updated in zip(data(), UPDATED):
        before = network.weight.asnumpy().copy()
        output = step(*batch)
        assert bool(output.updated) == output.is_updated == updated
        assert not bool(output.overflow) and output.ends_window
        assert (not np.array_equal(network.weight.asnumpy(), before)) == updated
        expected = 0.5 * (expected + network.weight.asnumpy()) if updated else expected
    assert listener.ends() == [(1, 0), (2, 0), (2, 1), (3, 1)]
    assert ema.updates == 3
    np.testing.assert_allclose(ema.parameters[0].asnumpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("maker", ["around Momentum", "subclass"])
def test_a_loaded_checkpoint_reaches_parameters_that_only_a_branch_reads(maker):
    """The graph went on with the storage from before, if nothing outside of the branch read them."""
    ms.set_context(mode=ms.GRAPH_MODE)
    network = nn.Dense(3, 1, weight_init="zeros", has_bias=False)
    optimizer = MAKERS[maker](network.trainable_params())
    step = TrainOneStepCell(GradAccumulation(mse(network), 4), optimizer, check_loss=False)
    inputs, labels = data()[0]
    for _ in range(2):
        step(inputs, labels)
    weight, moment = np.array([[0.5, -1, 2]], np.float32), np.array([[0.1, 0.2, 0.3]], np.float32)
    (moments,) = (each for each in step.get_parameters() if "moments." in each.name)
    loaded = {network.weight.name: Parameter(Tensor(weight)), moments.name: Parameter(Tensor(moment))}
    ms.load_param_into_net(step, loaded)
    step(inputs, labels)
    errors = inputs.asnumpy() @ weight.T - labels.asnumpy()
    moment = 0.9 * moment + 2 * errors.T @ inputs.asnumpy() / len(inputs)
    np.testing.assert_allclose(network.weight.asnumpy(), weight - 0.05 * moment, rtol=1e-6)


def test_a_larger_graph_follows_the_count_of_the_optimizer(mode):
    _, loss, optimizer = build(MAKERS["around Momentum"])
    step = TrainOneStepCell(GradAccumulation(loss, 4), optimizer, check_loss=False)
    graph = ms.jit(Around(step))
    assert [bool(graph(*batch)[3]) for batch in data()] == UPDATED


@pytest.mark.parametrize("spike_first", [False, True])
def test_a_prepared_schedule_steps_with_the_updates_of_its_optimizer(mode, spike_first):
    network, loss, _ = build(MAKERS["subclass"])
    inner = experimental.SGD(network.trainable_params(), 0.01)
    accumulator = Accumulator(loss, SkipLarge(inner), 1, check_loss=False)
    batches = data()[SPIKE:] if spike_first else data()
    loader, schedule = accumulator.prepare(batches, StepLR(inner, 1, 0.5))
    rates = []
    for batch in loader:
        with accumulator.accumulate():
            accumulator.backward(*batch)
            accumulator.step()
            schedule.step()
        rates.append(float(inner.lrs[0].asnumpy()))
    factors = [1, 0.5] if spike_first else [0.5, 0.25, 0.25, 0.125]
    np.testing.assert_allclose(rates, np.multiply(0.01, factors), rtol=1e-6)


def test_of_two_optimizers_only_the_schedule_of_the_one_that_updates_steps(mode):
    network, loss, _ = build(MAKERS["subclass"])
    first = experimental.SGD([network.weight], 0.01)
    second = experimental.SGD([network.bias], 0.01)
    accumulator = Accumulator(loss, [SkipLarge(first), second], 1, check_loss=False)
    schedules = accumulator.prepare(StepLR(first, 1, 0.5), StepLR(second, 1, 0.5))
    accumulator.backward(*data()[SPIKE])
    output = accumulator.step()
    for schedule in schedules:
        schedule.step()
    assert output.is_updated
    assert [float(each.lrs[0].asnumpy()) for each in (first, second)] == pytest.approx([0.01, 0.005])


@pytest.mark.parametrize("rate, rows", [(0.0, 8), (0.05, 0)])
def test_an_update_without_a_rate_or_a_gradient_is_one(mode, rate, rows):
    """It moves nothing, but a schedule that begins at 0 must leave it."""
    _, loss, optimizer = build(around(lambda parameters: experimental.SGD(parameters, rate)))
    step = TrainOneStepCell(loss, optimizer, check_loss=False)
    inputs = np.zeros((8, 3), np.float32)
    inputs[:rows] = 1.0
    assert bool(step(Tensor(inputs), Tensor(inputs[:, :1])).updated)


def test_mindspores_own_optimizers_are_not_read(monkeypatch, eager):
    monkeypatch.setattr("ms_gradaccum.backend.optimizer_progress.few_elements", None)
    _, loss, optimizer = build(lambda parameters: experimental.SGD(parameters, 0.05))
    assert bool(TrainOneStepCell(loss, optimizer, check_loss=False)(*data()[0]).updated)
