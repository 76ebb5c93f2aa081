"""Random networks with losses that are means over rows, or sums with their weights: all can be trained in parts."""

import numpy as np
from mindspore import Tensor, nn, ops

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU)


def binary(out, y):
    each = ops.relu(out) - out * (y > 0) + ops.log(1 + ops.exp(-out.abs()))
    return each.mean()


def cosine(out, y):
    norms = ops.sqrt(out.square().sum(-1) * y.square().sum(-1) + 1e-9)
    return 1 - ((out * y).sum(-1) / norms).mean()


def tokens(out, labels):
    valid = (labels > 0).astype(out.dtype)
    return (ops.cross_entropy(out, labels, reduction="none") * valid).sum(), valid.sum()


# Of the outputs, numbers, labels and the first weight.
LOSSES = {
    "square": lambda out, y, labels, weight: (out - y).square().mean(),
    "absolute": lambda out, y, labels, weight: (out - y).abs().sum(-1).mean(),
    "huber": lambda out, y, labels, weight: ops.huber_loss(out, y),
    "cross entropy": lambda out, y, labels, weight: ops.cross_entropy(out, labels),
    "smooth labels": lambda out, y, labels, weight: ops.cross_entropy(out, labels, label_smoothing=0.1),
    "binary": lambda out, y, labels, weight: binary(out, y),
    "cosine": lambda out, y, labels, weight: cosine(out, y),
    "tokens": lambda out, y, labels, weight: tokens(out, labels),
    "penalty": lambda out, y, labels, weight: (out - y).square().mean() + 0.1 * weight.square().sum(),
    # Of large numbers, as of two critics.
    "difference": lambda out, y, labels, weight: out.mean() - y.mean(),
    "log of a sum": lambda out, y, labels, weight: (ops.logsumexp(out + 100, -1) - 100).mean(),
    "masked rows": lambda out, y, labels, weight: (out.square().mean(-1) * (labels > 0)).mean(),
}
KINDS = tuple(LOSSES)


class Attention(nn.Cell):
    """Attention of a row's columns to each other."""

    def __init__(self, width, dense):
        super().__init__()
        self.query, self.key, self.value = (dense(width, width) for _ in range(3))
        self.width = width

    def construct(self, x):
        x = x.expand_dims(1) * ops.ones((1, 3, 1))
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(1, 2)) / self.width**0.5
        return ops.matmul(ops.softmax(scores, -1), self.value(x)).mean(1)


class RandomLoss(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        self.numbers = numbers = np.random.default_rng(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.outputs = int(numbers.integers(2, 9))
        widths = [int(numbers.integers(3, 40)) for _ in range(numbers.integers(1, 4))]
        layers = []
        for before, after in zip(widths, [*widths[1:], self.outputs]):
            layers += [self.dense(before, after), ACTIVATIONS[numbers.integers(len(ACTIVATIONS))]()]
            if numbers.random() < 0.3:
                layers.append(nn.LayerNorm((after,)))
            if numbers.random() < 0.2:
                layers.append(Attention(after, self.dense))
            if numbers.random() < 0.2:
                layers.append(nn.Dropout(p=0.3))
        self.net = nn.SequentialCell([*layers, self.dense(self.outputs, self.outputs)])
        self.inputs = widths[0]
        self.weighted = self.kind == "tokens"

    def dense(self, before, after):
        weight = self.numbers.normal(size=(after, before)).astype(np.float32) / before**0.5
        return nn.Dense(before, after, weight_init=Tensor(weight), bias_init="zeros")

    def batch(self, rows):
        numbers = self.numbers
        x = numbers.normal(size=(rows, self.inputs)) * 10 ** numbers.uniform(-2, 2)
        y = numbers.normal(size=(rows, self.outputs)) * 10 ** numbers.uniform(-2, 2)
        labels = numbers.integers(0, self.outputs, rows)
        return Tensor(x.astype(np.float32)), Tensor(y.astype(np.float32)), Tensor(labels.astype(np.int32))

    def construct(self, x, y, labels):
        return LOSSES[self.kind](self.net(x), y, labels, self.net[0].weight)
