"""Losses that the compiler leaves to the Python interpreter: what trains MindSpore's own step trains ours."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses

from ms_gradaccum import GradAccumulation, TrainOneStepCell


class Settings:
    factor = 2.0


class Holder:
    def __init__(self, loss):
        self.loss = loss


class Loss(nn.Cell):
    """The mean of weight * x, by a way through Python."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")
        self.settings = Settings()


class ByHolder(Loss):
    def construct(self, x):
        return Holder(2 * (self.weight * x).mean()).loss


class ByNumpy(Loss):
    def construct(self, x):
        loss = (self.weight * x).mean()
        return 2 * loss + 0 * float(ops.stop_gradient(loss).asnumpy())


class ByZip(Loss):
    def construct(self, x):
        return dict(zip(["loss"], [2 * (self.weight * x).mean()]))["loss"], x


class ByAverage(Loss):
    """An average of the losses so far, which is 1 before and is not divided by yet."""

    def __init__(self):
        super().__init__()
        self.average = Tensor(1.0)

    def construct(self, x):
        loss = (self.weight * x).mean()
        before = self.average
        self.average = 0.5 * before + 0.5 * ops.stop_gradient(loss) / ops.stop_gradient(loss)
        return 2 * loss / before


class ByCount(Loss):
    def __init__(self):
        super().__init__()
        self.count = 0

    def construct(self, x):
        self.count = self.count + 1
        return 2 * (self.weight * x).mean() * (self.count / self.count)


def trained(kind, own):
    network = kind()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = nn.TrainOneStepCell(network, optimizer) if own else TrainOneStepCell(GradAccumulation(network, 2), optimizer)
    step(Tensor(np.float32([1, 2, 3, 4])))
    return network.weight.asnumpy().item()


@pytest.mark.parametrize("kind", [ByHolder, ByNumpy, ByZip, ByAverage, ByCount])
def test_what_loses_its_gradient_is_refused_with_that_reason(kind):
    ms.set_context(mode=ms.GRAPH_MODE)
    # The reason is true: MindSpore's own step runs, and its weight stays.
    assert trained(kind, own=True) == 1.0
    with refuses(ValueError, "'network'", "a Python object"):
        trained(kind, own=False)


@pytest.mark.parametrize("kind", [ByHolder, ByNumpy, ByZip, ByAverage, ByCount])
def test_it_trains_op_by_op(kind, eager):
    assert trained(kind, own=False) == pytest.approx(0.5)
