"""Losses as people write them: equal to MindSpore's own step on the whole batch, or named."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from losses_as_written import PARTS, RIGHT, WRONG, build
from mindspore import nn
from refusal import no_warning, told
from tiers import some

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.advice.rows import Rows


def trained(case, ours):
    cell, inputs = build(case)
    optimizer = sgd(cell, 0.05)
    with told("For 'GradAccumulation', the ") as said:
        step = nn.TrainOneStepCell(cell, optimizer)
        if ours:
            step = TrainOneStepCell(GradAccumulation(cell, PARTS), optimizer)
        step.set_train()
        for _ in range(3):
            step(*inputs)
    weights = np.concatenate([parameter.asnumpy().ravel() for parameter in cell.get_parameters()])
    return weights, said


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
    with no_warning():
        text = measurement.measure(Rows.parts(network, inputs, network.split(*inputs)))
    assert bool(text) == (name in WRONG)
