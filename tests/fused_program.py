"""Windows whose graphs MindSpore fuses, beside NumPy; writes what differs as JSON. Runs in a process of its own."""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import JitConfig, Tensor, nn
from step_probe import Around, number

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, StepOutput, TrainOneStepCell

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


def make_step(accumulation_steps=1):
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 3, has_bias=False))
    weights = network.trainable_params()
    step = TrainOneStepCell(
        GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4),
        nn.Momentum(weights, RATE, MOMENTUM),
        accumulation_steps=accumulation_steps,
        clip=ClipByGlobalNorm(LIMIT),
    )
    return step, weights, Expected([weight.asnumpy() for weight in weights])


def batches(count):
    """Yield inputs and targets, in micro batches of 3, 3, 2 and 2 rows."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(3 * random.standard_normal((10, width)).astype(np.float32) for width in (5, 3))


def run(mode):
    """Return the largest differences of norms and weights in four windows, between them one of NaN."""
    ms.set_context(mode=mode)
    step, weights, expected = make_step()
    step.set_jit_config(FUSION)
    off = {"norm": 0.0, "weights": 0.0}
    for window, (x, y) in enumerate(batches(4)):
        if window == 1:
            assert not step(Tensor(x * np.nan), Tensor(y)).updated
        output = step(Tensor(x), Tensor(y))
        norm = expected.update(x, y)
        off["norm"] = max(off["norm"], abs(number(output.grad_norm) / norm - 1))
        off["weights"] = max(off["weights"], largest_difference(weights, expected))
    return off


def run_in_graph():
    """The same for a window of two batches in a larger graph, which decides by a count whether it updates."""
    ms.set_context(mode=ms.GRAPH_MODE)
    step, weights, expected = make_step(2)
    graph = Around(step).set_train()
    graph.set_jit_config(FUSION)
    (x1, y1), (x2, y2) = batches(2)
    first, second = (StepOutput(*graph(Tensor(x), Tensor(y))) for x, y in ((x1, y1), (x2, y2)))
    assert not first.updated and second.updated
    norm = expected.update(np.concatenate([x1, x2]), np.concatenate([y1, y2]))
    return {"norm": abs(number(second.grad_norm) / norm - 1), "weights": largest_difference(weights, expected)}


def largest_difference(weights, expected):
    pairs = zip(weights, expected.weights)
    return max(float(np.abs(weight.asnumpy() - value).max()) for weight, value in pairs)


if __name__ == "__main__":
    off = {mode: run(mode) for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE)}
    Path(sys.argv[1]).write_text(json.dumps({**off, "in a graph": run_in_graph()}))
