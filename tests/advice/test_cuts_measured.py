"""The measurement of a loss where batches are cut otherwise: by tokens, or once more when memory has run out."""

import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Tensor, nn, ops
from refusal import told
from step_probe import sgd_step

from ms_gradaccum import GradAccumulation, TokenMeanLoss, TrainOneStepCell
from ms_gradaccum.advice.loss_of_rows import LossOfRows

LONGEST = 40
LENGTHS = [3, 40, 9, 1, 17, 24, 5, 33]


class Tokens(nn.Cell):
    """Logits of each token, alone, from all tokens up to it, or from all tokens of its row."""

    def __init__(self, sees):
        super().__init__()
        self.head = nn.Dense(3, 4)
        self.sees = sees

    def construct(self, x):
        if self.sees == "earlier tokens":
            x = ops.cumsum(x, 1)
        elif self.sees == "all tokens":
            x = x + x.mean(1, keep_dims=True)
        return self.head(ops.tanh(x))


def batch(seed):
    random = np.random.default_rng(seed)
    x = random.normal(0, 0.5, (len(LENGTHS), LONGEST, 3)).astype(np.float32)
    labels = random.integers(0, 4, x.shape[:2]).astype(np.int32)
    labels[np.arange(LONGEST) >= random.permutation(LENGTHS)[:, None]] = -100
    return Tensor(x), Tensor(labels)


def said_of(network):
    accumulation = GradAccumulation(network, micro_tokens=64, lengths=lambda x, labels: labels != -100)
    step = TrainOneStepCell(accumulation, sgd(network, 0.1)).set_train()
    with told("For '") as said:
        for seed in range(4):
            step(*batch(seed))
    return said


@pytest.mark.parametrize("sees", ["itself", "earlier tokens"])
def test_a_loss_that_ignores_its_padding_is_exact(sees, network_mode):
    assert said_of(TokenMeanLoss(Tokens(sees))) == []


def test_a_loss_that_reads_its_padding_is_named_once(network_mode):
    (said,) = said_of(TokenMeanLoss(Tokens("all tokens")))
    assert "padding that micro_tokens cuts off" in said


def test_the_measurement_joins_no_more_rows_than_fit_with_their_padding(eager, monkeypatch):
    shapes = []
    loss_of = LossOfRows.of

    def recording(self, rows, *settings):
        shapes.append(rows.tensors[1].shape)
        return loss_of(self, rows, *settings)

    monkeypatch.setattr(LossOfRows, "of", recording)
    assert said_of(TokenMeanLoss(Tokens("itself"))) == []
    # One row of each of two micro batches: more would be three times the tokens of a micro batch.
    assert {rows for rows, length in shapes if length == LONGEST} == {1, 2}
    assert max(rows * length for rows, length in shapes) == 2 * LONGEST


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_measurement_begins_with_the_first_split(reduction, eager):
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss(reduction))
    errors = [RuntimeError("Allocate output memory failed")]

    def lacks_memory_once(cell, inputs, output):
        if errors:
            raise errors.pop()

    network.register_forward_hook(lacks_memory_once)
    step = sgd_step(network, "auto", 0.01)
    with told("For '") as said:
        for _ in range(3):
            step(Tensor(x), Tensor(x[:, :1]))
    assert "the memory is not enough for 1 micro batch" in said[0]
    found = ["the loss of two micro batches together" in each for each in said[1:]]
    assert found == ([True] if reduction == "sum" else [])
