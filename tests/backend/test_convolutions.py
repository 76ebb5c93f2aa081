"""Convolutions that are slow on this CPU are said to whoever trains some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from linear_toy import sgd
from mindspore import nn
from refusal import no_warning

from ms_gradaccum import Accumulator, TrainOneStepCell
from ms_gradaccum.backend import device

WARNING = (
    "For '{}', MindSpore's convolutions are 10 to 40 times slower than possible on this CPU. "
    "Set the environment variable ONEDNN_MAX_CPU_ISA=AVX2 before the program starts."
)


def build(kind, cell):
    loss_cell = nn.WithLossCell(nn.SequentialCell(cell, nn.Flatten()), nn.MSELoss())
    return kind(loss_cell, sgd(loss_cell))


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(device, "are_slow", lambda: True)


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
        monkeypatch.setattr(device, "are_slow", lambda: False)
    elif why == "set":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    elif why == "another device":
        monkeypatch.setattr(device.ms, "get_context", lambda name: "GPU")
    with no_warning():
        network = nn.Dense(1, 1) if why == "no convolution" else nn.Conv2d(1, 1, 1)
        device.warn_of_slow_convolutions("TrainOneStepCell", network)


CONVOLUTION = """
import numpy as np
from mindspore import Tensor, ops

from ms_gradaccum.backend.device import are_slow

images, filters = (Tensor(np.ones(shape, np.float32)) for shape in ((8, 16, 16, 16), (16, 16, 3, 3)))
ops.Conv2D(16, 3, pad_mode="same")(images, filters).asnumpy()
print("slow" if are_slow() else "fast")
"""


def run_convolution(isa):
    """Return whether a convolution is said to be slow, and the implementation that oneDNN says to have taken."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1"}
    command = [sys.executable, "-c", CONVOLUTION]
    folder = Path(__file__).parents[2]
    *lines, said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.split()
    (implementation,) = (line.split(",convolution,")[1].split(",")[0] for line in lines if ",convolution," in line)
    return said, implementation


@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
def test_they_are_slow_where_the_reference_code_computes_them(isa):
    said, implementation = run_convolution(isa)
    assert said == ("slow" if "ref" in implementation else "fast")
    if isa == "AVX2":
        assert said == "fast"
