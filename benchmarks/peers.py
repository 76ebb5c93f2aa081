"""One window, ours beside all others, in turns. Prints tables and targets; never fails.

python benchmarks/peers.py               # four networks, micro_size 4, 16 and 64
python benchmarks/peers.py --networks transformer --micro-sizes 16
python benchmarks/peers.py --overhead    # micro steps of about 10 ms: what a window adds to its parts
python benchmarks/peers.py --small       # a tiny net: what a micro step adds
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import print_target
from worker import Worker
from workload import (
    ACCELERATE,
    BARE,
    BARE_POOL,
    FULL,
    MINDSPORE_ROWS,
    OURS,
    OURS_CALLING,
    OURS_FUSED,
    OURS_OTHER_FUSED,
    OURS_OTHER_KERNELS,
    STOCK,
    TORCH,
    TORCH_ROWS,
    UNSPLIT,
    WORKLOADS,
)

ROOT = Path(__file__).resolve().parents[1]
# The networks and micro sizes of each run.
DEFAULT = ("mlp_relu", "mlp_gelu", "transformer", "conv"), (4, 16, 64)
OVERHEAD = ("step_256", "step_512", "step_1024"), (16,)
SMALL = ("tiny",), (16,)
# Beyond it the stock cell, whose graph holds all micro batches, takes minutes to compile.
MAX_UNROLLED = 4
# Turns of a row that is slow.
MIN_TURNS = 3
# Until it has run so often a kernel of MindSpore tries how many threads it is fastest with (at most six numbers, five
# times each).
TRIALS = 30
# The largest difference from the full batch in what a window adds to the weights, relative to the largest entry of
# the same tensor, that float32 rounding causes.
ROUNDING = 1e-3


class Result(NamedTuple):
    """What became of one row: an error, or the seconds of each turn, those of all cores, and what its first one did."""

    seconds: tuple[float, ...] = ()
    core_seconds: tuple[float, ...] = ()
    same: str = ""
    error: str = ""

    def over(self, other: "Result") -> float:
        """Return the median of what it took of the time of another row in the same turn.

        The machine may be slower in one turn than in the next: this disturbs times, but hardly a ratio of neighbours.
        """
        return float(np.median([mine / theirs for mine, theirs in zip(self.seconds, other.seconds)]))


Results = dict[str, Result]


def start_workers(args: argparse.Namespace) -> tuple[dict[str, Worker], str]:
    """Return the process of each row, and why some are missing."""
    mindspore, torch = ([n for n in names if n in (args.rows or names)] for names in (MINDSPORE_ROWS, TORCH_ROWS))
    # For the fused kernels, the only ones of MindSpore with threads of OpenMP.
    variables = {"OMP_WAIT_POLICY": "passive"}
    if args.isa:
        variables["ONEDNN_MAX_CPU_ISA"] = args.isa
    workers = dict.fromkeys(mindspore, Worker(sys.executable, "peers_mindspore.py", args.threads, **variables))
    if not torch:
        return workers, ""
    try:
        workers |= dict.fromkeys(torch, Worker(args.peers_python, "peers_torch.py", args.threads))
    except (OSError, RuntimeError) as error:
        return workers, f"Without PyTorch and Accelerate: {error}"
    return workers, ""


def measure(workers: dict[str, Worker], network: str, micro_size: int, args: argparse.Namespace) -> Results:
    """Return the results of all rows, which take turns once they are warm. Each turn begins with another row."""
    print(f"measuring {network}, micro_size {micro_size} ...", file=sys.stderr, flush=True)
    left_out = set() if micro_size <= MAX_UNROLLED else {STOCK}
    if not WORKLOADS[network].has_slow_kernels:
        left_out |= {OURS_OTHER_KERNELS, OURS_OTHER_FUSED}
    names = [name for name in workers if name not in left_out]
    for worker in dict.fromkeys(workers.values()):
        worker.ask("forget")
    results = run_first_windows({name: workers[name] for name in names}, network, micro_size)
    runs: dict[str, list[Any]] = {name: [] for name, result in results.items() if not result.error}
    for name in runs:
        for _ in range(warm_up(name, micro_size)):
            workers[name].ask("run", name)
    for turn in range(args.repeat):
        first = turn % max(len(runs), 1)
        for name, done in [*runs.items()][first:] + [*runs.items()][:first]:
            if turn < MIN_TURNS or sum(seconds for seconds, *_ in done) < args.seconds:
                done.append(workers[name].ask("run", name))
    for name, done in runs.items():
        seconds, of_cores, _ = zip(*done)
        results[name] = results[name]._replace(seconds=seconds, core_seconds=of_cores)
    return results


def warm_up(name: str, micro_size: int) -> int:
    """Return how many times two windows are run before the first one that counts."""
    return math.ceil(max(2, TRIALS / (1 if name in UNSPLIT else micro_size)) / 2)


def run_first_windows(workers: dict[str, Worker], network: str, micro_size: int) -> Results:
    """Build each row, run one window of it and compare that with the full batch's."""
    firsts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, worker) in enumerate(workers.items()):
            file = Path(folder) / f"{number}.npz"
            firsts[name] = worker.ask("build", network, micro_size, name) or worker.ask("run", name, str(file))
            if file.exists():
                with np.load(file) as added:
                    firsts[name] += (list(added.values()),)
    return {
        name: Result(error=first) if isinstance(first, str) else Result(same=compare(first, firsts.get(FULL)))
        for name, first in firsts.items()
    }


