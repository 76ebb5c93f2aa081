"""Programs that the tests of `simulate` build in its processes: those of users, and one that is refused."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, Model, TrainOneStepCell

ROWS, INSIDE, HIDDEN, OUTSIDE = 16, 8, 12, 4


class Columns(nn.Cell):
    """Two layers: the columns of the first are on two devices, as are the rows of the second."""

    def __init__(self):
        super().__init__()
        # Drawn anew in each process.
        self.first = nn.Dense(INSIDE, HIDDEN)
        self.second = nn.Dense(HIDDEN, OUTSIDE)
        self.relu = ops.ReLU().shard(((1, 2),))
        self.first.matmul.shard(((1, 1), (2, 1)))
        self.first.bias_add.shard(((1, 2), (2,)))
        self.second.matmul.shard(((1, 2), (1, 2)))
        # What runs while the network is built.
        self.scale = float(ops.ones(1).sum())

    def construct(self, x):
        return self.second(self.relu(self.first(x) * self.scale))


def batch(rows=ROWS):
    rng = np.random.default_rng(0)
    return Tensor(rng.normal(size=(rows, INSIDE)).astype("f")), Tensor(rng.normal(size=(rows, OUTSIDE)).astype("f"))


def sharded():
    """Two devices that share each layer; in a Model, with a batch by name."""
    network = Columns()
    cell = AutoParallel(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2))
    cell.dataset_strategy(((1, 1), (1, 1)))
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    data, label = batch()
    return Model(cell, optimizer=optimizer, clip=ClipByGlobalNorm(0.5)), {"data": data, "label": label}


def alone():
    """Without AutoParallel."""
    network = nn.Dense(INSIDE, OUTSIDE)
    cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    return TrainOneStepCell(cell, nn.SGD(network.trainable_params(), 0.1), parallel="auto"), batch()
