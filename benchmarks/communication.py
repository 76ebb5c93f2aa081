"""What sending costs: messages by size, and a window against its computing and one ideal message. Never fails.

python benchmarks/communication.py    # 6 x (Dense(512), GELU), 1024 rows per rank, 16 micro batches, 2 processes
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from distributed import launch, report
from figures import print_target
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from windows import make_batch, make_network, run_window, versions

from ms_gradaccum import DataParallel, GradAccumulation, TrainOneStepCell
from ms_gradaccum.parallel.world import gather_counts

MEGABYTES = (0.01, 0.1, 0.5, 1, 2, 4, 8, 16, 32)
COMPUTING = "computing alone"
MESSAGE = "one message of all sums"
WINDOWS = {"a window": DataParallel(), "a window, overlapping": DataParallel(overlap=True)}


class AllReduce(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, values: ms.Tensor) -> ms.Tensor:
        return self.all_reduce(values)


def message(count: int) -> Callable[[], float]:
    """Return what sends so many float32 numbers once and returns the seconds."""
    values, cell = ms.Tensor(np.ones(count, np.float32)), AllReduce()

    def send() -> float:
        gather_counts(0)  # All ranks start together.
        start = time.perf_counter()
        cell(values).asnumpy()
        return time.perf_counter() - start

    return send


def window(kind: DataParallel, sends: bool, args: argparse.Namespace) -> Callable[[], float]:
    """Return what runs one window and returns the seconds."""
    batch, network = make_batch(args), make_network(args)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = TrainOneStepCell(GradAccumulation(network, args.micro_size), optimizer, parallel=kind)
    if not sends:
        step.body.reducer.bucketed_all_reduce.all_reduce.all_reduce = None

    def run() -> float:
        gather_counts(0)
        return run_window(step, network, batch)

    return run


def in_turns(programs: dict[Any, Callable[[], float]], repeat: int) -> dict[Any, list[float]]:
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(2 + repeat):
        for name, program in programs.items():
            seconds[name].append(program())
    return {name: runs[2:] for name, runs in seconds.items()}


def run_child(args: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    init()
    ms.set_context(mode=ms.GRAPH_MODE)
    sizes = {size: message(int(size * 1e6 / 4)) for size in MEGABYTES}
    messages = in_turns(sizes, args.repeat)
    programs = {name: window(kind, True, args) for name, kind in WINDOWS.items()}
    programs[COMPUTING] = window(DataParallel(), False, args)
    weights = sum(weight.size for weight in make_network(args).trainable_params())
    programs[MESSAGE] = message(weights)
    report(get_rank(), [list(messages.values()), in_turns(programs, args.repeat), get_group_size()])


def quartile_of_slowest(runs: list[list[float]]) -> float:
    """Return the lower quartile of runs that are as long as their slowest rank."""
    return float(np.percentile([max(ranks) for ranks in zip(*runs)], 25))


def print_messages(ranks: list[Any]) -> None:
    print(f"{'message':>12}{'time':>12}{'per MB':>12}")
    for i, size in enumerate(MEGABYTES):
        seconds = quartile_of_slowest([rank[0][i] for rank in ranks])
        print(f"{size:9} MB{seconds * 1e3:9.2f} ms{seconds / size * 1e3:9.2f} ms")


def print_windows(ranks: list[Any], micro_size: int) -> None:
    times = {name: quartile_of_slowest([rank[1][name] for rank in ranks]) for name in ranks[0][1]}
    bare = times[COMPUTING] + times[MESSAGE]
    for name, seconds in times.items():
        print(f"{name:30}{seconds * 1e3:9.1f} ms{seconds / bare:7.2f}")
    reached = times["a window"] / bare
    print_target(f"window of {micro_size} micro batches / (computing + one message)", reached, 1.1, "<=")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--micro-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1024, help="rows per rank and window")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.child:
        run_child(args)
        return
    arguments = ["--child", *(f"--{key}={getattr(args, key)}" for key in ("width", "layers", "batch", "repeat"))]
    arguments += [f"--micro-size={args.micro_size}"]
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch(Path(__file__).resolve(), args.processes, Path(folder), arguments=arguments)
    print(f"{args.processes} processes, AllReduce of float32; {versions()}")
    print_messages(ranks)
    print(f"{args.layers} x (Dense({args.width}), GELU), {args.batch} rows per rank, Momentum")
    print_windows(ranks, args.micro_size)


if __name__ == "__main__":
    main()
