"""Semi-auto-parallel: what is said of networks that it trains otherwise."""

import pytest
from linear_toy import line, sgd
from mindspore import nn, ops

from ms_gradaccum import GradAccumulation
from ms_gradaccum.parallel.semi_auto import SemiAuto


class Rounded(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = line()

    def construct(self, x, y):
        return ops.square(self.dense(x) - y).mean()

    def bprop(self, x, y, out, dout):
        return dout * x, dout * y


def test_semi_auto_parallel_warns_of_what_need_not_be_linear():
    loss_cell = GradAccumulation(Rounded(), 2)
    with pytest.warns(UserWarning, match="does in the backward pass .* must be linear in the gradient in semi-auto"):
        SemiAuto(loss_cell).check(loss_cell, sgd(loss_cell))
