"""A loss that was a whole batch is measured once its batches are split because memory has run out."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_gradaccum import GradAccumulation, TrainOneStepCell

BATCH = Tensor(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))


class Square(nn.Cell):
    """A mean or a sum over rows."""

    def __init__(self, is_sum):
        super().__init__()
        self.line = nn.Dense(3, 1)
        self.is_sum = is_sum

    def construct(self, x):
        squares = self.line(x).square()
        return squares.sum() if self.is_sum else squares.mean()


class LacksMemory:
    """A forward hook that lacks memory for all rows of the batch. The measurement leaves hooks out."""

    def __call__(self, cell, inputs, output):
        if inputs[0].shape[0] == 8:
            raise RuntimeError("Allocate output memory failed")


@pytest.mark.parametrize("is_sum", [True, False])
def test_the_measurement_begins_with_the_first_split(is_sum, eager, recwarn):
    network = Square(is_sum)
    network.register_forward_hook(LacksMemory())
    step = TrainOneStepCell(GradAccumulation(network, "auto"), nn.SGD(network.trainable_params(), 0.01))
    for _ in range(3):
        step(BATCH)
    said = [str(each.message) for each in recwarn if "For '" in str(each.message)]
    assert "the memory is not enough for 1 micro batch" in said[0]
    found = ["the loss of two micro batches together" in each for each in said[1:]]
    assert found == ([True] if is_sum else [])
