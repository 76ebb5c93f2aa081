"""`simulate`: processes that compile for devices which are not there. Each job takes seconds, so few do much."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mindspore
import pytest
import simulated_programs as programs
from refusal import raises
from simulated_programs import HIDDEN, INSIDE, OUTSIDE, fails, halves, sharded
from started_processes import processes_with

from ms_gradaccum import simulate
from ms_gradaccum.__main__ import main
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import IN_JOB, Job, Meeting
from ms_gradaccum.tools.simulation import simulate as simulate_module
from ms_gradaccum.tools.simulation.cuda_stubs import environment, why_not
from ms_gradaccum.tools.simulation.simulate import wait_for_reports
from ms_gradaccum.tools.simulation.worker import build_step

compiles = pytest.mark.skipif(why_not() is not None, reason=f"cannot compile for GPU here: {why_not()}")

ROOT = Path(__file__).parents[2]
PROGRAM = Path(programs.__file__)
FIRST, SECOND = INSIDE * HIDDEN + HIDDEN, HIDDEN * OUTSIDE + OUTSIDE


def refuses(kind, beginning):
    return pytest.raises(kind, match="^" + re.escape(beginning))


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path_factory, monkeypatch):
    before = set(processes_with(IN_JOB))
    # Of this test alone: others run beside it.
    folder = tmp_path_factory.mktemp("jobs")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    deadline = time.monotonic() + 20
    while set(processes_with(IN_JOB)) - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(processes_with(IN_JOB)) <= before
    assert list(folder.glob("ms_gradaccum_*")) == []


@compiles
def test_a_sharded_network_trains_as_one_process_does(tmp_path, capsys):
    """The command, and all that it writes."""
    found, place = tmp_path / "found.json", f"{PROGRAM}:sharded"
    assert main(["simulate", place, "--devices", "2", "--run", "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(found.read_text())
    training = result["training"]
    assert training["difference"] < 2e-7 < 1e-3 < training["moved"]
    assert training["losses"] == pytest.approx(training["whole_losses"], rel=1e-6)
    assert len(set(training["losses"])) == 3
    # The first layer is halved, and the rows of the second one's weight; its bias is whole.
    held = (FIRST + HIDDEN * OUTSIDE) // 2 + OUTSIDE
    assert result["ours"]["held_bytes"]["parameters"] == 4 * held
    assert result["ours"]["held_bytes"]["buffer"] == 4 * held
    # Of Momentum; and the rate, the momentum and the count of updates.
    assert result["ours"]["held_bytes"]["optimizer state"] == 4 * (held + 3)
    # In each of 2 micro batches the products of the second layer are added up (8 rows of 4 columns), and the losses.
    sent = {(kind["operator"], kind["purpose"]): (kind["count"], kind["nbytes"]) for kind in result["ours"]["messages"]}
    assert sent["AllReduce", "forward of a sharded operator"] == (4, 2 * 8 * OUTSIDE * 4 + 2 * 4)
    # Between the layers columns become rows, where no strategy is given.
    assert ("AlltoAll", "another layout, forward") in sent
    norm = [kind for kind in result["ours"]["messages"] if kind["purpose"] == "norm"]
    assert [(kind["operator"], kind["count"], kind["nbytes"]) for kind in norm] == [("AllReduce", 1, 4)]
    assert "One of 2 GPUs" in printed and f"{training['difference']:.1e}" in printed


@compiles
def test_rows_on_two_devices_in_a_model():
    found = simulate(halves, 2, run=True)
    # Adam divides gradients that are near zero, and their rounding, by their size.
    assert found.training.difference < 2e-6 < 1e-2 < found.training.moved
    gradients = [kind for kind in found.ours.messages if kind.purpose == "gradients"]
    # One message of each of 4 parameters, whole.
    assert [(kind.operator, kind.size, kind.ranks, kind.count) for kind in gradients] == [
        ("ReduceScatter", 2, (0, 1), 4)
    ]
    assert gradients[0].nbytes == 4 * (FIRST + SECOND)
    assert json.loads(json.dumps(found.to_dict()))["training"]["farthest"] == found.training.farthest


def test_what_a_process_raises_is_raised_here(tmp_path):
    """The job that brings it is tested with a network's error in `test_micro_size_finder.py`."""
    try:
        build_step(Builder.of("simulate", fails), str(ROOT))
    except OSError as error:
        Meeting(str(tmp_path)).error(error)
    sentence = "For 'simulate', what 'build' returns must compile and run, but rank 0 got OSError: no such data"
    with job_of(tmp_path, 1) as job, raises(RuntimeError, sentence) as caught:
        wait_for_reports(job, 60.0, str)
    assert "simulated_programs.py" in str(caught.value.__cause__)


def test_a_step_that_nothing_partitions_is_refused(tmp_path):
    """In a process of the job, whose sentence comes as it is."""
    meeting = Meeting(str(tmp_path))
    sentence = "For 'simulate', the argument 'build' must be a function that returns a step which the compiler "
    with refuses(ValueError, f"{sentence}partitions, but got one without AutoParallel") as raised:
        build_step(Builder.of("simulate", programs.alone), str(ROOT))
    meeting.error(raised.value)
    with job_of(tmp_path, 1) as job, refuses(ValueError, str(raised.value)):
        wait_for_reports(job, 60.0, str)


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("For 'GradAccumulation', one.\nAnd a hint."), "For 'GradAccumulation', one.\nAnd a hint."),
        (
            RuntimeError("----\n- Kernel error:\n----\none\n----\ntwo"),
            "For 'simulate', what 'build' returns must compile and run, but rank 0 got RuntimeError: one",
        ),
    ],
)
def test_an_error_of_ours_comes_whole_and_of_any_other_the_first_line(error, text, tmp_path):
    Meeting(str(tmp_path)).error(error)
    with job_of(tmp_path, 1) as job, pytest.raises(type(error)) as raised:
        wait_for_reports(job, 60.0, str)
    assert str(raised.value) == text