def compare(first: Any, full: Any) -> str:
    """Say whether a window has the loss of the full batch and adds the same to the weights."""
    *_, loss, added = first
    if loss is None:
        return "-"
    if not any(np.any(part) for part in added):
        return "does not train"
    if not isinstance(full, list):
        return "?"
    *_, full_loss, full_added = full
    off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(added, full_added))
    loss_off = abs(loss / full_loss - 1)
    if max(off, loss_off) <= ROUNDING:
        return f"yes ({off:.0e})"
    return f"NO: weights by {off:.0e}, loss by {loss_off:.0e}"


def print_table(results: Results) -> None:
    ours = results.get(OURS) or next(result for result in results.values() if not result.error)
    print(f"{'window':34}{'least time':>12}{'ours = 1':>10}{'cores':>7}  same result")
    for name, result in results.items():
        if result.error:
            print(f"{name:34}{'-':>12}{'':17}  {result.error[:120]}")
            continue
        cores = sum(result.core_seconds) / sum(result.seconds)
        print(f"{name:34}{min(result.seconds) * 1e3:9.2f} ms{result.over(ours):10.2f}{cores:7.1f}  {result.same}")


def print_targets(results: Results, micro_size: int, network: str) -> None:
    ran = {name: result for name, result in results.items() if not result.error}
    bare = [name for name in (BARE, BARE_POOL) if name in ran]
    if OURS in ran and bare:
        # Ours may have MindSpore's threads, and so may they.
        overhead, bare_seconds = max((ran[OURS].over(ran[name]), ran[name].seconds) for name in bare)
        if network == "tiny":
            extra = (overhead - 1) * float(np.median(bare_seconds)) / micro_size * 1e3
            print_target("ours - bare parts, ms per micro step", extra, 0.15, "<=")
        else:
            print_target("ours / bare parts", overhead, 1.03, "<=")
        if {TORCH, ACCELERATE} <= ran.keys():
            half = 1 + (ran[ACCELERATE].over(ran[TORCH]) - 1) / 2
            print_target("ours / bare parts, beside half of Accelerate's overhead", overhead, half, "<=")
    if {OURS, ACCELERATE} <= ran.keys():
        print_target("ours / Accelerate", ran[OURS].over(ran[ACCELERATE]), 1.0, "<=")
    for name in (OURS_CALLING, OURS_OTHER_KERNELS, OURS_FUSED, OURS_OTHER_FUSED):
        if {name, ACCELERATE} <= ran.keys():
            print_target(f"{name} / Accelerate", ran[name].over(ran[ACCELERATE]), 1.0, "<=")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--small", dest="preset", action="store_const", const=SMALL, help="a tiny net")
    preset.add_argument("--overhead", dest="preset", action="store_const", const=OVERHEAD, help="micro steps of 10 ms")
    parser.add_argument("--networks", nargs="+", choices=WORKLOADS)
    parser.add_argument("--micro-sizes", type=int, nargs="+")
    parser.add_argument("--rows", nargs="+", choices=MINDSPORE_ROWS + TORCH_ROWS, help="default: all")
    parser.add_argument("--repeat", type=int, default=30, help="most turns of each row")
    parser.add_argument("--seconds", type=float, default=2.5, help=f"after these and {MIN_TURNS} turns a row rests")
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA of MindSpore, AVX2 for example")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each framework; default: all cores")
    parser.add_argument(
        "--peers-python", default=str(ROOT / ".venv-peers/bin/python"), help="a Python with requirements.txt"
    )
    args = parser.parse_args()
    networks, micro_sizes = args.preset or DEFAULT
    args.networks, args.micro_sizes = args.networks or networks, args.micro_sizes or micro_sizes
    return args


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    workers, missing = start_workers(args)
    processes: Iterable[Worker] = dict.fromkeys(workers.values())
    print("; ".join(worker.versions for worker in processes), f"; SGD with momentum, {args.threads} threads each")
    if missing:
        print(missing)
    for network in args.networks:
        for micro_size in args.micro_sizes:
            results = measure(workers, network, micro_size, args)
            print(f"\n{network}: {WORKLOADS[network]}, micro_size {micro_size}")
            print_table(results)
            print_targets(results, micro_size, network)
    for worker in processes:
        worker.end()


if __name__ == "__main__":
    main()
