"""Networks that train themselves are refused: their updates would come once per micro batch."""

import mindspore.experimental.optim as experimental
import pytest
from linear_toy import line, sgd
from mindspore import nn
from refusal import refuses

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")


class OwnTrainStep(nn.Cell):
    """The training cell that many projects write for themselves."""

    def __init__(self, network, optimizer):
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer

    def construct(self, *batch):
        return self.network(*batch)


class Around(nn.Cell):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def construct(self, *batch):
        return self.inside(*batch)


def loss_and(make_optimizer=sgd):
    network = line()
    return nn.WithLossCell(network, nn.MSELoss()), make_optimizer(network)


def experimental_sgd(network):
    return experimental.SGD(network.trainable_params(), 0.02)


@pytest.mark.parametrize("make_optimizer", [sgd, experimental_sgd])
@pytest.mark.parametrize("wrap", [lambda cell: cell, Around])
@pytest.mark.parametrize(
    "build",
    [
        lambda cell, _: GradAccumulation(cell, 4),
        lambda cell, optimizer: TrainOneStepCell(cell, optimizer),
        lambda cell, optimizer: Accumulator(cell, optimizer, 4),
    ],
)
def test_a_network_with_an_optimizer_inside_is_refused(build, wrap, make_optimizer):
    loss, optimizer = loss_and(make_optimizer)
    with refuses(ValueError, "loss cell inside"):
        build(wrap(OwnTrainStep(loss, optimizer)), optimizer)


def test_a_network_of_its_own_class_without_an_optimizer_is_none():
    loss, optimizer = loss_and()
    TrainOneStepCell(Around(loss), optimizer)
