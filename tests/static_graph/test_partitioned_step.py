"""A partitioned step as far as it needs no devices: its numbers in one piece, and what it says after its graph."""

from types import SimpleNamespace

import numpy as np
import pytest
from linear_toy import ALL, X, descend, line, mse, sgd, weight_of
from mindspore import Tensor
from refusal import refuses

from ms_gradaccum import GradAccumulation, StepOutput
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph import partitioned_step
from ms_gradaccum.static_graph.partitioned_step import PartitionedStep
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.settings import StepSettings

pytestmark = pytest.mark.usefixtures("eager")


def partitioned(*updates):
    """Run a partitioned step, whose graph needs devices, with graphs that update or meet an Inf."""
    network = SimpleNamespace(positional=lambda args, kwargs: args)
    step = SimpleNamespace(events=Events("TrainOneStepCell"), network=network, last_flags=[], is_unmeasured=False)
    step.progress = SimpleNamespace(may_leave_out=False)
    for updated in updates:
        nothing = Tensor(0.0)
        items = (nothing, Tensor(not updated), nothing, Tensor(updated), nothing, nothing, nothing, nothing)
        PartitionedStep.run(step, (), {}, lambda items=items: items)
    return step


def test_a_partitioned_training_without_updates_ends():
    with refuses(RuntimeError, "Inf or NaN"):
        partitioned(*[False] * 100)
    # One update among them, and 99 without one after it.
    step = partitioned(*[False] * 50, True, *[False] * 99)
    assert len(step.last_flags) == 50
    counted = step.events.state_dict()
    assert (counted["batches"], counted["updates"], counted["skipped_updates"]) == (150, 1, 149)
    step = partitioned(True)
    step.events.load_state_dict(counted)
    assert step.events.state_dict() == counted


def test_a_partitioned_step_refuses_to_join():
    with refuses(RuntimeError, "Give all devices"):
        PartitionedStep.join(partitioned())


def test_op_by_op_an_update_in_one_piece_is_the_one_by_hand(monkeypatch):
    """Without micro batches and devices, of which the compiler makes a program, it is an ordinary function."""
    monkeypatch.setattr(partitioned_step, "require_partition", lambda: None)
    network = line()
    cell = GradAccumulation(mse(network), 1)
    step = PartitionedStep(cell, sgd(network), SemiAuto(None), StepSettings.checked("TrainOneStepCell"))
    step.is_called = True
    report = StepOutput(*step.construct(Tensor(X), Tensor(2 * X)))
    assert weight_of(network) == pytest.approx(descend(ALL))
    assert float(report.loss.asnumpy()) == pytest.approx(np.mean((2 * X) ** 2))
    assert [float(report.weight.asnumpy()), bool(report.updated.asnumpy())] == [8, True]
