"""Helpers of the tests of verify."""

from mindspore import Tensor

# The sentences of the measurement, for a mean and for sums with weights.
LOSS = "The loss of two micro batches together is not the mean"
PAIRS = "The sums and weights of two micro batches do not add up"
UNKNOWN = "No cause was found"


def batch(*arrays):
    return tuple(Tensor(array) for array in arrays)


def assert_causes(report, *beginnings):
    assert not report.equal
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert found == list(beginnings)


def differing(report):
    return {(entry.name, entry.kind) for entry in report.parameters if entry.differs}
