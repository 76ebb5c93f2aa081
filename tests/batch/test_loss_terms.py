"""A loss of several terms over one weight: cross-entropy by tokens, and an auxiliary loss of each micro batch."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from step_probe import KeepGradients, number

from ms_gradaccum import GradAccumulation, TrainOneStepCell

FACTOR = 0.5


class TwoTerms(nn.Cell):
    """(sum of weight * token over the valid tokens, their number), with an auxiliary loss in the sum.

    Tokens that are not above 0 are padding. The auxiliary loss, the square of weight * largest token, is that of
    a micro batch and no mean over its tokens.
    """

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32([1.0, 2.0])), "weight")

    def construct(self, tokens):
        valid = ops.cast(tokens > 0, ms.float32)
        linear = (self.weight[0] * tokens * valid).sum()
        auxiliary = ops.square(self.weight[1] * tokens.max())
        return linear + FACTOR * auxiliary * valid.sum(), valid.sum()


# Four micro batches of 3 tokens, of which 1, 3, 2 and none count.
TOKENS = np.float32([[3, -1, 0], [1, 2, 5], [4, 4, -2], [-1, -1, -4]])


def test_an_auxiliary_loss_in_the_sum_is_a_mean_by_the_weight_of_the_micro_batches(network_mode):
    network = TwoTerms()
    step = TrainOneStepCell(GradAccumulation(network, 4, weighted=True), KeepGradients(network.trainable_params()))
    output = step(Tensor(TOKENS))
    mean = TOKENS[TOKENS > 0].mean()
    tokens, squares = (TOKENS > 0).sum(1), TOKENS.max(1) ** 2
    auxiliary = np.average(squares, weights=tokens)
    np.testing.assert_allclose(step.optimizer.gradients()[0], [mean, FACTOR * 4 * auxiliary], rtol=1e-6)
    assert number(output.loss) == pytest.approx(mean + FACTOR * 4 * auxiliary, rel=1e-6)
    assert number(output.weight) == 6
    # The mean over micro batches, whatever they weigh, is another number; so is a sum that is not multiplied.
    assert not np.isclose(auxiliary, squares.mean(), rtol=0.1)
    assert not np.isclose(auxiliary, squares.sum() / tokens.sum(), rtol=0.1)
