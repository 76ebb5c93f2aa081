"""`python -m ms_gradaccum test`: it passes here, each of its cells fails in a broken build, and nothing stops it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import mindspore as ms
import pytest
from self_test_cells import FAULTS, IN_BUILD, going, tried
from started_processes import processes_with

import ms_gradaccum.__main__ as command
from ms_gradaccum.tools.self_test.cells import Group, groups_for
from ms_gradaccum.tools.self_test.runner import IN_TEST, Outcome
from ms_gradaccum.tools.self_test.self_test import SelfTest, self_test
from ms_gradaccum.tools.self_test.tolerances import tolerance
from ms_gradaccum.tools.self_test.training import Found
from ms_gradaccum.tools.self_test.worker import judge
from ms_gradaccum.tools.simulation.cuda_stubs import why_not

ROOT = Path(__file__).parents[2]
# The first one in a broken build alone: it takes as long as the other one, which has all that there is.
SHARDINGS = ("semi-auto, plain", "semi-auto, sharded operators, level3")
COSTS = "bare parts of a window", "a window over its bare parts"
# Of each way to compile one, beside the partitions. The tests of these ways compile the others.
COMPILED = [("MLP", "one process", "float32"), ("toy", "data parallel", "float32")]

REASONS = {"this CPU has no matrix product in bfloat16", "CPU has no data sink mode: Model feeds batches one by one"}


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_behind():
    before = set(processes_with(IN_TEST))
    yield
    deadline = time.monotonic() + 20
    while set(processes_with(IN_TEST)) - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(processes_with(IN_TEST)) <= before


def groups_here(workers):
    """Each cell in one mode, and most of them in broken builds too: all of it takes minutes."""
    groups = []
    for group in groups_for(workers):
        cells = {(each.name, each.parallel, each.dtype): each for each in group.cells if is_tried(each)}
        cells = [replace(each, mode="GRAPH" if is_compiled(each) else "PYNATIVE") for each in cells.values()]
        by_hand = [replace(each, mode="PYNATIVE") for each in cells]
        broken = {fault: [tried(each, fault) for each in by_hand if fails(each, fault, group)] for fault in FAULTS}
        # What one process alone raises ends a job of several.
        last = broken.pop("reduction")
        first, *others = [tried(each) for each in cells if each.parallel != SHARDINGS[0]]
        # The first one measures memory. What is saved last is for another group, and of the whole build.
        groups.append(replace(group, cells=(first, *chain(*broken.values()), *others, *last)))
    return groups


def is_tried(cell):
    """Whether it is no partition that takes as long as others and tells no more."""
    return not cell.parallel.startswith("semi-auto") or cell.parallel in SHARDINGS


def is_compiled(cell):
    """Whether it is one of a few. Next to nothing is compiled for the others."""
    if cell.name.endswith((*COSTS, "graph")) or cell.parallel in SHARDINGS:
        return True
    return (cell.name, cell.parallel, cell.dtype) in COMPILED


def fails(cell, fault, group):
    """Whether it is tried in a broken build: all kinds with a wrong division, those of the other faults with these."""
    if fault == "division":
        seen = cell.name, cell.dtype == "float32"
        return cell.name not in COSTS and cell.parallel != SHARDINGS[1] and seen != ("transformer", False)
    if fault == "reduction":
        together = cell.parallel == "data parallel" and cell.dtype == "float32"
        return together and cell.name.startswith(("toy", "transformer", "loss scale"))
    return cell.name.startswith(fault) and (fault == "state" or group.processes == 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command on this machine: the exit status, the JSON and what is printed."""
    file = tmp_path_factory.mktemp("self_test") / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        lines = []
        patch.setattr(command.tqdm, "write", lines.append)
        patch.setattr("ms_gradaccum.tools.self_test.self_test.groups_for", groups_here)
        status = command.main(["test", "--timeout", "300", "--output", str(file)])
    return status, json.loads(file.read_text()), lines


def cells_of(found, *faults):
    """What was found, in one or more broken builds or, without one, in the whole one."""
    return [cell for cell in found["cells"] if cell["name"].partition(IN_BUILD)[2] in (faults or ("",))]


def test_all_that_can_be_tried_here_passes(whole):
    _, found, _ = whole
    cells = cells_of(found)
    assert [cell for cell in cells if cell["outcome"] == "failed"] == []
    skipped = {cell["said"] for cell in cells if cell["outcome"] == "skipped"}
    assert why_not() is not None or skipped == REASONS
    assert found["seconds"] > 1 and len(cells) > 25


def test_the_file_says_where_and_what(whole):
    status, found, lines = whole
    assert (found["format"], found["device"], found["workers"]) == (1, "CPU", 2)
    assert found["environment"]["mindspore"] == ms.__version__ and "system" in found["environment"]
    names = ["name", "parallel", "dtype", "mode", "processes", "outcome", "said", "difference", "tolerance", "seconds"]
    assert all(list(cell) == [*names, "figures"] for cell in found["cells"])
    assert {"one process", "data parallel", "HSDP level1", "HSDP level2", "semi-auto, plain"} <= {
        cell["parallel"] for cell in found["cells"]
    }
    (costs,) = [cell["figures"] for cell in found["cells"] if cell["name"] == "a window over its bare parts"]
    assert 0.1 < costs["time"] < 10 and 0.1 < costs["memory"] < 10
    # Every line that was printed as it came, and none that JSON cannot hold.
    groups = groups_here(2)
    assert len(lines) == len(found["cells"]) + len(groups)
    assert len(found["cells"]) == sum(len(group.cells) for group in groups)
    assert "NaN" not in json.dumps(found) and "Infinity" not in json.dumps(found)
    assert status == 1 and found["failed"] == sum(cell["outcome"] == "failed" for cell in found["cells"])


