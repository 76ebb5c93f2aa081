"""BatchNorm in training: which classes are warned of, and when."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import batches, sgd
from mindspore import Parameter, Tensor, mint, nn, ops
from refusal import told
from step_probe import Of, sgd_step

from ms_gradaccum import GradAccumulation, Model, TrainOneStepCell

TAKES = "takes the mean and the variance"
SHAPES = {1: (4, 2), 2: (4, 2, 3, 3), 3: (4, 2, 2, 3, 3)}


def normalised(norm):
    return Of(norm, lambda out: (out**2).sum() / len(out))


def warnings_of(norm, axes, micro_size=2, training=True, outer=lambda step: lambda x: step(x).loss, **settings):
    """Return what is warned of in one window over ``norm``."""
    cell = normalised(norm).set_train(training)
    step = sgd_step(cell, micro_size, **settings)
    x = Tensor(np.random.default_rng(0).normal(size=SHAPES[axes]).astype(np.float32))
    with told() as said:
        loss = outer(step)(x)
    assert np.isfinite(loss.asnumpy())
    # One that does not follow its mode does not miss it.
    idle = not training and getattr(getattr(norm, "bn2d", norm), "use_batch_statistics", None) is None
    assert any("is in evaluation mode" in each for each in said) == idle
    return [each for each in said if TAKES in each or "is not the mean of their losses" in each]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_each_batch_norm_of_mindspore_trains_and_is_warned_of(axes, eager):
    build = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1]
    assert len(warnings_of(build(2), axes)) == 1
    assert warnings_of(build(2, use_batch_statistics=False), axes) == []
    assert warnings_of(build(2), axes, training=False) == []
    assert len(warnings_of(build(2, use_batch_statistics=True), axes, training=False)) == 1
    # One batch that is whole has the statistics of the whole batch.
    assert warnings_of(build(2), axes, micro_size=1) == []
    assert len(warnings_of(build(2), axes, micro_size=1, accumulation_steps=2)) == 1


def test_a_step_in_a_larger_graph_is_warned_of_as_one_that_python_calls(eager):
    def in_graph(step):
        @ms.jit
        def loss_of(x):
            return step(x)[0]

        return loss_of

    # The measurement, which a graph cannot have, would be named, too.
    inside = {"check_loss": False, "outer": in_graph}
    assert len(warnings_of(nn.BatchNorm1d(2), 1, **inside)) == 1
    assert warnings_of(nn.BatchNorm1d(2), 1, training=False, **inside) == []


@pytest.mark.parametrize("share, count", [(0.0, 0), (0.5, 1)])
def test_an_lstm_that_drops_nothing_trains_in_evaluation_mode(share, count, eager):
    step = sgd_step(Of(nn.LSTM(2, 2, 2, dropout=share), lambda out: out[0].square().mean()), 1)
    with told("is in evaluation mode") as said:
        step(Tensor(np.ones((3, 4, 2), np.float32)))
    assert len(said) == count


@pytest.mark.parametrize("kind", [mint.nn.BatchNorm2d, nn.SyncBatchNorm, mint.nn.SyncBatchNorm])
def test_a_batch_norm_of_another_platform_is_one(kind, eager):
    class Here(kind):
        """The warning does not depend on how it computes; its operators exist only on Ascend."""

        def __init__(self):
            nn.Cell.__init__(self)
            self.factor = Parameter(Tensor(2.0))

        def construct(self, x):
            return self.factor * x

    assert len(warnings_of(Here(), 2)) == 1


class ByFunction(nn.Cell):
    """Calls the function; what it says of training is an expression in the source."""

    def __init__(self):
        super().__init__()
        self.mean, self.variance = Tensor(np.zeros(2, np.float32)), Tensor(np.ones(2, np.float32))
        self.gamma, self.beta = Parameter(Tensor(np.ones(2, np.float32))), Parameter(Tensor(np.zeros(2, np.float32)))


class InTraining(ByFunction):
    def construct(self, x):
        return ops.batch_norm(x, self.mean, self.variance, self.gamma, self.beta, training=True)


class AsTheCell(ByFunction):
    def construct(self, x):
        return ops.batch_norm(x, self.mean, self.variance, self.gamma, self.beta, self.training)


class WithFixed(ByFunction):
    def construct(self, x):
        return ops.batch_norm(x, self.mean, self.variance, self.gamma, self.beta, training=False)


class ByDefault(ByFunction):
    def construct(self, x):
        return ops.batch_norm(x, self.mean, self.variance, self.gamma, self.beta)


@pytest.mark.parametrize("kind, count", [(InTraining, 1), (AsTheCell, 1), (WithFixed, 0), (ByDefault, 0)])
def test_the_function_goes_by_what_it_is_given(kind, count, eager):
    assert len(warnings_of(kind(), 1)) == count
    assert warnings_of(kind(), 1, micro_size=1) == []


class Blocks(nn.Cell):
    def __init__(self, **settings):
        super().__init__()
        self.block = nn.SequentialCell(nn.Dense(1, 2, "ones"), nn.BatchNorm1d(2, **settings), nn.Dropout(p=0.5))
        self.last = nn.Dense(2, 1)

    def construct(self, x):
        return self.last(self.block(x))


def woken_by_model(network):
    model = Model(GradAccumulation(network, 2), nn.MSELoss(), sgd(network), metrics={"loss"})
    with told("For 'Model', train() sets") as said:
        model.train(1, batches(4))
        model.eval(batches(4))
        model.train(1, batches(4))
    return said


FROZEN = {
    "a norm": lambda network: network.block[1].set_train(False),
    "a block": lambda network: network.block.set_train(False),
    "a norm in training": lambda network: network.set_train().block[1].set_train(False),
    "a block in training": lambda network: network.set_train().block.set_train(False),
}


@pytest.mark.parametrize("freeze", FROZEN.values(), ids=FROZEN)
def test_a_frozen_cell_that_a_model_wakes_is_named_once(freeze, eager):
    network = Blocks()
    freeze(network)
    (said,) = woken_by_model(network)
    assert "BatchNorm1d 'network.block.1', which was in evaluation mode" in said


@pytest.mark.parametrize(
    "prepare",
    [
        lambda network: None,
        lambda network: network.set_train(),
        lambda network: network.set_train(False),
        lambda network: [cell.set_train(False) for _, cell in network.cells_and_names()],
        lambda network: network.set_train().set_train(False),
    ],
)
def test_a_network_that_was_evaluated_as_a_whole_is_not(prepare, eager):
    network = Blocks()
    prepare(network)
    assert woken_by_model(network) == []


@pytest.mark.parametrize("first, second", [(2, 1), (1, 2)])
def test_another_step_on_the_same_cell_changes_nothing_of_what_is_warned_of(first, second, eager):
    cell = normalised(nn.BatchNorm1d(2)).set_train()
    loss_cell = GradAccumulation(cell, 1)
    before = set(vars(loss_cell))
    steps = [TrainOneStepCell(loss_cell, sgd(cell), accumulation_steps=steps) for steps in (first, second)]
    for step, batches_of_one in zip(steps, (first, second)):
        with told(TAKES) as said:
            step(Tensor(np.random.default_rng(0).normal(size=SHAPES[1]).astype(np.float32)))
        assert len(said) == (batches_of_one > 1)
    assert set(vars(loss_cell)) == before
