"""Networks with tied weights, recomputation, gradients inside, a backward pass of their own, and inputs in dicts."""

from collections import UserDict

import mindspore as ms
import numpy as np
from harness import ROWS, UPDATES, Program, check_of, momentum, regression
from mindspore import Tensor, nn, ops
from step_probe import Of

WORDS, LENGTH = 11, 5


def sentences():
    numbers = np.random.default_rng(6)
    return [(numbers.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),) for _ in range(UPDATES)]


class Block(nn.Cell):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.mlp = nn.SequentialCell(nn.Dense(width, 2 * width), nn.GELU(), nn.Dense(2 * width, width))

    def construct(self, x):
        query, key, value = ops.chunk(self.qkv(self.norm1(x)), 3, -1)
        weights = ops.softmax(ops.matmul(query, key.swapaxes(1, 2)) / 2.0, -1)
        x = x + self.out(ops.matmul(weights, value))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Cell):
    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.block = block(4)

    def construct(self, words):
        hidden = self.block(self.embedding(words))
        logits = ops.matmul(hidden[:, :-1], self.embedding.embedding_table.T)
        return ops.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))


def recomputed(width):
    block = Block(width)
    block.recompute()
    return block


def adamw(cell):
    return nn.AdamWeightDecay(cell.trainable_params(), 0.02, eps=0.1, weight_decay=0.1)


class PINN(nn.Cell):
    """u'' + u = 0 with u(0) = 1, in float64: two derivatives with respect to the input, inside the loss."""

    def __init__(self):
        super().__init__()
        first, second = np.linspace(-1, 1, 5).reshape(5, 1), np.linspace(1, -1, 5).reshape(1, 5)
        self.first = nn.Dense(1, 5, weight_init=Tensor(first), dtype=ms.float64)
        self.second = nn.Dense(5, 1, weight_init=Tensor(second), dtype=ms.float64)
        self.gradient = ops.GradOperation()

    def u(self, x):
        return self.second(ops.tanh(self.first(x))).sum()

    def slope(self, x):
        return self.gradient(self.u)(x).sum()

    def construct(self, x):
        curve = self.gradient(self.slope)(x)
        value = self.second(ops.tanh(self.first(x)))
        start = self.second(ops.tanh(self.first(ops.zeros_like(x))))
        return ops.square(curve + value).mean() + ops.square(start - 1.0).mean()


def points():
    numbers = np.random.default_rng(13)
    return [(numbers.uniform(0, 3, (ROWS, 1)),) for _ in range(UPDATES)]


class OfDict(nn.Cell):
    """A graph convolution per row that takes a batch as a dict; all rows share one adjacency matrix."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, batch):
        return ops.square(self.layer(ops.matmul(batch["adjacency"], batch["x"])) - batch["labels"]).mean()


def nodes():
    """Rows of 5 nodes with 4 features each, labels of the nodes, and a matrix for all."""
    numbers = np.random.default_rng(4)
    shapes = {"x": (ROWS, 5, 4), "labels": (ROWS, 5, 1), "adjacency": (5, 5)}
    return [
        ({name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},)
        for _ in range(UPDATES)
    ]


def with_settings():
    """Takes settings in what is like a dict and is none."""
    return Of(nn.Dense(4, 1), lambda out, y, settings: settings["scale"] * ops.square(out - y).mean())


def settings():
    return [(x, y, UserDict(scale=2.0, names=["a"])) for x, y in regression()]


PROGRAMS = {
    "tied weights": Program(LanguageModel, adamw, sentences),
    "recompute": Program(lambda: LanguageModel(recomputed), adamw, sentences),
    "PINN in float64": Program(PINN, momentum, points),
    "dict": Program(
        OfDict,
        batches=nodes,
        settings={"batch_axis": ({"x": 0, "labels": 0, "adjacency": None},)},
        faces=("step 1", "step 4", "Accumulator"),
    ),
    "numbers in a UserDict": Program(with_settings, batches=settings, faces=("step 1", "step 4"), modes=("PYNATIVE",)),
}


test_equal_or_named = check_of(PROGRAMS)
