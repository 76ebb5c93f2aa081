"""Random networks with losses that are means over rows, or sums with their weights: all can be trained in parts."""

import numpy as np
from mindspore import Tensor, nn, ops

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU)
KINDS = ("square", "absolute", "huber", "cross entropy", "smooth labels", "binary", "cosine", "divergence", "tokens")
KINDS += ("hinge", "penalty", "difference", "log of a sum", "masked rows")


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
    """One of the losses above, of a random network."""

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
        out = self.net(x)
        if self.kind == "square":
            return (out - y).square().mean()
        if self.kind == "absolute":
            return (out - y).abs().sum(-1).mean()
        if self.kind == "huber":
            return ops.huber_loss(out, y)
        if self.kind == "cross entropy":
            return ops.cross_entropy(out, labels)
        if self.kind == "smooth labels":
            return ops.cross_entropy(out, labels, label_smoothing=0.1)
        if self.kind == "binary":
            each = ops.relu(out) - out * (y > 0) + ops.log(1 + ops.exp(-out.abs()))
            return each.mean()
        if self.kind == "cosine":
            norms = ops.sqrt(out.square().sum(-1) * y.square().sum(-1) + 1e-9)
            return 1 - ((out * y).sum(-1) / norms).mean()
        if self.kind == "divergence":
            p = ops.softmax(y, -1)
            return (p * (ops.log_softmax(y, -1) - ops.log_softmax(out, -1))).sum(-1).mean()
        if self.kind == "tokens":
            each = ops.cross_entropy(out, labels, reduction="none")
            valid = (labels > 0).astype(out.dtype)
            return (each * valid).sum(), valid.sum()
        if self.kind == "hinge":
            own = ops.gather_elements(out, 1, labels.reshape(-1, 1))
            return ops.relu(out - own + 1).sum(-1).mean()
        if self.kind == "penalty":
            return (out - y).square().mean() + 0.1 * self.net[0].weight.square().sum()
        if self.kind == "difference":  # Of large numbers, as of two critics.
            return out.mean() - y.mean()
        if self.kind == "log of a sum":
            return (ops.logsumexp(out + 100, -1) - 100).mean()
        return (out.square().mean(-1) * (labels > 0)).mean()