def test_a_wrong_division_fails_every_cell(whole):
    cells = cells_of(whole[1], "division")
    assert {cell["outcome"] for cell in cells} == {"failed", "skipped"}
    assert {cell["said"] for cell in cells if cell["outcome"] == "skipped"} <= REASONS
    failed = [cell for cell in cells if cell["outcome"] == "failed"]
    assert len(failed) > 18 and all("is rounding" in cell["said"] for cell in failed)


def test_other_faults_fail_those_that_are_for_them(whole):
    """A clip before the division, a state that is not loaded, ranks that do not add up."""
    cells = cells_of(whole[1], "clip", "state", "reduction")
    assert len({(cell["name"], cell["parallel"], cell["processes"]) for cell in cells}) == len(cells) == 8
    assert all(cell["outcome"] == "failed" and "is rounding" in cell["said"] for cell in cells)


def quietly(groups, **settings):
    return self_test(groups=groups, show=lambda line: None, **{"timeout": 300, **settings}).outcomes


def test_what_raises_hangs_or_dies_takes_only_itself_with_it():
    alone = Group("one process", 1, tuple(map(going, ("raises", "well", "dies", "well"))))
    together = Group("2 processes", 2, tuple(map(going, ("well", "hangs", "well"))))
    outcomes = quietly([alone, together], timeout=5)
    said = [(outcome.cell.name, outcome.outcome) for outcome in outcomes]
    assert [word for name, word in said if name == "well"] == ["passed"] * 4
    raised, died, hung = (outcome for outcome in outcomes if outcome.cell.name != "well")
    assert (raised.outcome, raised.said) == ("failed", "OSError: no such data")
    assert died.outcome == "failed" and died.said.startswith("its process ended")
    assert hung.outcome == "failed" and hung.said.startswith("it hangs: 1 of 2 processes have not answered within 5 s")


def test_a_process_that_cannot_begin_fails_all_of_its_cells():
    """There is no such device here."""
    group = Group("one process", 1, (going("well"), going("well")))
    outcomes = quietly([group], device="Ascend")
    assert [outcome.outcome for outcome in outcomes] == ["failed"] * 2
    assert outcomes[0].said.startswith("the process cannot begin: ")


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    # What is started in the background would ignore a Ctrl-C.
    settings = {"stderr": subprocess.PIPE, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    before = set(processes_with(IN_TEST))
    arguments = [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"]
    arguments[-1] += "import sys; from ms_gradaccum.__main__ import main; sys.exit(main(['test', '--workers', '1']))"
    with subprocess.Popen(arguments, env=environment, text=True, stdout=subprocess.DEVNULL, **settings) as process:
        while not set(processes_with(IN_TEST)) - before:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "it was interrupted, and its processes have ended." in said
    assert set(processes_with(IN_TEST)) <= before and list(tmp_path.iterdir()) == []


def test_the_status_says_whether_something_failed(monkeypatch, capsys, tmp_path):
    outcome = Outcome(going("well"), 1, "failed", "losses differ")
    monkeypatch.setattr(command, "self_test", lambda *args, **settings: SelfTest("CPU", 2, 1.0, {}, (outcome,)))
    assert command.main(["test", "--output", str(tmp_path / "found.json")]) == 1
    assert "0 passed, 1 failed, 0 skipped on CPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["cells"][0]["said"] == "losses differ"
    well = replace(outcome, outcome="passed")
    monkeypatch.setattr(command, "self_test", lambda *args, **settings: SelfTest("CPU", 2, 1.0, {}, (well, well)))
    assert command.main(["test"]) == 0
    assert "2 passed, 0 failed, 0 skipped on CPU" in capsys.readouterr().out
    assert command.main(["test", "--output", str(tmp_path / "missing" / "found.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--timeout", "nan"]])
def test_wrong_arguments_are_one_sentence(arguments, capsys):
    assert command.main(["test", *arguments]) == 2
    assert f"For 'test', the argument '{arguments[0][2:]}' must be a positive" in capsys.readouterr().err


def test_a_difference_that_is_no_number_fails():
    assert judge(Found(1e-7, 1e-6, "losses")) == ("passed", "1.0e-07 of 1.0e-06 (losses)")
    for difference in (math.nan, math.inf, 2e-6):
        assert judge(Found(difference, 1e-6, "losses"))[0] == "failed"


def test_tolerances_follow_the_device_and_the_dtype():
    exact = tolerance("CPU", ms.float32, 10000, 16)
    # 100 additions that count of 2**-24, and 4 roundings.
    assert exact == pytest.approx(4 * (100 + 4) * 2.0**-24)
    half = tolerance("CPU", ms.float16, 10000, 16)
    assert half == pytest.approx(4 * (100 * 2.0**-24 + 4 * 2.0**-11))
    # Matrix units keep 11 bits of a float32.
    assert tolerance("GPU", ms.float32, 10000, 16) == tolerance("Ascend", ms.float32, 10000, 16) == half
    assert tolerance("GPU", ms.bfloat16, 10000, 16) > 7 * half
