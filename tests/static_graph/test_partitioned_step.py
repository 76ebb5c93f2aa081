"""A partitioned step as far as it needs no devices: what it says after its graph."""

from types import SimpleNamespace

import pytest
from mindspore import Tensor
from refusal import refuses

from ms_gradaccum.static_graph.partitioned_step import PartitionedStep
from ms_gradaccum.training.events import Events

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
    assert len(partitioned(*[False] * 50, True, *[False] * 99).last_flags) == 50


def test_a_partitioned_step_refuses_to_join():
    with refuses(RuntimeError, "Give all devices"):
        PartitionedStep.join(partitioned())
