"""The loss of micro batches by tokens is measured against rows with all of their padding."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_gradaccum import GradAccumulation, TokenMeanLoss, TrainOneStepCell
from ms_gradaccum.advice.loss_of_rows import LossOfRows

LONGEST = 40
LENGTHS = [3, 40, 9, 1, 17, 24, 5, 33]
WORD = "padding that micro_tokens cuts off"


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


def said_of(network, recwarn):
    accumulation = GradAccumulation(network, micro_tokens=64, lengths=lambda x, labels: labels != -100)
    step = TrainOneStepCell(accumulation, nn.SGD(network.trainable_params(), 0.1)).set_train()
    for seed in range(4):
        step(*batch(seed))
    return [str(each.message) for each in recwarn if "For '" in str(each.message)]


@pytest.mark.parametrize("sees", ["itself", "earlier tokens"])
def test_a_loss_that_ignores_its_padding_is_exact(sees, network_mode, recwarn):
    assert said_of(TokenMeanLoss(Tokens(sees)), recwarn) == []


def test_a_loss_that_reads_its_padding_is_named_once(network_mode, recwarn):
    (said,) = said_of(TokenMeanLoss(Tokens("all tokens")), recwarn)
    assert WORD in said


def test_the_measurement_joins_no_more_rows_than_fit_with_their_padding(eager, recwarn, monkeypatch):
    shapes = []
    loss_of = LossOfRows.of

    def recording(self, rows, *settings):
        shapes.append(rows.tensors[1].shape)
        return loss_of(self, rows, *settings)

    monkeypatch.setattr(LossOfRows, "of", recording)
    assert said_of(TokenMeanLoss(Tokens("itself")), recwarn) == []
    # One row of each of two micro batches: more would be three times the tokens of a micro batch.
    assert {rows for rows, length in shapes if length == LONGEST} == {1, 2}
    assert max(rows * length for rows, length in shapes) == 2 * LONGEST
