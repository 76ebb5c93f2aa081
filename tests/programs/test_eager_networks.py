"""Networks that work only in PYNATIVE mode, in micro batches against MindSpore's own step on the whole batch."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_gradaccum import Accumulator, GradAccumulation

pytestmark = pytest.mark.usefixtures("eager")
RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(8, columns)).astype(np.float32) for columns in (4, 2))


class Loss(nn.Cell):
    """Two layers and a mean loss; the kinds below change what happens in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(4, 5), nn.Dense(5, 2)
        for i, weight in enumerate(self.trainable_params()):
            weight.set_data(Tensor(np.random.default_rng(i).normal(size=weight.shape).astype(np.float32)))

    def hidden(self, x):
        return ops.tanh(self.first(x))

    def construct(self, x, y):
        return ((self.second(self.hidden(x)) - y) ** 2).mean()


class Recomputed(Loss):
    """A part of the forward pass runs once more in the backward pass."""

    runs = 0

    def block(self, x):
        self.runs += 1
        return super().hidden(x)

    def hidden(self, x):
        return ms.recompute(Block(self), x)


class Block(nn.Cell):
    def __init__(self, outer):
        super().__init__(auto_prefix=False)
        self.first, self.run = outer.first, outer.block

    def construct(self, x):
        return self.run(x)


class SavedElsewhere(Loss):
    """The tensors of the backward pass are kept as arrays of the host."""

    kept = 0

    def pack(self, tensor):
        self.kept += 1
        return tensor.asnumpy()

    def hidden(self, x):
        with ms.saved_tensors_hooks(self.pack, Tensor):
            return super().hidden(x)


class Teacher(Loss):
    """The targets come from a pass without gradients."""

    def construct(self, x, y):
        with ms._no_grad():
            target = self.second(self.hidden(0.5 * x))
        return super().construct(x, y + target)


KINDS = [Loss, Recomputed, SavedElsewhere, Teacher]


def momentum(network):
    return nn.Momentum(network.trainable_params(), 0.05, 0.9)


def values(network):
    return np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()])


@pytest.mark.parametrize("micro_size,steps", [(4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_trains_as_on_the_whole_batch(kind, micro_size, steps):
    expected, network = kind(), kind()
    step = nn.TrainOneStepCell(expected, momentum(expected))
    accumulator = Accumulator(GradAccumulation(network, micro_size), momentum(network), steps, check_loss=False)
    start = values(network)
    for _ in range(2):
        step(Tensor(X), Tensor(Y))
        for x, y in zip(np.split(X, steps), np.split(Y, steps)):
            with accumulator.accumulate():
                accumulator.backward(Tensor(x), Tensor(y))
                accumulator.step()
    np.testing.assert_allclose(values(network), values(expected), rtol=2e-5, atol=2e-6)
    assert np.abs(values(network) - start).max() > 0.05
    if kind is Recomputed:
        assert network.runs == 2 * 2 * micro_size * steps
    if kind is SavedElsewhere:
        assert network.kept > 0
