"""Settings of optimizers: groups, schedules, decay, frozen, tied and 16-bit weights. See test_optimizers.py."""

import functools

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from optimizer_parity import (
    BOTH,
    RowLoss,
    WholeBatch,
    accumulate,
    accumulated_step,
    assert_like_whole_batch,
    assert_not_vacuous,
    assert_same,
    batches,
    dense,
    one_layer,
    train,
    values_of,
)

from ms_gradaccum import Accumulator, TrainOneStepCell


class GrowingDecay(nn.Cell):
    def construct(self, global_step):
        return 0.05 * global_step


class AddedMatrices(nn.Cell):
    """Matrices that are added up: all have the same gradient, so only their learning rates tell them apart."""

    def __init__(self, count):
        super().__init__()
        random = np.random.default_rng(4)
        start = random.uniform(0.02, 0.06, (count, 2, 3)).astype(np.float32)
        self.matrices = ParameterTuple(Parameter(Tensor(start[i]), f"matrix{i}") for i in range(count))

    def construct(self, x):
        total = self.matrices[0]
        for matrix in self.matrices[1:]:
            total = total + matrix
        return ops.matmul(x, total.T)


class HalfFirstLayer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = dense(3, 4, 0.3, 0.9, seed=1)
        for parameter in self.first.get_parameters():
            parameter.set_dtype(ms.float16)
        self.second = dense(4, 2, 0.2, 0.6, seed=2)

    def construct(self, x):
        return self.second(ops.cast(self.first(ops.cast(x, ms.float16)), ms.float32))


class Averaging(nn.Optimizer):
    """An optimizer around another one, which keeps averages of the parameters. Both have parameters of equal names."""

    def __init__(self, optimizer):
        super().__init__(0.0, list(optimizer.parameters))
        self.inner = optimizer
        self.averages = self.parameters.clone(prefix="average", init="same")

    def construct(self, gradients):
        done = self.inner(gradients)
        for average, parameter in zip(self.averages, self.parameters):
            done = ops.depend(done, ops.assign(average, 0.9 * average + 0.1 * parameter))
        return done


def weights_and_biases(network):
    weights = [parameter for parameter in network.trainable_params() if "weight" in parameter.name]
    return weights, [parameter for parameter in network.trainable_params() if "bias" in parameter.name]


def momentum_groups(network):
    weights, biases = weights_and_biases(network)
    groups = [{"params": biases, "lr": 0.02}, {"params": weights, "weight_decay": 0.1}]
    groups.append({"order_params": network.trainable_params()})
    return nn.Momentum(groups, 0.01, 0.9, weight_decay=0.0, loss_scale=8.0)


def dynamic_decay_groups(network):
    weights, biases = weights_and_biases(network)
    groups = [{"params": weights, "weight_decay": GrowingDecay()}, {"params": biases, "weight_decay": 0.1}]
    return nn.Momentum(groups, 0.01, 0.9, use_nesterov=True)


@functools.cache
def trained(make_network, make_optimizer):
    whole = WholeBatch(make_network, make_optimizer)
    assert_not_vacuous(whole, micro_size=4)
    return whole, accumulate(make_network, make_optimizer, 4, BOTH)


@pytest.mark.parametrize("make_optimizer", [momentum_groups, dynamic_decay_groups])
def test_settings_of_an_optimizer_keep_their_effect(make_optimizer, mode):
    whole, results = trained(one_layer, make_optimizer)
    assert_like_whole_batch(whole, *results[mode])


@pytest.mark.parametrize("make_step", [accumulated_step, Accumulator])
def test_an_optimizer_around_another_one_gets_the_names_of_mindspores_step(make_step, mode):
    """Both have a `global_step`, which no graph could tell apart."""
    found = []
    for number, build in enumerate((nn.TrainOneStepCell, make_step)):
        network = one_layer()
        optimizer = Averaging(nn.Momentum(network.trainable_params(), 0.01, 0.9))
        step = build(network, optimizer, *number * [4])
        for batch in batches():
            for part in zip(*(np.split(each, 4 if build is Accumulator else 1) for each in batch)):
                getattr(step, "backward", step)(*map(Tensor, part))
            if build is Accumulator:
                step.step()
        found.append({each.name: each.asnumpy() for each in optimizer.get_parameters()})
    assert {"optimizer.global_step", "optimizer.inner.global_step", "backbone.weight"} < set(found[0])
    assert_same(*found)


