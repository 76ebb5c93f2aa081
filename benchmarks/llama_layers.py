"""A layer or two of a Llama of 1 billion parameters, compiled for 8 devices. What they send is in docs/team.md.

KIND=hsdp LAYERS=2 python benchmarks/llama_layers.py
"""

import os

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import GradAccumulation, Model

WIDTH, KEYS, HIDDEN, HEADS = 2048, 256, 5632, 32


class RMSNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(WIDTH, np.float32)), "weight")

    def construct(self, x):
        return x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + 1e-6) * self.weight


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Dense(WIDTH, WIDTH, has_bias=False), nn.Dense(WIDTH, WIDTH, has_bias=False)
        self.k, self.v = nn.Dense(WIDTH, KEYS, has_bias=False), nn.Dense(WIDTH, KEYS, has_bias=False)
        self.gate, self.up = nn.Dense(WIDTH, HIDDEN, has_bias=False), nn.Dense(WIDTH, HIDDEN, has_bias=False)
        self.down = nn.Dense(HIDDEN, WIDTH, has_bias=False)
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()

    def construct(self, x):
        rows, times, _ = x.shape
        h = self.norm1(x)
        size = WIDTH // HEADS
        q = self.q(h).reshape(rows, times, HEADS, size).transpose(0, 2, 1, 3)
        k = self.k(h).reshape(rows, times, KEYS // size, size).transpose(0, 2, 1, 3)
        v = self.v(h).reshape(rows, times, KEYS // size, size).transpose(0, 2, 1, 3)
        k, v = ops.tile(k, (1, 8, 1, 1)), ops.tile(v, (1, 8, 1, 1))
        scores = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) / size**0.5, -1)
        x = x + self.o(ops.matmul(scores, v).transpose(0, 2, 1, 3).reshape(rows, times, WIDTH))
        h = self.norm2(x)
        return x + self.down(ops.silu(self.gate(h)) * self.up(h))


class Loss(nn.Cell):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.SequentialCell([Layer() for _ in range(layers)])

    def construct(self, x):
        return ops.square(self.layers(x)).mean()


def build():
    with no_init_parameters():
        net = Loss(int(os.environ["LAYERS"]))
        optimizer = nn.Adam(net.trainable_params(), 1e-4)
    loss_net = AutoParallel(GradAccumulation(net, 8))
    if os.environ["KIND"] == "hsdp":
        loss_net.hsdp(shard_size=8)
    x = np.zeros((8 * 8, 16, WIDTH), np.float32)
    return Model(loss_net, optimizer=optimizer), (Tensor(x),)


if __name__ == "__main__":
    from simulate import simulate

    print(simulate(f"{__file__}:build", 8))
