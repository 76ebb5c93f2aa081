"""Helpers of the tests of verify."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

# The sentences of the measurement, for a mean and for sums with weights.
LOSS = "The loss of two micro batches together is not the mean"
PAIRS = "The sums and weights of two micro batches do not add up"
UNKNOWN = "No cause was found"


class Line(nn.Cell):
    """x @ weight + bias, its squared errors, and the way in which they are returned."""

    def __init__(self, form="mean", dtype=ms.float32):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, -1.0], dtype), "weight")
        self.bias = Parameter(Tensor([0.5], dtype), "bias")
        self.form = form

    def output(self, x):
        return (x * self.weight).sum(-1) + self.bias

    def construct(self, x, y):
        errors = ops.square(self.output(x) - y)
        if self.form == "sum and rows":
            return errors.sum(), errors.shape[0]
        return errors.sum() if self.form == "sum" else errors.mean()


def batch(*arrays):
    return tuple(Tensor(array) for array in arrays)


def assert_causes(report, *beginnings):
    assert not report.equal
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert found == list(beginnings)


def differing(report):
    return {(entry.name, entry.kind) for entry in report.parameters if entry.differs}
