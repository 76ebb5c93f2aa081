"""Networks for `find_micro_size`, in a file that a child process can import, and what measures them another way.

``python memory_networks.py MICRO_SIZE`` trains two whole windows and prints the most bytes that it has had.
"""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum import ClipByValue, GradAccumulation, TrainOneStepCell

ROWS, LENGTH, WIDTH = 4, 2**15, 32


class Wide(nn.Cell):
    """Has activations of 16 MiB per row, and few parameters."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        x = self.dense(x)
        for _ in range(4):
            x = ops.tanh(x)
        return ops.square(x).mean()


class Misbehaving(nn.Cell):
    """Does something in Python, op by op, instead of training."""

    def __init__(self, what):
        super().__init__()
        self.dense = nn.Dense(2, 1)
        self.what = what

    def construct(self, x):
        blocks = []
        while self.what == "grow":
            blocks.append(np.ones(2**21))
        if self.what == "raise":
            raise ArithmeticError("the network's own error")
        if self.what == "device":
            raise RuntimeError("Device(id:0) memory isn't enough and alloc failed, kernel name: Add")
        return self.dense(x).mean()


def wide():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    network = Wide()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    return network, optimizer, Tensor(np.ones((ROWS, LENGTH, WIDTH), np.float32))


def wide_in_rows():
    """Return the same in other words: a GradAccumulation, whose micro_size says nothing.

    The loss is not measured, which takes most of the time.
    """
    network, optimizer, batch = wide()
    return GradAccumulation(network, ROWS), optimizer, batch, {"check_loss": False}


def misbehaving(what, rows=1):
    network = Misbehaving(what)
    return network, nn.SGD(network.trainable_params(), 0.1), Tensor(np.ones((rows, 2), np.float32))


def nothing():
    return misbehaving("nothing")


def grows():
    return misbehaving("grow")


def raises_its_own():
    return misbehaving("raise", rows=2)


def lacks_device_memory():
    return misbehaving("device")


def clipped():
    return *misbehaving("nothing"), {"clip": ClipByValue(1.0)}


def wrongly_clipped():
    return *misbehaving("nothing"), {"clip": 3}


def train(micro_size):
    """Train two whole windows and return the peak of this process's memory."""
    network, optimizer, batch = wide()
    step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, check_loss=False)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        assert step(batch).updated.asnumpy()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(train(int(sys.argv[1])))
