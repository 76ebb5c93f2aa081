"""`find_micro_size` with child processes, each of which takes seconds."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import memory_networks
import mindspore as ms
import numpy as np
import pytest
from memory_networks import grows, lacks_device_memory, nothing, raises_its_own, wide_in_rows
from mindspore import nn
from refusal import refuses
from started_processes import start_another

from ms_gradaccum import find_micro_size
from ms_gradaccum.__main__ import main
from ms_gradaccum.tools import micro_size_finder
from ms_gradaccum.tools.processes import EndedError, Job

ROOT = Path(__file__).parents[2]
MIB = 2**20


def peak_of_a_program(micro_size):
    """Return the memory of a process that trains in this way, by its own account."""
    command = [sys.executable, memory_networks.__file__, str(micro_size)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getenv("PYTHONPATH", "")])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


def everything():
    """The state that a measurement must leave as it is."""
    generators = random.getstate(), np.random.get_state()[1].tobytes(), ms.get_rng_state().asnumpy().tobytes()
    context = [ms.get_context(name) for name in ("mode", "device_target", "device_id")]
    return generators, context, list(sys.path), list(sys.argv), dict(os.environ)


def test_the_answer_fits_and_its_neighbour_does_not():
    # Of 4 rows the micro batches have 4 or 2 rows, each of which takes 32 MiB or so.
    expected = peak_of_a_program(2)
    before = everything()
    probes = []
    assert find_micro_size(wide_in_rows, expected + 16 * MIB, report=probes.append) == 2
    assert everything() == before
    whole, halves = probes
    assert (whole.micro_size, whole.rows, whole.peak, whole.fits) == (1, 4, None, False)
    assert (halves.micro_size, halves.rows, halves.fits) == (2, 2, True)
    # It measures what the program measures.
    assert halves.peak == pytest.approx(expected, abs=12 * MIB)


def test_an_error_of_the_network_is_not_taken_for_missing_memory_nor_the_other_way_round(eager):
    # It allocates without end, and is ended.
    with refuses(MemoryError, "'memory_limit'", "optimizer or batch"):
        find_micro_size(grows, "624MiB")
    with refuses(RuntimeError, "training must run") as raised:
        find_micro_size(raises_its_own, "1GiB")
    assert "in construct" in str(raised.value.__cause__)
    with refuses(MemoryError, "optimizer and single"):
        find_micro_size(lacks_device_memory, "1GiB")


class LostJob(Job):
    """Its process ends in another way, or does not answer, after a first report."""

    how = ""

    def __init__(self, *task):
        self.process = SimpleNamespace(returncode=-getattr(signal, self.how, 0))
        self.received = 0

    def __exit__(self, *error):
        pass

    def wait(self, *settings, moment=None):
        self.received += 1
        if self.received == 1:
            return [micro_size_finder.Measured(rows=1)]
        raise EndedError if self.how else TimeoutError

    def last_words(self):
        return "some words"


@pytest.mark.parametrize(
    "how, error, sentence",
    [
        # Only the system kills the process, when memory runs out.
        ("SIGKILL", MemoryError, "optimizer and single"),
        ("SIGSEGV", RuntimeError, "ended with SIGSEGV. Its last words: some words"),
        ("", TimeoutError, "'timeout'"),
    ],
)
def test_a_process_that_is_lost_is_told_by_how_it_ended(how, error, sentence, monkeypatch):
    monkeypatch.setattr(micro_size_finder, "Job", LostJob)
    monkeypatch.setattr(LostJob, "how", how)
    with refuses(error, sentence):
        find_micro_size(nothing, "1GiB", timeout=2)


def ends(processes, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(runs, processes)):
        time.sleep(0.05)
    return not any(map(runs, processes))


def runs(process):
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


JOBS = """
import os
import signal
import time
from ms_gradaccum.tools.processes import Job
signal.signal(signal.SIGINT, signal.SIG_IGN)  # As in a script's background.
for count in (1, 2):
    print(Job(count, time.sleep, 600).process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_ends_with_a_program_that_is_killed_before_its_processes_have_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = subprocess.run([sys.executable, "-c", JOBS], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300)
    jobs = [int(line) for line in program.stdout.split()]
    assert len(jobs) == 2 and ends(jobs, 30)


def test_what_a_process_of_a_job_has_started_ends_with_it_in_a_session_of_its_own_too():
    with Job(1, start_another) as job:
        (report,) = job.wait(300)
        assert runs(report["started"])
    assert ends([report["started"]], 30)


def micro_size(function, *arguments):
    return main(["micro-size", f"{memory_networks.__file__}:{function}", *arguments])


def test_the_command_prints_the_answer_alone_and_the_table_beside_it(eager, capsys, monkeypatch):
    # Folders that MindSpore searches first do not hide modules of Python from the child.
    monkeypatch.setattr(sys, "path", list(sys.path))
    ms.amp.auto_mixed_precision(nn.Dense(2, 2), "O1")
    assert any(place.endswith("mindspore/nn/layer") for place in sys.path)
    assert micro_size("clipped", "--memory-limit", "4GiB") == 0
    output = capsys.readouterr()
    assert output.out == "1\n"
    assert re.fullmatch(r"micro_size     1       1 row +\d+\.\d MiB  fits +\d+\.\d s\n", output.err)


def test_the_command_ends_with_status_1_if_nothing_fits_and_says_what_single_rows_take(eager, capsys):
    assert micro_size("nothing", "--memory-limit", "64MiB") == 1
    output = capsys.readouterr()
    table, error = output.err.splitlines()
    (peak,) = re.fullmatch(r"micro_size     1       1 row +(\d+\.\d) MiB  too much +\d+\.\d s", table).groups()
    assert output.out == "" and 200 < float(peak) < 1000
    assert error.startswith("python -m ms_gradaccum micro-size: For 'find_micro_size', the argument 'memory_limit'")
    assert f"{peak} MiB" in error


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("memory_networks:wrongly_clipped", "For 'TrainOneStepCell', the argument 'clip' must be "),
        ("nosuch.part:build", "but got 'nosuch.part:build' without the module nosuch."),
        ("missing.py:build", "but got 'missing.py:build', whose file is not there."),
    ],
)
def test_the_command_ends_with_status_2_after_an_error(name, sentence, capsys):
    assert main(["micro-size", name, "--memory-limit", "1GiB"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m ms_gradaccum micro-size: For '") and said.count("\n") == 1
    assert sentence in said
