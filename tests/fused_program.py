"""Windows whose graphs MindSpore fuses, beside NumPy; writes what differs as JSON. Runs in a process of its own."""

import json
import sys

import mindspore as ms
import numpy as np
from mindspore import JitConfig, Tensor, nn

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TrainOneStepCell

RATE, MOMENTUM, LIMIT = 0.1, 0.9, 0.5
FUSION = JitConfig(jit_level="O1", graph_kernel_flags="--opt_level=2 --disable_expand_ops=AssignAdd")


def gradients(weights, x, y):
    """Gradients of the mean squared error of a layer of tanh and a linear one, in float64."""
    w, b, v = weights
    hidden = np.tanh(x @ w.T + b)
    error = 2 * (hidden @ v.T - y) / y.size
    back = error @ v * (1 - hidden**2)
    return [back.T @ x, back.sum(0), error.T @ hidden]


class Expected:
    """Momentum of SGD with clipping, in float64."""

    def __init__(self, weights):
        self.weights = [weight.astype(np.float64) for weight in weights]
        self.moments = [np.zeros_like(weight) for weight in self.weights]

    def update(self, x, y):
        grads = gradients(self.weights, x, y)
        norm = np.sqrt(sum((grad**2).sum() for grad in grads))
        for i, grad in enumerate(grads):
            self.moments[i] = MOMENTUM * self.moments[i] + grad * min(1.0, LIMIT / norm)
            self.weights[i] = self.weights[i] - RATE * self.moments[i]
        return norm


def run(mode):
    """Return the largest differences of norms and weights in four windows, between them one of NaN."""
    ms.set_context(mode=mode)
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 3, has_bias=False))
    weights = network.trainable_params()
    step = TrainOneStepCell(
        GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4),
        nn.Momentum(weights, RATE, MOMENTUM),
        clip=ClipByGlobalNorm(LIMIT),
    )
    step.set_jit_config(FUSION)
    expected = Expected([weight.asnumpy() for weight in weights])
    random = np.random.default_rng(0)
    off = {"norm": 0.0, "weights": 0.0}
    for window in range(4):
        # Micro batches of 3, 3, 2 and 2 rows.
        x, y = (3 * random.standard_normal((10, width)).astype(np.float32) for width in (5, 3))
        if window == 1:
            assert not step(Tensor(x * np.nan), Tensor(y)).updated
        output = step(Tensor(x), Tensor(y))
        norm = expected.update(x, y)
        off["norm"] = max(off["norm"], abs(float(output.grad_norm.asnumpy()) / norm - 1))
        for weight, value in zip(weights, expected.weights):
            off["weights"] = max(off["weights"], float(np.abs(weight.asnumpy() - value).max()))
    return off


if __name__ == "__main__":
    print(json.dumps({mode: run(mode) for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE)}), file=open(sys.argv[1], "w"))
