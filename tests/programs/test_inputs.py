"""Inputs as programs give them: dicts, tuples, what has no rows, and numbers of other types."""

from collections import UserDict

import numpy as np
from harness import ROWS, UPDATES, Program, checks_of, regression
from mindspore import Tensor, nn, ops

LOOPS = ("step 1", "step 4", "Accumulator")
# A loop of one's own cuts what has rows, and nothing else.
SPLIT = ("step 1", "step 4", "Model")


class OfDict(nn.Cell):
    """Takes a batch as a dict, as collections of text models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 3)
        self.second = nn.Dense(3, 1)

    def loss(self, x, y, scale):
        return ops.square(self.second(ops.tanh(self.first(x))) * scale - y).mean()

    def construct(self, batch):
        return self.loss(batch["x"], batch["labels"], 1.0)


class Graph(nn.Cell):
    """A graph convolution per row: all rows share one adjacency matrix."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y, adjacency):
        return ops.square(self.layer(ops.matmul(adjacency, x)) - y).mean()


def nodes(count):
    """Rows of `count` nodes with 4 features each, labels of the nodes, and a matrix for all."""

    def build():
        numbers = np.random.default_rng(4)
        adjacency = numbers.uniform(size=(count, count)).astype(np.float32)
        shapes = [(ROWS, count, 4), (ROWS, count, 1)]
        return [(*(numbers.normal(size=s).astype(np.float32) for s in shapes), adjacency) for _ in range(UPDATES)]

    return build


def tokens():
    numbers = np.random.default_rng(6)
    return [
        (
            numbers.normal(size=(ROWS, 3, 4)).astype(np.float32),
            numbers.normal(size=(ROWS, 3, 1)).astype(np.float32),
            UserDict(mask=np.triu(np.full((3, 3), -1e4, np.float32), 1)),
        )
        for _ in range(UPDATES)
    ]


class OfMapping(nn.Cell):
    """Takes tensors in what is like a dict and is none, as the tokenizers of language models give them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y, masks):
        return ops.square(ops.matmul(ops.softmax(Tensor(masks["mask"])), self.layer(x)) - y).mean()


class WithSettings(nn.Cell):
    """Takes settings in what is like a dict and is none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y, settings):
        return settings["scale"] * ops.square(self.layer(x) - y).mean()


def with_settings():
    return [(x, y, UserDict(scale=2.0, names=["a"])) for x, y in regression()]


def as_dicts():
    return [({"x": x, "labels": y},) for x, y in regression()]


SHARED = {"batch_axis": (0, 0, None)}

# What the error names: the input, and the argument that says how it is split.
NOT_A_BATCH = r"(input\[2\]|'adjacency').*batch_axis"

PROGRAMS = {
    "dict": Program(OfDict, batches=as_dicts, faces=LOOPS),
    "adjacency matrix": Program(Graph, batches=nodes(5), named=NOT_A_BATCH, names_whole=True, faces=SPLIT),
    "adjacency matrix, batch_axis": Program(Graph, batches=nodes(5), settings=SHARED),
    "adjacency matrix as large as the rows": Program(Graph, batches=nodes(ROWS), named=NOT_A_BATCH, faces=SPLIT),
    "tensors in a UserDict": Program(
        OfMapping, batches=tokens, named="got a UserDict", faces=("step 1", "step 4"), modes=("PYNATIVE",)
    ),
    "numbers in a UserDict": Program(
        WithSettings, batches=with_settings, faces=("step 1", "step 4"), modes=("PYNATIVE",)
    ),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
