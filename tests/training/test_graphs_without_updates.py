"""A larger graph in which windows are skipped, one after the other, for an Inf or a NaN ends the training."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, sgd, toy_step
from mindspore import Tensor, nn
from refusal import refuses, warns
from step_probe import Around, tensors

from ms_gradaccum import Accumulator
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.training import window_end


@pytest.mark.parametrize(
    "mode, accumulation_steps",
    [(ms.GRAPH_MODE, 1), (ms.PYNATIVE_MODE, 2)],
    ids=["GRAPH-1", "PYNATIVE-2"],
    indirect=["mode"],
)
def test_a_graph_without_updates_ends_the_training(accumulation_steps, mode, monkeypatch):
    monkeypatch.setattr(window_end, "MAX_OVERFLOWS", 3)
    network, step = toy_step(accumulation_steps=accumulation_steps, check_loss=False)
    graph = Around(step) if mode == ms.GRAPH_MODE else ms.jit(Around(step))
    right, broken = tensors(X, 2 * X), tensors(X, np.nan * X)

    def windows(*batches):
        for batch in batches:
            for _ in range(accumulation_steps):
                output = graph(*batch)
        return output

    # Not in a row.
    windows(broken, broken, right, broken, broken, right)
    before = network.weight.asnumpy().copy()
    windows(broken, broken)
    with refuses(RuntimeError, "Inf or NaN"):
        str(windows(broken))
    assert (network.weight.asnumpy() == before).all() and before != 0
    # Another graph still runs.
    assert nn.Dense(1, 1)(right[0]).shape == (8, 1)


def test_a_device_whose_graphs_raise_no_error_says_so_of_an_accumulator(mode):
    network = nn.WithLossCell(line(), nn.MSELoss())
    with built_for("GPU"):
        accumulator = Accumulator(network, sgd(network), check_loss=False)

    @ms.jit
    def train(grad):
        return accumulator((grad,), 1.0)

    with warns("For 'Accumulator'", "end the training"):
        train(Tensor([[1.0]]))


def test_a_device_whose_graphs_raise_no_error_says_so(mode):
    with built_for("GPU"):
        _, step = toy_step(check_loss=False)
    graph = Around(step) if mode == ms.GRAPH_MODE else ms.jit(Around(step))
    with warns("For 'TrainOneStepCell'", "end the training"):
        graph(*tensors(X, 2 * X))
