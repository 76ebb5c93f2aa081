"""Convolutions that are slow on this CPU are found by measuring, and said to whoever trains some."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell, convolutions

WARNING = (
    "For '{}', MindSpore's convolutions take 10 to 40 times as long as they could on this CPU. "
    "Set the environment variable ONEDNN_MAX_CPU_ISA=AVX2 before the program starts."
)


def build(kind, cell):
    loss_cell = nn.WithLossCell(nn.SequentialCell(cell, nn.Flatten()), nn.MSELoss())
    optimizer = nn.SGD(loss_cell.trainable_params(), 1.0)
    if kind is Accumulator:
        return Accumulator(loss_cell, optimizer)
    return TrainOneStepCell(GradAccumulation(loss_cell, 2), optimizer)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(convolutions, "times_a_product", lambda: 60.0)


@pytest.mark.parametrize("kind", [TrainOneStepCell, Accumulator])
@pytest.mark.parametrize("cell", [nn.Conv2d, nn.Conv1d, nn.Conv3dTranspose])
def test_slow_convolutions_are_warned_of(kind, cell, slow):
    with pytest.warns() as warned:
        build(kind, cell(1, 1, 1))
    assert [str(warning.message) for warning in warned] == [WARNING.format(kind.__name__)]
    assert warned[0].filename == __file__


@pytest.mark.parametrize("why", ["no convolution", "fast", "set", "another device"])
def test_without_a_reason_there_is_no_warning(why, slow, monkeypatch):
    if why == "fast":
        monkeypatch.setattr(convolutions, "times_a_product", lambda: 7.0)
    elif why == "set":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    elif why == "another device":
        monkeypatch.setattr(convolutions.ms, "get_context", lambda name: "GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = nn.Dense(1, 1) if why == "no convolution" else nn.Conv2d(1, 1, 1)
        convolutions.warn_if_slow("TrainOneStepCell", network)


def measured(**variables):
    program = "from ms_gradaccum.convolutions import times_a_product; print('times', times_a_product())"
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"} | variables
    folder = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    return float(result.stdout.rpartition("times ")[2])


def test_without_avx512_they_are_fast():
    assert measured(ONEDNN_MAX_CPU_ISA="AVX2") < convolutions.SLOW


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="no processor with AVX-512")
@pytest.mark.skipif(not ms.__version__.startswith("2.10."), reason="not known of this version")
def test_with_avx512_they_are_slow():
    assert measured() > convolutions.SLOW
