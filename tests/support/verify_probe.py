"""Helpers of the tests of verify."""

from mindspore import Tensor

_BEGIN = "The loss should be a mean over rows, but"
SUM, TOKENS = f"{_BEGIN} it adds up its rows", f"{_BEGIN} it is a mean over something else"
ROWS = f"{_BEGIN} its rows meet"


def batch(*arrays):
    return tuple(Tensor(array) for array in arrays)


def assert_causes(report, *beginnings):
    assert not report.equal
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert found == list(beginnings)


def differing(report):
    return {(entry.name, entry.kind) for entry in report.parameters if entry.differs}
