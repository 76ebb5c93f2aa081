"""The test equipment that compiles for devices which are not there, and runs the partitioned program on the CPU."""

import pytest
from refusal import refuses
from simulated_programs import HIDDEN, INSIDE, OUTSIDE, alone, sharded
from simulation.cuda_stubs import why_not
from simulation.simulate import simulate
from simulation.worker import build_step

from ms_gradaccum.tools.builder import Builder

compiles = pytest.mark.skipif(why_not() is not None, reason=f"cannot compile for GPU here: {why_not()}")

FIRST = INSIDE * HIDDEN + HIDDEN


@compiles
def test_a_sharded_network_trains_as_one_process_does():
    found = simulate(sharded, 2, run=True)
    training = found.training
    assert training.difference < 2e-7 < 1e-3 < training.moved
    assert training.losses == pytest.approx(training.whole_losses, rel=1e-6)
    assert len(set(training.losses)) == 3
    # The first layer is halved, and the rows of the second one's weight; its bias is whole.
    held = (FIRST + HIDDEN * OUTSIDE) // 2 + OUTSIDE
    assert found.ours.held_bytes["parameters"] == 4 * held
    assert found.ours.held_bytes["buffer"] == 4 * held
    # Of Momentum; and the rate, the momentum and the count of updates.
    assert found.ours.held_bytes["optimizer state"] == 4 * (held + 3)
    # In each of 2 micro batches the products of the second layer are added up (8 rows of 4 columns), and the losses.
    sent = {(kind.operator, kind.purpose): (kind.count, kind.nbytes) for kind in found.ours.messages}
    assert sent["AllReduce", "forward of a sharded operator"] == (4, 2 * 8 * OUTSIDE * 4 + 2 * 4)
    # Between the layers columns become rows, where no strategy is given.
    assert ("AlltoAll", "another layout, forward") in sent
    norm = [kind for kind in found.ours.messages if kind.purpose == "norm"]
    assert [(kind.operator, kind.count, kind.nbytes) for kind in norm] == [("AllReduce", 1, 4)]


def test_a_step_that_nothing_partitions_is_refused(tmp_path):
    with refuses(ValueError, "without AutoParallel"):
        build_step(Builder.of("simulate", alone), str(tmp_path))
