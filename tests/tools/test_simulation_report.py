"""The report of a simulation on its processes, and their work before and after they compile."""

from pathlib import Path

import pytest
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import mind_ir_pb2
from refusal import loss_cell

from ms_gradaccum import GradAccumulation, Model, Simulation
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.parallel import factory
from ms_gradaccum.parallel.world import World
from ms_gradaccum.tools.processes import Job, Meeting
from ms_gradaccum.tools.simulation import worker
from ms_gradaccum.tools.simulation.partition import WORLD_GROUP, messages_of
from ms_gradaccum.tools.simulation.report import Program

# A part of the names that the compiler gives to operators of a purpose.
NAMES = {"gradients": "grad_mirror", "weights": "parallel_optimizer", "norm": "global_norm"}


def program(*messages):
    """A program of messages, as (purpose, ranks, bytes, count)."""
    model = mind_ir_pb2.ModelProto()
    for number, (purpose, ranks, nbytes, count) in enumerate(messages):
        primitive = model.primitives.add(name=f"p{number}", op_type="AllReduce", instance_name=NAMES[purpose])
        group = WORLD_GROUP if ranks is None else f"{len(ranks)}-{number}"
        primitive.attribute.add(name="group", s=group.encode())
        primitive.attribute.add(name="group_ranks", s="-".join(map(str, ranks or "")).encode())
        for _ in range(count):
            node = model.graph.node.add(op_type=f"REF::p{number}")
            node.attribute.add(name="shape").tensors.add(dims=[nbytes // 4], data_type=1)
    return Program(messages_of(model, 4), {}, 1.0, 2**20)


OURS = program(("gradients", [0, 2], 100, 3), ("weights", [0, 1], 48, 2), ("norm", None, 4, 1))


def test_the_table_has_a_line_for_each_kind_of_messages():
    cells = [line.split("  ") for line in str(Simulation(4, OURS, None)).splitlines() if line.startswith("  AllReduce")]
    assert [[cell.strip() for cell in line if cell] for line in cells] == [
        ["AllReduce, gradients", "2: 0 2", "3", "300"],
        ["AllReduce, weights", "2: 0 1", "2", "96"],
        ["AllReduce, norm", "4: 0 1 2 3", "1", "4"],
    ]


def test_the_progress_is_that_of_a_rank_that_still_works(tmp_path):
    job = Job.__new__(Job)
    job.folder, job.count = tmp_path, 3
    ranks = [Meeting(str(tmp_path)) for rank in range(3)]
    for rank, meeting in enumerate(ranks):
        meeting.join(rank, 3)
    ranks[0].phase("building")
    assert job.phase() == "starting 3 processes"
    ranks[1].phase("training on the whole batch")
    # It has nothing to compile.
    ranks[2].report({})
    ranks[0].phase("compiling for 3 devices")
    assert job.phase() == "compiling for 3 devices"
    ranks[0].report({})
    assert job.phase() == "training on the whole batch"
    ranks[1].report({})
    assert job.phase() == "done"


def test_a_model_gives_its_step_the_settings_that_it_sets_itself_in_a_training(monkeypatch):
    monkeypatch.setattr(factory, "current_world", lambda owner: World(0, 2))
    network = loss_cell()
    with built_for("GPU"):
        cell = AutoParallel(GradAccumulation(network, 2))
        cell._device_num = 2
        step = worker.step_of(Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1)))
    assert step.body.semi_auto.auto_parallel is cell
    assert all(each.training for _, each in network.cells_and_names())


def test_what_cpu_lacks_is_a_sentence_with_the_way_out():
    with pytest.raises(RuntimeError, match="'run' must be False .* got True: Fused, which CPU lacks. Without it"):
        with worker.on_cpu():
            raise NotImplementedError("Fused, which CPU lacks")


def test_relative_paths_begin_where_the_user_is(tmp_path):
    before = Path.cwd()

    class Told(Exception):
        pass

    class Here:
        def call(self):
            raise Told(Path.cwd())

    with pytest.raises(Told) as told:
        worker.build_step(Here(), str(tmp_path))
    assert told.value.args == (tmp_path,) and Path.cwd() == before
