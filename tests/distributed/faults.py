"""Kill a training at random moments and see that nothing is lost.

    python tests/distributed/faults.py [--kills 50] [--processes 2] [--seed 0]

Each time the job has to end with an error, leave no process, and go on when it is started again. At the end everything
that it has seen and holds is compared with a training that was left alone.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from sample_process import processes_in, running_sample  # noqa: E402

PROGRAM = Path(__file__).with_name("fault_worker.py")
# What is killed, and with what.
FAULTS = {
    "worker": signal.SIGKILL,
    "msrun": signal.SIGKILL,
    "run.sh": signal.SIGKILL,
    "run.sh, gently": signal.SIGTERM,
}


@contextmanager
def running(folder, processes, **variables):
    settings = {"limit": 900, "arguments": (str(PROGRAM), str(folder)), "OMP_NUM_THREADS": "1"}
    with (folder / "job.log").open("a") as log:
        with running_sample(folder, output=log, WORKER_NUM=str(processes), **settings, **variables) as job:
            yield job


def victim(fault, job, folder):
    """The process id of what a fault kills, or None if it is not there."""
    if fault.startswith("run.sh"):
        return job.pid
    found = processes_in(folder)
    if fault == "worker":
        workers = [process for process in found if "MS_ROLE=MS_WORKER" in found[process]]
        return random.choice(workers) if workers else None
    with suppress(OSError):  # it has ended
        for process in found:
            is_worker = any(entry.startswith("MS_ROLE=") for entry in found[process])
            if not is_worker and "msrun" in Path(f"/proc/{process}/cmdline").read_text():
                return process
    return None


def newest(folder):
    states = (folder / "states").glob("state-*")
    return max((int(state.name.partition("-")[2]) for state in states), default=0)


def strike(fault, folder, processes, generator, limit=60, **variables):
    """Start the job, kill something of it once it goes on, and return the seconds until nothing of it is left.

    None if it was done before.
    """
    with running(folder, processes, **variables) as job:
        begun, goal = newest(folder), newest(folder) + generator.randrange(1, 6)
        while newest(folder) < goal and job.poll() is None:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.05))  # in the middle of a step, of a state, or between
        process = victim(fault, job, folder)
        if process is None or job.poll() is not None:
            job.wait()
            return None
        struck = time.monotonic()
        os.kill(process, FAULTS[fault])
        status = job.wait(timeout=limit)
        while processes_in(folder) and time.monotonic() - struck < limit:
            time.sleep(0.1)
    assert status != 0, f"after a kill of {fault} the job ended well"
    if fault == "worker":
        said = (folder / "job.log").read_text()
        assert re.search(r"^Error: worker \d+ was killed, by someone or because memory ran out\.$", said, re.M), said
    if fault == "run.sh, gently":
        assert status == 143
    assert not processes_in(folder), f"processes are left {limit} s after a kill of {fault}"
    assert newest(folder) >= begun
    return time.monotonic() - struck


def finish(folder, processes, **variables):
    with running(folder, processes, **variables) as job:
        status = job.wait(timeout=600)
    assert status == 0, (folder / "job.log").read_text()[-3000:]


def story(folder, processes):
    """Return what each rank has seen, step by step, and its end. A step that came twice must have been the same."""
    told = []
    for rank in range(processes):
        steps = {}
        for line in (folder / f"diary_{rank}.jsonl").read_text().splitlines():
            step, *what = json.loads(line)
            assert steps.setdefault(step, what) == what, f"rank {rank}, step {step} came twice, as another one"
        told.append([steps, (folder / f"end_{rank}.txt").read_text()])
    return told


def main():
    parser = argparse.ArgumentParser(description="Kill a training at random moments and see that nothing is lost.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator, seconds, kinds = random.Random(args.seed), [], Counter()
    with tempfile.TemporaryDirectory() as root:
        alone, struck = Path(root, "alone").resolve(), Path(root, "struck").resolve()
        alone.mkdir(), struck.mkdir()
        length = {"FAULT_EPOCHS": str(max(6, 2 * args.kills))}
        finish(alone, args.processes, **length)
        for kill in range(args.kills):
            fault = generator.choice(list(FAULTS))
            took = strike(fault, struck, args.processes, generator, **length)
            if took is None:
                break
            seconds.append(took)
            kinds[fault] += 1
            print(f"{kill + 1:3}  {fault:16} ended after {took:4.1f} s, last state {newest(struck)}", flush=True)
        finish(struck, args.processes, **length)
        assert story(struck, args.processes) == story(alone, args.processes)
    print(f"{len(seconds)} kills ({dict(kinds)}): each ended within {max(seconds):.1f} s and left no process; what was")
    print("seen step by step, the weights and the optimizer's state are those of the training that was left alone.")


if __name__ == "__main__":
    main()