def test_an_optimizer_around_another_one_leaves_the_names_of_the_networks(eager):
    """A file that is loaded, or a clip that is given by names, needs them."""
    networks = [RowLoss(nn.SequentialCell(nn.Dense(3, 2), nn.BatchNorm1d(2))) for _ in range(2)]
    for name, network in zip(("gen.", "dis."), networks):
        network.update_parameters_name(name)
    names = [each.name for network in networks for each in network.get_parameters()]
    optimizers = [Averaging(nn.Momentum(network.trainable_params(), 0.01, 0.9)) for network in networks]
    accumulator = Accumulator(networks, optimizers)
    with accumulator.accumulate():
        for network in networks:
            accumulator.backward(*map(Tensor, batches()[0]), network=network)
        accumulator.step()
    assert [each.name for network in networks for each in network.get_parameters()] == names


@pytest.mark.parametrize("around", [Averaging, lambda inner: Averaging(Averaging(inner))])
@pytest.mark.parametrize("inner", [nn.Momentum, experimental.SGD])
def test_the_rate_that_is_reported_is_that_of_the_optimizer_inside(inner, around, mode):
    network = one_layer()
    optimizer = around(inner(network.trainable_params(), 0.01, 0.9))
    (output,) = train(accumulated_step(network, optimizer, 4), batches()[:1])
    assert output.learning_rate.asnumpy() == np.float32(0.01)


def test_the_loss_scale_is_that_of_the_optimizer_inside(eager, recwarn):
    """MindSpore's step would leave the gradients scaled, and the optimizer would divide them."""
    weights = []
    for scale, settings in (1.0, {}), (8.0, {"mixed_precision": amp.FixedLossScaleManager(8, False)}):
        network = one_layer()
        optimizer = Averaging(nn.Momentum(network.trainable_params(), 0.01, 0.9, loss_scale=scale))
        train(TrainOneStepCell(network, optimizer, check_loss=False, **settings), batches())
        weights.append(values_of({each.name: each for each in network.get_parameters()}))
    assert_same(*weights)
    assert not [each for each in recwarn if "loss_scale" in str(each.message)]


RATES = [
    nn.ExponentialDecayLR(0.004, 0.5, 2),
    nn.NaturalExpDecayLR(0.004, 0.5, 2, is_stair=True),
    nn.InverseDecayLR(0.004, 0.5, 1),
    nn.CosineDecayLR(0.001, 0.004, 4),
    nn.PolynomialDecayLR(0.004, 0.001, 4, 0.5),
    nn.WarmUpLR(0.004, 3),
    [0.001, 0.004, 0.002, 0.003, *[0.001] * 12],
    0.002,
]


def rate_groups(network):
    groups = [{"params": [p], "lr": rate} for p, rate in zip(network.trainable_params(), RATES)]
    return nn.Momentum(groups, 0.001, 0.5)


def added_matrices():
    return RowLoss(AddedMatrices(len(RATES)))


def rate_at(rate, update):
    if isinstance(rate, nn.Cell):
        return float(rate(Tensor(update, ms.int32)).asnumpy())
    return rate[update] if isinstance(rate, list) else rate


def test_every_schedule_moves_once_per_update(mode):
    whole, results = trained(added_matrices, rate_groups)
    assert_like_whole_batch(whole, *results[mode])


def test_output_reports_the_learning_rates_that_the_update_used(mode):
    outputs, _ = trained(added_matrices, rate_groups)[1][mode]
    for update, output in enumerate(outputs):
        expected = [rate_at(rate, update) for rate in RATES]
        # The powers in a compiled schedule differ from those of an eager one by 1e-5.
        np.testing.assert_allclose(output.learning_rate.asnumpy(), expected, rtol=1e-4)


def half_first_layer():
    return RowLoss(HalfFirstLayer())


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda network: nn.Momentum(network.trainable_params(), 0.005, 0.9),
        lambda network: nn.Adam(network.trainable_params(), 0.1, eps=1.0),
    ],
)
def test_float16_weights_get_float16_gradients(make_optimizer):
    # Op by op, what is in float16 is rounded elsewhere.
    whole = WholeBatch(half_first_layer, make_optimizer, compiled=True)
    # A float16 has 11 bits, and the micro batches round each on its own.
    assert_not_vacuous(whole, micro_size=4, tolerance=2e-3, detected=2)
    for outputs, values in accumulate(half_first_layer, make_optimizer, 4, BOTH).values():
        assert_like_whole_batch(whole, outputs, values, tolerance=2e-3)
        assert {name: v.dtype for name, v in values.items()} == {name: v.dtype for name, v in whole.values.items()}
