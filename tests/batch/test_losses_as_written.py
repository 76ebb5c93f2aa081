"""Losses as people write them: equal to MindSpore's own step on the whole batch, or named."""

import mindspore as ms
import numpy as np
import pytest
from losses_as_written import PARTS, RIGHT, WRONG, build
from mindspore import nn
from refusal import all_warnings
from tiers import some

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.advice.rows import Rows

NAME = "For 'GradAccumulation', the "


def trained(case, ours):
    """The weights after three updates, and what was said."""
    cell, inputs = build(case)
    optimizer = nn.SGD(cell.trainable_params(), 0.05)
    with all_warnings() as caught:
        step = nn.TrainOneStepCell(cell, optimizer)
        if ours:
            step = TrainOneStepCell(GradAccumulation(cell, PARTS), optimizer)
        step.set_train()
        for _ in range(3):
            step(*inputs)
    weights = np.concatenate([parameter.asnumpy().ravel() for parameter in cell.get_parameters()])
    return weights, [str(each.message) for each in caught if NAME in str(each.message)]


def distance(case):
    (whole, _), (parts, said) = trained(case, ours=False), trained(case, ours=True)
    return np.linalg.norm(whole - parts) / np.linalg.norm(whole), said


@pytest.mark.parametrize("name", some(WRONG, *[*WRONG][::4]))
def test_a_loss_that_parts_train_otherwise_is_named_once(name, eager):
    far, said = distance(WRONG[name])
    assert far > 1e-6
    assert len(said) == 1
    assert said[0].count(" but ") <= 1 and said[0].endswith("docs/concepts.md.")


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_parts_train_alike_is_not(name, eager):
    far, said = distance(RIGHT[name])
    assert far < 1e-6 and not said


# Each is a graph of its own: every fourth one, with that which has no value for some rows.
@pytest.mark.parametrize("name", [*WRONG, *RIGHT][::4])
def test_compiled_they_are_found_as_well(name, monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    cell, inputs = build({**WRONG, **RIGHT}[name])
    network = GradAccumulation(cell.set_train(), PARTS)
    measurement = LossMeasurement(network, cell.trainable_params(), compiles=False, half=False)
    with all_warnings() as caught:
        text = measurement.measure(Rows.parts(network, inputs, network.split(*inputs)))
    assert not caught
    assert bool(text) == (name in WRONG)
