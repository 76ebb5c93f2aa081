"""The linear toy: x = 1..8, y = 2x, one weight that starts at 0, mean squared error, SGD 0.02.

Small enough to be worked out by hand: a window of rows x moves the weight by 0.02 * mean(2 * x * x * (2 - weight)).
"""

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import GradAccumulation, Model, TrainOneStepCell

X = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
ALL = range(1, 9)


def batches(rows, x=X):
    """The eight rows in their order, in batches of this many rows."""
    return NumpySlicesDataset((x, 2 * x), shuffle=False).batch(rows)


def line(inputs=1):
    return nn.Dense(inputs, 1, weight_init="zeros", has_bias=False)


def sgd(network, learning_rate=0.02):
    return nn.SGD(network.trainable_params(), learning_rate)


def momentum(network, learning_rate=0.02):
    return nn.Momentum(network.trainable_params(), learning_rate, 0.9)


def mse(network):
    return nn.WithLossCell(network, nn.MSELoss())


def toy_step(micro_size=1, learning_rate=0.02, make_optimizer=sgd, **settings):
    network = line()
    optimizer = make_optimizer(network, learning_rate)
    return network, TrainOneStepCell(GradAccumulation(mse(network), micro_size), optimizer, **settings)


def toy(micro_size=1, learning_rate=0.02, **settings):
    """A network and the model that trains it. It measures the loss, which takes most of the time, only if told to."""
    network = line()
    settings.setdefault("check_loss", False)
    return network, Model(GradAccumulation(mse(network), micro_size), optimizer=sgd(network, learning_rate), **settings)


def toy_with_metrics(**settings):
    """The same with its loss given to the model, so that it can evaluate."""
    network = line()
    return network, Model(network, nn.MSELoss(), sgd(network), metrics={"mse"}, **settings)


def hsdp(loss_cell):
    network = AutoParallel(loss_cell)
    network.hsdp()
    return network


def weight_of(network):
    return network.weight.asnumpy().item()


def descend(*windows, weight=0.0, learning_rate=0.02):
    """The weight after one update per window, in float64. A window is its rows: the values of x."""
    for window in windows:
        x = np.array(window, np.float64)
        weight -= learning_rate * np.mean(2 * x * x * (weight - 2))
    return weight


class Recorder(ms.train.Callback):
    """A user's own callback, which notes each batch and can stop the training after one."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after
        self.outputs = []
        self.weights = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.outputs.append(params.net_outputs)
        if params.optimizer is not None:  # MindSpore's Model has none of a step that is given to it.
            self.weights.append(params.optimizer.parameters[0].asnumpy().item())
        if params.cur_step_num == self.stop_after:
            run_context.request_stop()


class AtStep(ms.train.Callback):
    """Calls a function after each step of a training, before callbacks that are listed after it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_step_end(self, run_context):
        self.function(run_context)