@contextmanager
def job_of(folder, count):
    """A job whose files are in a folder, and whose process does nothing."""
    job = Job.__new__(Job)
    job.folder, job.count = folder, count
    with subprocess.Popen(["sleep", "60"]) as job.process:
        yield job
        job.process.kill()


def test_the_time_that_is_given_is_that_of_the_job(tmp_path, monkeypatch):
    times = []
    monkeypatch.setattr(simulate_module, "why_not", lambda: None)
    monkeypatch.setattr(simulate_module, "Job", lambda *args: nullcontext())
    monkeypatch.setattr(simulate_module, "wait_for_reports", lambda job, timeout, tell: times.append(timeout) or [])
    monkeypatch.setattr(simulate_module, "simulation_of", lambda devices, reports: None)
    simulate(sharded, 2, timeout=7.0)
    assert times == [7.0]


def test_a_process_that_hangs_is_told(tmp_path, monkeypatch):
    """It is ended with its job, as after a Ctrl-C."""
    clock = SimpleNamespace(monotonic=iter((0.0, 11.0)).__next__)
    monkeypatch.setattr("ms_gradaccum.tools.processes.time", clock)
    with job_of(tmp_path, 1) as job:
        meeting = Meeting(str(tmp_path))
        meeting.join(0, 1)
        meeting.phase("building")
        with pytest.raises(
            TimeoutError, match="'timeout' must be more than what it takes, but got 10 s: .* 'building'"
        ):
            wait_for_reports(job, 10.0, str)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_process_that_is_killed_is_named(tmp_path, is_reaped):
    """By the one that waits for the job: MindSpore's other processes notice it after five minutes."""
    with subprocess.Popen(["sleep", "60"]) as killed, job_of(tmp_path, 2) as job:
        for rank, process in enumerate((job.process, killed)):
            with mock.patch("os.getpid", return_value=process.pid):
                meeting = Meeting(str(tmp_path))
                meeting.join(rank, 2)
                meeting.phase("building")
        with pytest.raises(TimeoutError):
            job.wait(0.0, str)
        killed.kill()
        if is_reaped:
            killed.wait()
        rule = "For 'simulate', the processes must run until all are done, but that of rank 1 of 2 ended at 'building'"
        with refuses(RuntimeError, f"{rule}. Mostly the system has killed it for want of memory"):
            wait_for_reports(job, 60.0, str)


@compiles
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, how):
    told = tmp_path / "processes"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SIMULATION_TEST_FILE": str(told), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "ms_gradaccum", "simulate", f"{PROGRAM}:says_where_it_is", "--devices", "2"]
    # What is started in the background would ignore a Ctrl-C.
    settings = {"stderr": subprocess.PIPE, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, env=environment, text=True, **settings) as process:
        while not (told.exists() and told.read_text()):
            assert process.poll() is None
            time.sleep(0.2)
        children = [int(line) for line in told.read_text().split()]
        assert children and all(Path(f"/proc/{child}").exists() for child in children)
        process.send_signal(how)
        _, said = process.communicate(timeout=30)
    interrupted = "python -m ms_gradaccum simulate: it was interrupted, and its processes have ended.\n"
    assert "Traceback" not in said and said.endswith(interrupted) == (how == signal.SIGINT)
    assert process.returncode == (130 if how == signal.SIGINT else -how)


def test_what_cannot_be_simulated_is_refused(monkeypatch):
    with refuses(ValueError, "For 'simulate', the argument 'devices' must be at least 2, but got 1."):
        simulate(sharded, 1)
    with refuses(TypeError, "For 'simulate', the argument 'devices' must be a positive int, but got '8'"):
        simulate(sharded, "8")
    with refuses(ValueError, "For 'simulate', the argument 'build' must be a function that a new process can import"):
        simulate(lambda: None, 2)
    with refuses(TypeError, "For 'simulate', the argument 'run' must be a bool, but got 1"):
        simulate(sharded, 2, run=1)
    monkeypatch.setattr(simulate_module, "why_not", lambda: "gcc is not installed")
    with refuses(RuntimeError, "For 'simulate', this machine must have gcc, nm and the GPU plugin"):
        simulate(sharded, 2)
    monkeypatch.setenv(IN_JOB, "1")
    with refuses(RuntimeError, "For 'simulate', the program must not call it when a new process imports the program"):
        simulate(sharded, 2)


def test_a_machine_without_msrun_is_told_so_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(simulate_module, "why_not", lambda: None)
    monkeypatch.setattr(simulate_module, "stand_ins", lambda folder: {})
    assert main(["simulate", f"{PROGRAM}:sharded", "--devices", "2"]) == 2
    assert capsys.readouterr().err == (
        "python -m ms_gradaccum simulate: 2 processes must be started by msrun, but it is not in PATH. It is part of "
        "MindSpore: call the command in the environment that has it.\n"
    )


@pytest.mark.parametrize(
    ("generated", "fast"), [("_builder.BuildMessageAndEnumDescriptors()", True), ("_CHECKPOINT = 1", False)]
)
def test_a_mindspore_whose_code_is_of_an_older_protobuf_reads_it_as_it_can(generated, fast, tmp_path, monkeypatch):
    """With the fast one MindSpore 2.7 to 2.9 would not be imported."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "checkpoint_pb2.py").write_text(generated)
    monkeypatch.setattr(mindspore, "__file__", str(tmp_path / "__init__.py"))
    assert ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" in environment(tmp_path)) == fast
