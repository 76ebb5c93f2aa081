"""What a simulation makes of what its processes have found."""

import dataclasses

import pytest

from ms_gradaccum import Simulation
from ms_gradaccum.tools.simulation.job import Job, Meeting
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
    assert [size * 2**20 for size in our_sizes] == [300, 100, 4]
    assert [size * 2**20 for size in their_sizes] == [300, 100, 0]
    assert held_bars == (["parameters", "buffer"], [1.0, 2.0])
    assert (tmp_path / "simulation.png").stat().st_size > 0


def test_the_progress_is_that_of_a_rank_that_still_works(tmp_path):
    job = Job.__new__(Job)
    job.folder, job.devices = tmp_path, 3
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
