"""What tests of verify share."""

from mindspore import Tensor

SUM, TOKENS = "A sum where a mean is expected", "A mean over something else"


def batch(*arrays):
    return tuple(Tensor(array) for array in arrays)


def assert_causes(report, *beginnings):
    assert not report.equal
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert found == list(beginnings)


def differing(report):
    return {(entry.name, entry.kind) for entry in report.parameters if entry.differs}
