"""Clipping under a loss scale, on an MLP and a tiny transformer: after unscaling, as float32 training clips."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from step_probe import KeepGradients, number

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, TokenMeanLoss, TrainOneStepCell

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


class Transformer(nn.Cell):
    """One causal block over token embeddings, a language model of 11 tokens."""

    def __init__(self, tokens=11, width=8):
        super().__init__()
        table = np.random.default_rng(2).normal(size=(tokens, width)).astype(np.float32)
        self.table = Parameter(Tensor(table), "table")
        self.qkv, self.out = dense(width, 3 * width, 3), dense(width, width, 4)
        self.up, self.down = dense(width, 2 * width, 5), dense(2 * width, width, 6)
        self.head = dense(width, tokens, 7)
        self.norms = nn.CellList([nn.LayerNorm((width,)), nn.LayerNorm((width,))])
        self.width = width

    def construct(self, ids):
        x = ops.gather(self.table, ids, 0)
        query, key, value = ops.split(self.qkv(self.norms[0](x)), self.width, -1)
        scores = ops.matmul(query, key.swapaxes(-1, -2)) / self.width**0.5
        length = ids.shape[1]
        future = Tensor(np.triu(np.full((length, length), -1e4, np.float32), 1))
        x = x + self.out(ops.matmul(ops.softmax(scores.astype(ms.float32) + future).astype(value.dtype), value))
        return self.head(x + self.down(ops.relu(self.up(self.norms[1](x)))))


def mlp():
    generator = np.random.default_rng(8)
    x, y = generator.normal(size=(8, 5)).astype(np.float32), 3 * generator.normal(size=(8, 3)).astype(np.float32)
    network = Mlp()
    return network, nn.WithLossCell(network, nn.MSELoss()), (x, y)


def transformer():
    ids = np.random.default_rng(9).integers(0, 11, (8, 7)).astype(np.int32)
    labels = ids[:, 1:].copy()
    labels[3:5, 2:] = -100  # micro batches of different numbers of tokens
    network = Transformer()
    return network, TokenMeanLoss(network), (ids[:, :-1], labels)


def gradients(build, micro_size, **settings):
    """The gradient that the optimizer is given, as one vector, and the report."""
    network, loss_cell, inputs = build()
    step = TrainOneStepCell(
        GradAccumulation(loss_cell, micro_size), KeepGradients(network.trainable_params()), **settings
    )
    output = step(*[Tensor(array) for array in inputs])
    return np.concatenate([gradient.ravel() for gradient in step.optimizer.gradients()]), output


@pytest.mark.parametrize("build", [mlp, transformer])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_limit_is_one_of_the_unscaled_gradient(build, level):
    whole, _ = gradients(build, 1)  # float32, the whole batch, not clipped
    norm = np.linalg.norm(whole.astype(np.float64))
    assert norm > 5 * LIMIT  # otherwise the test proves nothing
    expected = whole * LIMIT / norm
    precision = MixedPrecision("fp16", level, init_scale=SCALE)
    got, output = gradients(build, 4, mixed_precision=precision, clip=ClipByGlobalNorm(LIMIT))
    tolerance = 1e-5 if level == "O0" else 2e-2
    assert number(output.updated)
    assert np.linalg.norm(got - expected) < tolerance * LIMIT
    assert number(output.grad_norm) == pytest.approx(norm, rel=tolerance)
    assert number(output.clipped_grad_norm) == pytest.approx(LIMIT, rel=1e-6)
