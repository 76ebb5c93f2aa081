"""`python -m ms_gradaccum test`: it passes here, each of its cells fails in a broken build, and nothing stops it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import mindspore as ms
import pytest
from refusal import refuses
from self_test_cells import IN_BUILD, dies, late, raises, run, tried, well
from started_processes import processes_with

import ms_gradaccum.__main__ as command
from ms_gradaccum.tools.processes import IN_JOB, Job
from ms_gradaccum.tools.self_test import trials
from ms_gradaccum.tools.self_test.self_test import self_test
from ms_gradaccum.tools.self_test.training import ALONE, Cell, judge, tolerance
from ms_gradaccum.tools.self_test.trials import CELLS

SELF_TEST = "ms_gradaccum.tools.self_test.self_test.self_test"


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_behind():
    before = set(processes_with(IN_JOB))
    yield
    deadline = time.monotonic() + 20
    while set(processes_with(IN_JOB)) - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(processes_with(IN_JOB)) <= before


def faults_of(cell):
    """The faults with which a job of several is tried after it: a wrong division, and ranks that do not add up."""
    if cell.parallel == ALONE or cell.dtype != "float32":
        return ()
    return ("division", "reduction") if cell.parallel == "data parallel" else ("division",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command on this machine: the exit status, the JSON and what is printed."""
    file = tmp_path_factory.mktemp("self_test") / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        lines = []
        patch.setattr(command.tqdm, "write", lines.append)
        cells = [tried(cell, *faults_of(cell)) for cell in CELLS]
        patch.setattr(SELF_TEST, partial(self_test, cells=cells))
        status = command.main(["test", "--timeout", "300", "--output", str(file)])
    return status, json.loads(file.read_text()), lines


def test_all_that_can_be_tried_here_passes(whole):
    status, found, lines = whole
    assert [cell["said"] for cell in found["cells"] if cell["outcome"] == "failed"] == []
    skipped = {cell["said"] for cell in found["cells"] if cell["outcome"] == "skipped"}
    assert skipped == {"this CPU has no matrix product in bfloat16"}
    assert status == 0 and found["seconds"] > 1
    assert len(lines) == len(found["cells"]) == len(CELLS) == 10
    # The file says where and what.
    assert (found["format"], found["device"], found["workers"]) == (2, "CPU", 2)
    assert found["environment"]["mindspore"] == ms.__version__ and "system" in found["environment"]
    names = ["name", "parallel", "dtype", "mode", "processes", "outcome", "said", "difference", "tolerance", "seconds"]
    assert all(list(cell) == names for cell in found["cells"])
    parallel = {cell["parallel"]: cell["processes"] for cell in found["cells"]}
    assert parallel == {"one process": 1, "data parallel": 2, "HSDP level1": 2, "HSDP level2": 2}
    assert "NaN" not in json.dumps(found) and "Infinity" not in json.dumps(found)


CELLS_ALONE = [cell for cell in CELLS if cell.parallel == ALONE and cell.dtype != "bfloat16"]
BROKEN = [(cell, "division") for cell in CELLS_ALONE]
BROKEN += [(cell, "clip") for cell in CELLS_ALONE if cell.name.startswith("clip")]
BROKEN += [(cell, "state") for cell in CELLS_ALONE if cell.name.startswith("state")]


@pytest.mark.parametrize("cell, fault", BROKEN, ids=[f"{cell.name}-{fault}" for cell, fault in BROKEN])
def test_a_cell_of_one_process_fails_in_a_broken_build(cell, fault, tmp_path, eager):
    assert run(cell.function, fault, replace(cell, folder=str(tmp_path))).outcome == "failed"


@pytest.mark.parametrize("fault, outcome", [(None, "passed"), ("division", "failed")])
def test_a_pass_in_data_sink_mode_is_compared_by_its_parameters(fault, outcome, tmp_path, eager):
    # No report comes out of a whole pass; on CPU MindSpore feeds its batches one by one.
    cell = replace(next(cell for cell in CELLS_ALONE if "sink" in cell.name), device="GPU", folder=str(tmp_path))
    assert run(trials.one_graph, fault, cell).outcome == outcome


def test_jobs_of_several_fail_in_a_broken_build(whole):
    _, found, _ = whole
    in_jobs = [cell for cell in found["cells"] if cell["parallel"] != ALONE and cell["dtype"] == "float32"]
    said = [cell["said"] for cell in in_jobs]
    assert sum(text.count(f"{IN_BUILD}division: failed") for text in said) == len(said)
    assert sum(text.count(f"{IN_BUILD}reduction: failed") for text in said) == 1


def quietly(cells, **settings):
    return self_test(cells=cells, show=lambda line: None, **{"timeout": 300, **settings})["cells"]


class LateJob(Job):
    """A process that answers once, and then no more."""

    def wait(self, timeout, watch):
        watch()
        if self.received:
            raise TimeoutError("1 of 2 processes")
        return super().wait(300, watch)


