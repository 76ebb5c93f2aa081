"""Means over tokens whose number the network returns or the loop gives: exact, as one batch is."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from refusal import refuses, told

from ms_gradaccum import Accumulator, GradAccumulation, GradCacheLoss, TokenMeanLoss, TrainOneStepCell

PADDING = -100
CLASSES = 4
# The tokens of each row; rows 6 to 8 have none.
LENGTHS = [5, 1, 3, 2, 4, 1, 0, 0, 0, 5, 2, 3]
BATCHES = [slice(begin, begin + 3) for begin in range(0, 12, 3)]
UPDATES = 2


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(len(LENGTHS), 5, 3)).astype(np.float32)
Y = RANDOM.integers(0, CLASSES, size=X.shape[:2]).astype(np.int32)
Y[np.arange(5) >= np.array(LENGTHS)[:, None]] = PADDING
START = np.random.default_rng(1).normal(size=(CLASSES, 3)).astype(np.float32)


class TokenMean(nn.Cell):
    def __init__(self, network, returns_tokens):
        super().__init__()
        self.network, self.returns_tokens = network, returns_tokens
        self.loss = nn.CrossEntropyLoss(ignore_index=PADDING)

    def construct(self, x, y):
        mean = self.loss(self.network(x).reshape(-1, 4), y.reshape(-1))
        return (mean, (y != -100).sum()) if self.returns_tokens else mean


def build(returns_tokens=False):
    network = nn.Dense(3, CLASSES, weight_init=Tensor(START), bias_init="zeros")
    return network, TokenMean(network, returns_tokens), nn.Momentum(network.trainable_params(), 0.3, 0.9)


@pytest.fixture(scope="module")
def whole():
    """The weights after two updates of MindSpore's own step with all rows."""
    network, loss, optimizer = build()
    step = nn.TrainOneStepCell(loss, optimizer).set_train()
    for _ in range(UPDATES):
        value = step(Tensor(X), Tensor(Y))
    return network.weight.asnumpy(), float(value)


@pytest.mark.parametrize("settings", [{}, {"bad_micro_batch": "drop"}], ids=["skip", "drop"])
def test_a_batch_counts_by_the_number_that_the_loop_gives(mode, whole, settings):
    network, loss, optimizer = build()
    accumulator = Accumulator(loss, optimizer, len(BATCHES), **settings)
    losses = []
    with told("For '") as said:
        for rows in BATCHES * UPDATES:
            weight = int(sum(LENGTHS[rows]))
            losses.append(float(accumulator.backward(Tensor(X[rows]), Tensor(Y[rows]), weight=weight)))
            output = accumulator.step()
    np.testing.assert_allclose(network.weight.asnumpy(), whole[0], rtol=1e-5, atol=1e-6)
    assert float(output.loss) == pytest.approx(whole[1], rel=1e-5)
    assert float(output.weight) == sum(LENGTHS)
    assert losses[2] == 0.0  # The batch without tokens.
    assert said == []


# Each micro size in one mode.
SIZES = {"PYNATIVE-1": (ms.PYNATIVE_MODE, 1), "GRAPH-4": (ms.GRAPH_MODE, 4)}
SIZES |= {"PYNATIVE-5": (ms.PYNATIVE_MODE, 5), "GRAPH-12": (ms.GRAPH_MODE, 12)}


@pytest.mark.parametrize("mode, micro_size", SIZES.values(), indirect=["mode"], ids=SIZES)
def test_a_micro_batch_counts_by_the_number_that_the_network_returns(mode, whole, micro_size):
    network, loss, optimizer = build(returns_tokens=True)
    step = TrainOneStepCell(GradAccumulation(loss, micro_size, weighted="mean"), optimizer, check_loss=False)
    for _ in range(UPDATES):
        output = step(Tensor(X), Tensor(Y))
    np.testing.assert_allclose(network.weight.asnumpy(), whole[0], rtol=1e-5, atol=1e-6)
    assert float(output.loss) == pytest.approx(whole[1], rel=1e-5)
    assert float(output.weight) == sum(LENGTHS)


def test_half_precision_keeps_sums_beyond_its_range(mode, whole):
    network, loss, optimizer = build(returns_tokens=True)
    loss_cell = GradAccumulation(loss, 5, weighted="mean")
    step = TrainOneStepCell(loss_cell, optimizer, mixed_precision="fp16", check_loss=False)
    for _ in range(UPDATES):
        step(Tensor(X), Tensor(Y))
    np.testing.assert_allclose(network.weight.asnumpy(), whole[0], atol=2e-3)


@pytest.mark.parametrize(
    "cell, text",
    [
        (lambda loss: GradAccumulation(loss, 2), "a batch that is split"),
        (lambda loss: GradAccumulation(loss, 1, weighted="mean"), "a network with weights of its own"),
        (lambda loss: TokenMeanLoss(loss.network), "a network with weights of its own"),
        (lambda loss: GradCacheLoss(loss.network, nn.MSELoss(), labels=1), "a loss over all rows"),
    ],
)
def test_a_number_is_refused_where_micro_batches_have_their_own(cell, text, eager):
    _, loss, optimizer = build()
    with pytest.raises(ValueError, match=text):
        Accumulator(cell(loss), optimizer).backward(Tensor(X), Tensor(Y), weight=3)


def test_an_argument_of_the_network_with_this_name_is_given_by_position(eager):
    class Weighted(nn.Cell):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def construct(self, x, weight):
            return (self.network(x).mean((1, 2)) * weight).mean()

    network, _, optimizer = build()
    accumulator = Accumulator(Weighted(network), optimizer, check_loss=False)
    with refuses(ValueError, "'weight'", "given by position"):
        accumulator.backward(Tensor(X), weight=Tensor(np.ones(12, np.float32)))
    accumulator.backward(Tensor(X), Tensor(np.ones(12, np.float32)))
    assert bool(accumulator.step().updated)


@pytest.mark.parametrize("weight", [True, -1, float("nan"), float("inf"), "3", Tensor([1.0, 2.0])], ids=str)
def test_a_weight_must_be_a_number_of_at_least_0(weight, eager):
    _, loss, optimizer = build()
    with refuses((TypeError, ValueError), "'weight'"):
        Accumulator(loss, optimizer).backward(Tensor(X), Tensor(Y), weight=weight)


def test_a_network_that_says_it_returns_a_sum_returns_no_mean():
    with refuses(ValueError, "'weighted'"):
        GradAccumulation(TokenMeanLoss(build()[0]), 2, weighted="mean")
