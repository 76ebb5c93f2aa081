"""One window, ours beside all others, in turns. Prints tables; never fails.

python benchmarks/peers.py               # four networks, micro_size 4, 16 and 64
python benchmarks/peers.py --networks transformer --micro-sizes 16
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from worker import Worker
from workload import FULL, MINDSPORE_ROWS, OURS, TORCH_ROWS, WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
# Turns of a row that is slow.
MIN_TURNS = 3
# Until it has run so often a kernel of MindSpore tries how many threads it is fastest with (at most six numbers, five
# times each).
TRIALS = 30
# The largest difference from the full batch in what a window adds to the weights, relative to the largest entry of
# the same tensor, that float32 rounding causes.
ROUNDING = 1e-3


class Result(NamedTuple):
    """The result of one row: an error, or the seconds of each turn, and the outcome of the first one."""

    seconds: tuple[float, ...] = ()
    same: str = ""
    error: str = ""

    def over(self, other: "Result") -> float:
        """Return the median of what it took of the time of another row in the same turn.

        The machine may be slower in one turn than in the next: this disturbs times, but hardly a ratio of neighbours.
        """
        return float(np.median([mine / theirs for mine, theirs in zip(self.seconds, other.seconds)]))


Results = dict[str, Result]


def start_workers(args: argparse.Namespace) -> dict[str, Worker]:
    """Return the process of each row. Say why some are missing."""
    mindspore, torch = ([n for n in names if n in (args.rows or names)] for names in (MINDSPORE_ROWS, TORCH_ROWS))
    variables = {"ONEDNN_MAX_CPU_ISA": args.isa} if args.isa else {}
    workers = dict.fromkeys(mindspore, Worker(sys.executable, "peers_mindspore.py", args.threads, **variables))
    try:
        workers |= dict.fromkeys(torch, Worker(args.peers_python, "peers_torch.py", args.threads) if torch else None)
    except (OSError, RuntimeError) as error:
        print(f"Without PyTorch and Accelerate: {error}")
    return workers


def measure(workers: dict[str, Worker], network: str, micro_size: int, args: argparse.Namespace) -> Results:
    """Return the results of all rows, which take turns once they are warm. Each turn begins with another row."""
    print(f"measuring {network}, micro_size {micro_size} ...", file=sys.stderr, flush=True)
    for worker in dict.fromkeys(workers.values()):
        worker.ask("forget")
    results = run_first_windows(workers, network, micro_size)
    runs: dict[str, list[Any]] = {name: [] for name, result in results.items() if not result.error}
    for name in runs:
        # Each run is two windows, before the first one that counts.
        for _ in range(math.ceil(max(2, TRIALS / (1 if name == FULL else micro_size)) / 2)):
            workers[name].ask("run", name)
    for turn in range(args.repeat):
        first = turn % max(len(runs), 1)
        for name, done in [*runs.items()][first:] + [*runs.items()][:first]:
            if turn < MIN_TURNS or sum(seconds for seconds, _ in done) < args.seconds:
                done.append(workers[name].ask("run", name))
    for name, done in runs.items():
        results[name] = results[name]._replace(seconds=tuple(seconds for seconds, _ in done))
    return results


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
    print(f"{'window':34}{'least time':>12}{'ours = 1':>10}  same result")
    for name, result in results.items():
        if result.error:
            print(f"{name:34}{'-':>12}{'':10}  {result.error[:120]}")
            continue
        print(f"{name:34}{min(result.seconds) * 1e3:9.2f} ms{result.over(ours):10.2f}  {result.same}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--micro-sizes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rows", nargs="+", choices=MINDSPORE_ROWS + TORCH_ROWS, help="default: all")
    parser.add_argument("--repeat", type=int, default=30, help="most turns of each row")
    parser.add_argument("--seconds", type=float, default=2.5, help=f"after these and {MIN_TURNS} turns a row rests")
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA of MindSpore, AVX2 for example")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each framework; default: all cores")
    parser.add_argument(
        "--peers-python", default=str(ROOT / ".venv-peers/bin/python"), help="a Python with requirements.txt"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    workers = start_workers(args)
    processes = dict.fromkeys(workers.values())
    print("; ".join(worker.versions for worker in processes), f"; SGD with momentum, {args.threads} threads each")
    for network in args.networks:
        for micro_size in args.micro_sizes:
            results = measure(workers, network, micro_size, args)
            print(f"\n{network}: {WORKLOADS[network]}, micro_size {micro_size}")
            print_table(results)
    for worker in processes:
        worker.end()


if __name__ == "__main__":
    main()
