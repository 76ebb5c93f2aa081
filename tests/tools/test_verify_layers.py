"""verify names the layers and the state by which micro batches differ from the whole batch."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from verify_probe import UNKNOWN, assert_causes, batch, differing

from ms_gradaccum import GradCacheLoss, verify

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(8, 2)).astype(np.float32)
Y = RANDOM.normal(size=(8, 1)).astype(np.float32)

BATCH_NORM = "BatchNorm (norm)"
DROPOUT = "Dropout (drop)"
OF_STATE = "The forward pass changes 'norm.seen', and the loss depends on it"


class Network(nn.Cell):
    """A scale, whatever layers there are, and a mean loss."""

    def __init__(self, norm=None, drop=None):
        super().__init__()
        self.scale = Parameter(Tensor([1.0, -1.0]), "scale")
        self.norm = norm or nn.Identity()
        self.drop = drop or nn.Identity()

    def construct(self, x, y):
        return ops.square(self.drop(self.norm(x * self.scale)).sum(-1, keepdims=True) - y).mean()


GAMMA, SCALE = ("norm.gamma", "gradient"), ("scale", "gradient")
MEAN, VARIANCE = ("norm.moving_mean", "state"), ("norm.moving_variance", "state")


def test_batch_norm_and_its_moving_averages(mode):
    network = Network(nn.BatchNorm1d(2))
    report = verify(network, batch(X, Y), 2)
    assert_causes(report, BATCH_NORM)
    assert "the moving averages move 2 times instead of once" in report.causes[0]
    # What is normalised has the mean 0 however it is split, so that beta has the gradient of the whole batch.
    assert {GAMMA, MEAN, VARIANCE} <= differing(report) <= {GAMMA, MEAN, VARIANCE, SCALE}
    # Its momentum is 0.9: the average moves by a tenth of the way, twice or once.
    outputs = (X * [1, -1]).astype(np.float64)
    twice = 0.09 * outputs[:4].mean(0) + 0.1 * outputs[4:].mean(0)
    (entry,) = (entry for entry in report.parameters if (entry.name, entry.kind) == MEAN)
    # All is as it was.
    assert not network.training and network.norm.moving_mean.asnumpy().tolist() == [0, 0]
    assert entry.max_difference == pytest.approx(np.abs(twice - 0.1 * outputs.mean(0)).max(), rel=1e-4)


def test_batch_norm_of_the_whole_batch_in_one_part_is_no_cause(eager):
    network = Network(nn.BatchNorm1d(2))

    class Doubled(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.network = network

        def construct(self, x, y):
            return self.network(x, y) * 2

    assert_causes(verify(network, batch(X, Y), 1, reference=Doubled()), "network differs from reference")


class Pairs(nn.Cell):
    """The loss of each row and all others, which a GradCacheLoss has of the whole batch."""

    def construct(self, x):
        return ops.square(ops.matmul(x, x.T)).mean()


def test_a_grad_cache_loss_is_not_measured(eager):
    encoder = nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm1d(2))
    assert_causes(verify(GradCacheLoss(encoder, Pairs()), batch(X), 2), "BatchNorm (")


def test_frozen_batch_norm_is_equal(monkeypatch):
    network = Network(nn.BatchNorm1d(2)).set_train()
    network.norm.set_train(False)
    assert verify(network, batch(X, Y), 2).equal
    monkeypatch.setenv("MS_JIT", "0")
    assert verify(Network(nn.BatchNorm1d(2, use_batch_statistics=False)), batch(X, Y), 2).equal
    # In evaluation mode as a whole it has not begun to train: nothing in it has been frozen.
    network.set_train(False)
    assert not verify(network, batch(X, Y), 2).equal


def test_dropout(mode):
    report = verify(Network(drop=nn.Dropout(p=0.5)), batch(X, Y), 2)
    assert_causes(report, DROPOUT)
    assert differing(report) == {SCALE}


class Noise(nn.Cell):
    def construct(self, x):
        return x * ops.rand(x.shape)


def test_random_numbers_of_no_layer_are_no_fault_of_the_loss(eager):
    assert_causes(verify(Network(drop=Noise()), batch(X, Y), 2), UNKNOWN)


class Counter(nn.Cell):
    """Counts its calls and, if told so, scales by their number."""

    def __init__(self, scales):
        super().__init__()
        self.seen = Parameter(Tensor(1.0), "seen", requires_grad=False)
        self.scales = scales

    def construct(self, x):
        seen = ops.assign_add(self.seen, Tensor(1.0))
        return x * ops.stop_gradient(seen) if self.scales else ops.depend(x, seen)


def test_state_that_the_forward_pass_changes(eager):
    report = verify(Network(Counter(scales=False)), batch(X, Y), 4)
    assert_causes(report, "State of the network (norm.seen)")
    (entry,) = (entry for entry in report.parameters if entry.differs)
    # 5 after four micro batches, 2 after one batch.
    assert (entry.name, entry.kind, entry.max_difference, entry.norm_ratio) == ("norm.seen", "state", 3, 2.5)
    report = verify(Network(Counter(scales=True)), batch(X, Y), 4)
    assert_causes(report, "State of the network (norm.seen)", OF_STATE)
    assert differing(report) == {("norm.seen", "state"), SCALE}
