"""A loss that was a whole batch is measured once its batches are split because memory has run out."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_gradaccum import GradAccumulation, TrainOneStepCell

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = Tensor(X), Tensor(X[:, :1])


class LacksMemory:
    """A forward hook that lacks memory for all rows of the batch. The measurement leaves hooks out."""

    def __call__(self, cell, inputs, output):
        if inputs[0].shape[0] == 8:
            raise RuntimeError("Allocate output memory failed")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_measurement_begins_with_the_first_split(reduction, eager, recwarn):
    network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss(reduction))
    network.register_forward_hook(LacksMemory())
    step = TrainOneStepCell(GradAccumulation(network, "auto"), nn.SGD(network.trainable_params(), 0.01))
    for _ in range(3):
        step(*BATCH)
    said = [str(each.message) for each in recwarn if "For '" in str(each.message)]
    assert "the memory is not enough for 1 micro batch" in said[0]
    found = ["the loss of two micro batches together" in each for each in said[1:]]
    assert found == ([True] if reduction == "sum" else [])
