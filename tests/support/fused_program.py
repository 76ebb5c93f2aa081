"""Windows whose graphs MindSpore fuses give what NumPy gives. Runs in a process of its own."""

import mindspore as ms
import numpy as np
from mindspore import JitConfig, Tensor, nn
from step_probe import Around

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
    """Momentum of SGD with clipping, in float64, from where ``parameters`` are now."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.weights = [parameter.asnumpy().astype(np.float64) for parameter in parameters]
        self.moments = [np.zeros_like(weight) for weight in self.weights]

    def check_update(self, output, x, y):
        """Update, and compare the parameters and what a window reports of its own update."""
        grads = gradients(self.weights, x, y)
        norm = np.sqrt(sum((grad**2).sum() for grad in grads))
        for i, grad in enumerate(grads):
            self.moments[i] = MOMENTUM * self.moments[i] + grad * min(1.0, LIMIT / norm)
            self.weights[i] = self.weights[i] - RATE * self.moments[i]
        np.testing.assert_allclose(output.grad_norm.asnumpy(), norm, rtol=1e-5)
        for parameter, weight in zip(self.parameters, self.weights):
            np.testing.assert_allclose(parameter.asnumpy(), weight, rtol=0, atol=1e-5)


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
    return step, Expected(weights)


def batches(count):
    """Yield inputs and targets, in micro batches of 3, 3, 2 and 2 rows."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(3 * random.standard_normal((10, width)).astype(np.float32) for width in (5, 3))


def check_windows(mode):
    """Four windows, between them one of NaN."""
    ms.set_context(mode=mode)
    step, expected = make_step()
    step.set_jit_config(FUSION)
    for window, (x, y) in enumerate(batches(4)):
        if window == 1:
            assert not step(Tensor(x * np.nan), Tensor(y)).updated
        expected.check_update(step(Tensor(x), Tensor(y)), x, y)


def check_window_in_graph():
    """A window of two batches in a larger graph, which decides by a count whether it updates."""
    ms.set_context(mode=ms.GRAPH_MODE)
    step, expected = make_step(2)
    graph = Around(step).set_train()
    graph.set_jit_config(FUSION)
    pairs = list(batches(2))
    first, second = (StepOutput(*graph(Tensor(x), Tensor(y))) for x, y in pairs)
    assert not first.updated and second.updated
    expected.check_update(second, *map(np.concatenate, zip(*pairs)))


if __name__ == "__main__":
    check_windows(ms.GRAPH_MODE)
    check_windows(ms.PYNATIVE_MODE)
    check_window_in_graph()