def test_what_raises_or_hangs_takes_only_itself_with_it(monkeypatch):
    jobs, told = [LateJob, Job, Job], []
    monkeypatch.setattr("ms_gradaccum.tools.self_test.self_test.Job", lambda *task: jobs.pop(0)(*task))
    cells = [Cell("well", well), Cell("raises", raises), Cell("well", well)]
    hung, raised, fine = quietly(cells, timeout=45, tell=told.append)
    assert hung["said"].startswith("it hangs: 1 of 2 processes have not answered within 45 s")
    assert (raised["outcome"], raised["said"]) == ("failed", "OSError: no such data")
    assert (hung["outcome"], fine["outcome"]) == ("failed", "passed")
    # It says again and again where it is, so that a clock beside it goes on.
    assert told.count("1 of 3: well, float32, GRAPH") >= 2
    assert list(dict.fromkeys(text[:6] for text in told)) == ["1 of 3", "2 of 3", "3 of 3"]


def test_a_process_that_dies_takes_no_cell_before_it_along():
    """It ended the job while the others had not reported that cell."""
    cells = [Cell(each.__name__, each, parallel="data parallel") for each in (late, dies)]
    before, died = quietly(cells)
    assert before["outcome"] == "passed"
    assert died["said"].startswith("its process ended: ")


def test_a_device_that_is_not_there_fails_each_cell():
    outcomes = quietly([Cell("well", well), Cell("well", well)], device="Ascend")
    assert [cell["outcome"] for cell in outcomes] == ["failed"] * 2
    assert "Ascend" in outcomes[0]["said"]


def test_a_machine_without_msrun_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with refuses(RuntimeError, "started by msrun"):
        quietly([Cell("well", well, parallel="data parallel")])


def test_one_worker_starts_no_job():
    (outcome,) = quietly([Cell("well", well, parallel="data parallel")], workers=1)
    assert (outcome["outcome"], outcome["said"]) == ("skipped", "it takes several processes")


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    # What is started in the background would ignore a Ctrl-C.
    settings = {"stderr": subprocess.PIPE, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    before = set(processes_with(IN_JOB))
    arguments = [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"]
    arguments[-1] += "import sys; from ms_gradaccum.__main__ import main; sys.exit(main(['test', '--workers', '1']))"
    settings |= {"stdout": subprocess.DEVNULL, "cwd": tmp_path}
    with subprocess.Popen(arguments, env=environment, text=True, **settings) as process:
        while not set(processes_with(IN_JOB)) - before:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "it was interrupted, and its processes have ended." in said
    assert set(processes_with(IN_JOB)) <= before and list(tmp_path.iterdir()) == []


def test_the_status_says_whether_something_failed(monkeypatch, capsys, tmp_path):
    found = {"device": "CPU", "workers": 2, "seconds": 1.0, "passed": 0, "failed": 1, "skipped": 0}
    found["cells"] = [{"outcome": "failed", "said": "losses differ"}]
    monkeypatch.setattr(SELF_TEST, lambda *args, **settings: found)
    assert command.main(["test", "--output", str(tmp_path / "found.json")]) == 1
    assert "0 passed, 1 failed, 0 skipped on CPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["cells"][0]["said"] == "losses differ"
    found |= {"passed": 2, "failed": 0}
    monkeypatch.chdir(tmp_path)
    assert command.main(["test"]) == 0
    written = tmp_path / "ms_gradaccum_test.json"
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["2 passed, 0 failed, 0 skipped on CPU, 2 workers, in 1 s", f"Written to {written}"]
    assert json.loads(written.read_text())["passed"] == 2
    assert command.main(["test", "--output", str(tmp_path / "missing" / "found.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--timeout", "nan"]])
def test_wrong_arguments_are_one_sentence(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command.main(["test", *arguments]) == 2
    assert f"For 'test', the argument '{arguments[0][2:]}' must be a positive" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_difference_that_is_no_number_fails():
    assert judge(1e-7, 1e-6, "losses") == ("passed", "1.0e-07 of 1.0e-06 (losses)", 1e-7, 1e-6)
    for difference in (math.nan, math.inf, 2e-6):
        assert judge(difference, 1e-6, "losses").outcome == "failed"
    assert judge(math.nan, 1e-6, "losses").difference is None


def test_tolerances_follow_the_device_and_the_dtype():
    exact = tolerance("CPU", ms.float32, 10000, 16)
    # 100 additions that count of 2**-24, and 4 roundings.
    assert exact == pytest.approx(4 * (100 + 4) * 2.0**-24)
    half = tolerance("CPU", ms.float16, 10000, 16)
    assert half == pytest.approx(4 * (100 * 2.0**-24 + 4 * 2.0**-11))
    # Matrix units keep 11 bits of a float32.
    assert tolerance("GPU", ms.float32, 10000, 16) == tolerance("Ascend", ms.float32, 10000, 16) == half
    assert tolerance("GPU", ms.bfloat16, 10000, 16) > 7 * half
