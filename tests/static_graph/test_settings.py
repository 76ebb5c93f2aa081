"""Semi-auto-parallel: what is said of messages."""

import mindspore as ms
import pytest
from linear_toy import line, mse, sgd
from mindspore import nn
from refusal import refuses

from ms_gradaccum import GradAccumulation, TokenMeanLoss
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph import settings
from ms_gradaccum.static_graph.settings import check_step

IN_CONTEXT = SemiAuto(None)


def test_semi_auto_parallel_takes_messages_of_float32_however_they_are_given():
    cell = GradAccumulation(mse(line()), 2)
    check_step(IN_CONTEXT, cell, sgd(cell), dtype={"*weight": ms.float32})
    with refuses(ValueError, "float32 messages"):
        check_step(IN_CONTEXT, cell, sgd(cell), dtype={"*weight": ms.float16})


def test_a_head_in_blocks_and_micro_batches_by_tokens_are_refused():
    head = nn.Dense(4, 9)
    for loss in (TokenMeanLoss(nn.Dense(2, 4), head=head), nn.SequentialCell(TokenMeanLoss(nn.Identity(), head=head))):
        cell = GradAccumulation(loss, 2, weighted=True)
        with refuses(ValueError, "'head' must be None in semi-auto-parallel"):
            check_step(IN_CONTEXT, cell, sgd(cell))
    cell = GradAccumulation(TokenMeanLoss(nn.Dense(2, 4)), 2)
    check_step(IN_CONTEXT, cell, sgd(cell))
    cell = GradAccumulation(TokenMeanLoss(nn.Dense(2, 4)), micro_tokens=8)
    with refuses(ValueError, "'micro_tokens' must be left out in semi-auto-parallel"):
        check_step(IN_CONTEXT, cell, sgd(cell))


@pytest.mark.parametrize("device,waits,warns", [("GPU", False, 1), ("GPU", True, 0), ("Ascend", False, 0)])
def test_on_a_gpu_messages_that_do_not_wait_are_named(device, waits, warns, monkeypatch, recwarn):
    monkeypatch.setattr("ms_gradaccum.backend.device.device_target", lambda: device)
    monkeypatch.setattr(settings, "launches_block", lambda: waits)
    cell = GradAccumulation(mse(line()), 2)
    check_step(IN_CONTEXT, cell, sgd(cell))
    assert sum("Call mindspore.runtime.launch_blocking() first" in str(each.message) for each in recwarn) == warns
