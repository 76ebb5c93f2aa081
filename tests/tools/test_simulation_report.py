"""What a simulation makes of what its processes have found, and what these do before and after they compile."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel
from refusal import loss_cell

from ms_gradaccum import GradAccumulation, Model, Simulation
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.parallel import factory
from ms_gradaccum.tools.jobs import Meeting
from ms_gradaccum.tools.simulation import worker
from ms_gradaccum.tools.simulation.job import Job
from ms_gradaccum.tools.simulation.report import MessageKind, Program


def found(*messages):
    """What a process has found, of messages as (purpose, ranks, bytes, count)."""
    names = ("operator", "purpose", "ranks", "size", "bytes", "count")
    rows = [("AllReduce", purpose, ranks, ranks and len(ranks), *sizes) for purpose, ranks, *sizes in messages]
    return {"messages": [dict(zip(names, row)) for row in rows], "seconds": 1.0, "peak": 2**20}


OURS = found(("gradients", [0, 2], 100, 3), ("weights", [0, 1], 50, 2), ("norm", None, 4, 1))
STOCK = found(("gradients", [1, 3], 100, 3), ("weights", [0, 1], 50, 2))


@pytest.fixture
def simulation():
    return Simulation(4, "GPU", Program.of(OURS, 4), Program.of(STOCK, 4), None, None)


def test_groups_of_another_rank_are_those_of_rank_0(simulation):
    """MindSpore's cell is compiled on rank 1, whose groups have other members."""
    assert simulation.stock.messages == simulation.ours.messages[:2]
    assert [(kind.purpose, kind.ranks) for kind in simulation.ours.messages] == [
        ("gradients", (0, 2)),
        ("weights", (0, 1)),
        ("norm", (0, 1, 2, 3)),
    ]


def test_the_table_has_both_programs_in_one_line(simulation):
    cells = [line.split("  ") for line in str(simulation).splitlines() if line.startswith("  AllReduce")]
    assert [[cell.strip() for cell in line if cell] for line in cells] == [
        ["AllReduce, gradients", "2: 0 2", "3", "300", "3", "300"],
        ["AllReduce, weights", "2: 0 1", "2", "100", "2", "100"],
        ["AllReduce, norm", "4: 0 1 2 3", "1", "4", "-", "-"],
    ]


def test_the_traffic_is_one_message_each(simulation):
    sent = simulation.ours.traffic.of_window(batches=1, micro_batches=4)
    assert [tuple(message) for message in sent] == [("AllReduce", 2, 100)] * 3 + [("AllReduce", 2, 50)] * 2 + [
        ("AllReduce", 4, 4)
    ]


def test_the_plot_has_a_bar_for_each_kind_of_each_program(simulation, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "barh", lambda axes, places, sizes, *_, **__: drawn.append((list(places), list(sizes))))
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    held = {"parameters": 2**20, "buffer": 2**21}
    ours = dataclasses.replace(simulation.ours, held_bytes=held)
    dataclasses.replace(simulation, ours=ours).plot(tmp_path / "simulation.png")
    (our_places, our_sizes), (their_places, their_sizes), held_bars = drawn
    assert len({*our_places, *their_places}) == 6
    assert our_sizes == [300, 100, 4]
    assert their_sizes == [300, 100, 0]
    assert held_bars == (["parameters", "buffer"], [1.0, 2.0])
    assert (tmp_path / "simulation.png").stat().st_size > 0


def test_the_progress_is_that_of_a_rank_that_still_works(tmp_path):
    job = Job.__new__(Job)
    job.folder, job.count = tmp_path, 3
    ranks = [Meeting(str(tmp_path), rank, 3) for rank in range(3)]
    ranks[0].phase("building")
    assert job._phase() == "starting 3 processes"
    ranks[1].phase("compiling MindSpore's own cell")
    # It has nothing to compile.
    ranks[2].report({})
    ranks[0].phase("compiling for 3 devices")
    assert job._phase() == "compiling for 3 devices"
    ranks[0].report({})
    assert job._phase() == "compiling MindSpore's own cell"
    ranks[1].report({})
    assert job._phase() == "done"


def test_a_kind_is_what_json_holds(simulation):
    (kind, *_) = simulation.to_dict()["ours"]["messages"]
    assert MessageKind(**kind) == simulation.ours.messages[0]


def test_a_model_gives_its_step_the_settings_that_it_sets_itself_in_a_training(monkeypatch):
    monkeypatch.setattr(factory, "current_world", lambda owner: SimpleNamespace(size=2))
    network = loss_cell()
    with built_for("GPU"):
        cell = AutoParallel(GradAccumulation(network, 2))
        cell._device_num = 2
        step = worker._step_of(Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1)))
    assert step.body.semi_auto.auto_parallel is cell
    assert all(each.training for _, each in network.cells_and_names())


def test_what_cpu_lacks_is_a_sentence_with_the_way_out():
    with pytest.raises(RuntimeError, match="'run' must be False .* got True: Fused, which CPU lacks. Without it"):
        with worker._on_cpu():
            raise NotImplementedError("Fused, which CPU lacks")


def test_relative_paths_begin_where_the_user_is(tmp_path):
    before = Path.cwd()
    with worker._inside(str(tmp_path)):
        assert Path.cwd() == tmp_path
    assert Path.cwd() == before
