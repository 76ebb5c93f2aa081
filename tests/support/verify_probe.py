"""A line and a batch for the tests of verify, and what they look for in a report."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

# The sentences of the measurement, for a mean and for sums with weights.
LOSS = "The loss of two micro batches together is not the mean"
PAIRS = "The sums and weights of two micro batches do not add up"
UNKNOWN = "No cause was found"
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(8, 2)).astype(np.float32)
Y = RANDOM.normal(size=8).astype(np.float32)


def mean(output, y):
    return ops.square(output - y).mean()


def total(output, y):
    return ops.square(output - y).sum()


class Line(nn.Cell):
    """x @ weight + bias, and the form that its errors are reduced to."""

    def __init__(self, form=mean, dtype=ms.float32, has_bias=True):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, -1.0], dtype), "weight")
        self.bias = Parameter(Tensor([0.5], dtype), "bias") if has_bias else 0.0
        self.form = form

    def output(self, x):
        return (x * self.weight).sum(-1) + self.bias

    def construct(self, x, y):
        return self.form(self.output(x), y)


def assert_causes(report, *beginnings):
    assert not report.equal
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert found == list(beginnings)


def differing(report):
    return {(entry.name, entry.kind) for entry in report.parameters if entry.differs}
