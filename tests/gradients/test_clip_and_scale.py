"""Clipping under a loss scale: after unscaling, as float32 training clips."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from step_probe import KeepGradients, number

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, TrainOneStepCell

SCALE, LIMIT = 4096.0, 0.1


pytestmark = pytest.mark.usefixtures("eager")


def dense(inputs, outputs, seed):
    weights = np.random.default_rng(seed).normal(size=(outputs, inputs)) / np.sqrt(inputs)
    return nn.Dense(inputs, outputs, Tensor(weights.astype(np.float32)), "zeros")


class Mlp(nn.Cell):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = dense(5, 8, 0), dense(8, 3, 1)

    def construct(self, x):
        return self.second(ops.tanh(self.first(x)))


def mlp():
    generator = np.random.default_rng(8)
    x, y = generator.normal(size=(8, 5)).astype(np.float32), 3 * generator.normal(size=(8, 3)).astype(np.float32)
    network = Mlp()
    return network, nn.WithLossCell(network, nn.MSELoss()), (x, y)


def gradients(micro_size, **settings):
    """The gradient that the optimizer is given, as one vector, and the report."""
    network, loss_cell, inputs = mlp()
    step = TrainOneStepCell(
        GradAccumulation(loss_cell, micro_size), KeepGradients(network.trainable_params()), **settings
    )
    output = step(*[Tensor(array) for array in inputs])
    return np.concatenate([gradient.ravel() for gradient in step.optimizer.gradients()]), output


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_limit_is_one_of_the_unscaled_gradient(level):
    whole, _ = gradients(1)  # float32, the whole batch, not clipped
    norm = np.linalg.norm(whole.astype(np.float64))
    assert norm > 5 * LIMIT  # otherwise the test proves nothing
    expected = whole * LIMIT / norm
    precision = MixedPrecision("fp16", level, init_scale=SCALE)
    got, output = gradients(4, mixed_precision=precision, clip=ClipByGlobalNorm(LIMIT))
    tolerance = 1e-5 if level == "O0" else 2e-2
    assert number(output.updated)
    assert np.linalg.norm(got - expected) < tolerance * LIMIT
    assert number(output.grad_norm) == pytest.approx(norm, rel=tolerance)
    assert number(output.clipped_grad_norm) == pytest.approx(LIMIT, rel=1e-6)
