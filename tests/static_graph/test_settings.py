"""Semi-auto-parallel: what is said of networks that it trains otherwise, and of messages."""

import mindspore as ms
import pytest
from linear_toy import line, sgd
from mindspore import nn, ops
from refusal import refuses, warns

from ms_gradaccum import GradAccumulation
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph import settings
from ms_gradaccum.static_graph.settings import check_step

IN_CONTEXT = SemiAuto(None)


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
    with warns("gradient in semi-auto"):
        check_step(IN_CONTEXT, loss_cell, sgd(loss_cell))


def test_semi_auto_parallel_takes_messages_of_float32_however_they_are_given():
    cell = GradAccumulation(nn.WithLossCell(line(), nn.MSELoss()), 2)
    check_step(IN_CONTEXT, cell, sgd(cell), dtype={"*weight": ms.float32})
    with refuses(ValueError, "float32 messages"):
        check_step(IN_CONTEXT, cell, sgd(cell), dtype={"*weight": ms.float16})


@pytest.mark.parametrize("device,waits,warns", [("GPU", False, 1), ("GPU", True, 0), ("Ascend", False, 0)])
def test_on_a_gpu_messages_that_do_not_wait_are_named(device, waits, warns, monkeypatch, recwarn):
    monkeypatch.setattr(settings, "this_device", lambda: device)
    monkeypatch.setattr(settings, "launches_block", lambda: waits)
    cell = GradAccumulation(nn.WithLossCell(line(), nn.MSELoss()), 2)
    check_step(IN_CONTEXT, cell, sgd(cell))
    assert sum("Call mindspore.runtime.launch_blocking() first" in str(each.message) for each in recwarn) == warns
