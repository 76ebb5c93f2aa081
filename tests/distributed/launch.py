"""Start a script under msrun and collect what each of its processes reports."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import quick_mindspore
from mindspore import communication

from ms_gradaccum.tools.processes import free_port

# For what runs under msrun, all of which reports through this file.
quick_mindspore.install()

# Of the environment that the tests run in, activated or not.
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
# Where the processes find this package and the helpers of the tests.
PLACES = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]


def launch(script, processes, folder, limit=600.0, extra=None, arguments=()):
    """Run ``script`` on several processes of this machine and return their reports in the order of the ranks.

    ``extra`` holds environment variables, ``arguments`` what follows the script on the command line.
    """
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, PLACES)),
        "REPORT_FOLDER": str(folder),
        # More threads than cores only wait for each other.
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }
    command = [
        str(BIN / "msrun"),
        f"--worker_num={processes}",
        f"--local_worker_num={processes}",
        f"--master_port={free_port()}",
    ]
    command += [f"--log_dir={folder / 'log'}", "--join=True", str(script), *arguments]
    reports = [folder / f"report_{rank}.json" for rank in range(processes)]
    with (folder / "msrun.log").open("w") as log:
        job = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + limit
    try:
        while job.poll() is None and not all(report.exists() for report in reports) and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        # Its own way to end waits 40 s for processes that have nothing more to say.
        job.send_signal(signal.SIGINT)
        job.wait()
    silent = [rank for rank, report in enumerate(reports) if not report.exists()]
    if silent:
        logs = {rank: _read(folder / "log" / f"worker_{rank}.log") for rank in silent}
        # The others wait for the one that has failed.
        failed = next((rank for rank in silent if "Traceback" in logs[rank]), silent[0])
        said = logs[failed]
        tail = said[said.find("Traceback") :][:3000] if "Traceback" in said else said[-3000:]
        raise RuntimeError(f"rank {failed} of {processes} reported nothing:\n{tail}")
    return [json.loads(report.read_text()) for report in reports]


def _read(log):
    return log.read_text(errors="replace") if log.exists() else "no log"


def meet(eager=False):
    """Meet the other processes of the job; return this one's rank, and how many they are.

    With ``eager`` this one goes on op by op, for which nothing is compiled.
    """
    communication.init()
    if eager:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        os.environ["MS_JIT"] = "0"
    return communication.get_rank(), communication.get_group_size()


def report(rank, values):
    """Hand ``values`` to the test; whole or not at all."""
    path = Path(os.environ["REPORT_FOLDER"]) / f"report_{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.rename(path)


def run_scenarios(*scenarios):
    """Run parts of a worker one after the other, and say in its log how much of a core each took."""
    for scenario in scenarios:
        begin = time.process_time()
        scenario()
        print(f"{scenario.__name__}: {time.process_time() - begin:.1f} s of a core", flush=True)
