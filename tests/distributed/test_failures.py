"""A job that cannot go on says why, soon, and leaves no process."""

import os
import re
import signal
import socket

import pytest
from sample_process import processes_in, run_sample, running_sample

# What run.sh does about a worker is the same whatever that does: the test of faults kills workers that train.
PROGRAM = """
import os
import sys
import time

time.sleep(5)  # until run.sh has noted which process each worker is
print("the loss falls", flush=True)
if os.environ["MS_ROLE"] == "MS_WORKER" and os.environ["MS_NODE_ID"] in sys.argv[1:]:
    1 // 0
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def test_a_killed_worker_ends_the_job(tmp_path, program):
    # The one whose log is shown.
    wanted = {"MS_ROLE=MS_WORKER", "MS_NODE_ID=0"}
    with running_sample(tmp_path, limit=180, arguments=(program,)) as sample:
        assert any("loss" in line for line in sample.stdout), sample.stderr.read()
        (worker,) = [process for process, variables in processes_in(tmp_path).items() if wanted <= set(variables)]
        os.kill(worker, signal.SIGKILL)
        _, errors = sample.communicate(timeout=30)
    assert sample.returncode == 1
    assert errors.startswith("Error: worker 0 was killed, by someone or because memory ran out.\n")
    assert "Last lines of log_output/worker_0.log:" in errors
    assert processes_in(tmp_path) == {}


@pytest.mark.parametrize("failing", [["1"], ["0", "1"]], ids=["one", "all"])
def test_an_exception_ends_the_job_and_the_last_lines_of_one_worker_that_failed_are_shown(failing, tmp_path, program):
    result = run_sample(tmp_path, limit=180, arguments=(program, *failing))
    assert result.returncode == 1
    workers = f"[{''.join(failing)}]"
    assert re.match(rf"Error: worker {workers} ended with status 1\.\n", result.stderr)
    assert re.search(rf"^Last lines of log_output/worker_{workers}\.log:$", result.stderr, re.M)
    assert "ZeroDivisionError: integer division or modulo by zero" in result.stderr
    assert processes_in(tmp_path) == {}


def add_tool(folder, name, script):
    tool = folder / "tools" / name
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tool.parent


TOO_FEW = (
    "{} workers on this machine need as many devices, but it has {} ({}). Lower LOCAL_WORKER_NUM or WORKER_NUM, or use "
    "DEVICE_TARGET=CPU."
)


@pytest.mark.parametrize(
    "target,tool,script,workers,message",
    [
        ("GPU", "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0b5f)'", "2", TOO_FEW.format(2, 1, "GPU")),
        ("GPU", "nvidia-smi", "", "1", TOO_FEW.format(1, 0, "GPU")),
        ("Ascend", "npu-smi", "echo 'NPU ID     : 0\nChip Count : 2'", "3", TOO_FEW.format(3, 2, "Ascend")),
        (
            "GPU",
            "nvidia-smi",
            "echo no driver\nexit 9",
            "2",
            "DEVICE_TARGET=GPU, but 'nvidia-smi -L' failed: no driver",
        ),
    ],
)
def test_too_few_devices_are_told_before_anything_starts(target, tool, script, workers, message, tmp_path):
    tools = add_tool(tmp_path, tool, script)
    result = run_sample(tmp_path, limit=30, tools=tools, DEVICE_TARGET=target, WORKER_NUM=workers)
    assert (result.returncode, result.stderr) == (1, f"Error: {message}\n")
    assert not (tmp_path / "log_output").exists()


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_sample(tmp_path, limit=30, MASTER_PORT=str(port))
    assert result.returncode == 1
    assert result.stderr.startswith(f"Error: machine 0 cannot listen on MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: ")
    assert "Address already in use" in result.stderr
    assert not (tmp_path / "log_output").exists()


def test_the_second_machine_starts_and_shows_its_own_workers(tmp_path):
    logs = "echo two > log_output/worker_2.log; echo three > log_output/worker_3.log"
    tools = add_tool(tmp_path, "msrun", f"echo $* > arguments; {logs}; sleep 1")
    settings = {"WORKER_NUM": "4", "LOCAL_WORKER_NUM": "2", "NODE_RANK": "1"}
    result = run_sample(tmp_path, limit=30, tools=tools, MASTER_ADDR="10.0.0.1", MASTER_PORT="8118", **settings)
    assert (result.returncode, result.stdout, result.stderr) == (0, "two\n", "")
    arguments = (tmp_path / "arguments").read_text().split()
    wanted = "--worker_num=4 --local_worker_num=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=8118"
    assert set(wanted.split()) <= set(arguments)


SEVERAL = (
    "with several machines (LOCAL_WORKER_NUM=2 of WORKER_NUM=4) set MASTER_ADDR to the address of machine 0 and "
    "MASTER_PORT to a free port of it, the same on each machine."
)


@pytest.mark.parametrize(
    "variables,message",
    [
        ("WORKER_NUM=0", "WORKER_NUM must be a whole number of at least 1, but got '0'."),
        ("WORKER_NUM=abc", "WORKER_NUM must be a whole number of at least 1, but got 'abc'."),
        ("LOCAL_WORKER_NUM=-1", "LOCAL_WORKER_NUM must be a whole number of at least 1, but got '-1'."),
        ("NODE_RANK=first", "NODE_RANK must be a whole number of at least 0, but got 'first'."),
        ("NODE_RANK=1", "NODE_RANK must be below 1, the number of machines, but got 1."),
        ("WORKER_NUM=4 LOCAL_WORKER_NUM=3", "LOCAL_WORKER_NUM must divide WORKER_NUM=4, but got 3."),
        ("WORKER_NUM=4 LOCAL_WORKER_NUM=2 MASTER_ADDR=127.0.0.1", SEVERAL),
        ("WORKER_NUM=4 LOCAL_WORKER_NUM=2 MASTER_PORT=8118", SEVERAL),
        ("DEVICE_TARGET=TPU", "DEVICE_TARGET must be CPU, GPU or Ascend, but got 'TPU'."),
    ],
)
def test_a_wrong_setting_is_told_before_anything_starts(variables, message, tmp_path):
    result = run_sample(tmp_path, limit=30, **dict(variable.split("=") for variable in variables.split()))
    assert result.returncode == 1
    assert result.stderr == f"Error: {message}\n"
    assert not (tmp_path / "log_output").exists()
