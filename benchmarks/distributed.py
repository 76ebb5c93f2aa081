"""Messages and time of one window on several processes. Prints one table; never fails.

python benchmarks/distributed.py    # 6 x (Dense(512), GELU), batch 1024 per rank, Adam, on 2 and 4 processes
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_group_size, init
from windows import AddingMicroStep, UpdateFromSums, adding_loop_by_hand, make_batch, make_network, run_window, versions

from ms_gradaccum import HSDP, DataParallel, GradAccumulation, TrainOneStepCell
from ms_gradaccum.parallel.world import gather_counts
from ms_gradaccum.tools.processes import Job

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import quick_mindspore
from described_messages import described

NAIVE = "naive, sync each micro batch"
OURS = "ours, data parallel"
KINDS = {
    OURS: DataParallel(),
    "ours, DataParallel(sync_each_batch=True)": DataParallel(sync_each_batch=True),
    "ours, HSDP level1": HSDP(threshold=0),
    "ours, HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}
NAMES = (NAIVE, *KINDS)


def build(name: str, micro_size: int, args: argparse.Namespace) -> tuple[Callable[..., Any], nn.Cell, list[int]]:
    """Return what runs a window, its network, and the bytes of each message; the tests count those of ours."""
    network = make_network(args)
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    if name == NAIVE:
        # What a user writes without this package, compiled as far as it goes.
        micro_step = AddingMicroStep(network.set_train(), optimizer.parameters, ops.AllReduce())
        update = UpdateFromSums(optimizer, micro_step.sums, micro_size * get_group_size())
        sent = micro_size * [total.nbytes for total in micro_step.sums]
        return adding_loop_by_hand(micro_step, update, micro_size), network, sent
    step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, parallel=KINDS[name])
    return step, network, [message.nbytes for message in described(step.body.reducer).of_window(1, micro_size)]


def measure_windows(micro_size: int, args: argparse.Namespace) -> dict[str, tuple[list[float], list[int]]]:
    """Return the seconds of each window on this rank and what it sends: all rows take turns, after two to warm up."""
    batch = make_batch(args)
    programs = {name: build(name, micro_size, args) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2 + args.repeat):
        for name, (step, network, _) in programs.items():
            gather_counts("begins", 0)  # All ranks start together.
            seconds[name].append(run_window(step, network, batch))
    return {name: (seconds[name][2:], sent) for name, (_, _, sent) in programs.items()}


def measured(micro_size: int, args: argparse.Namespace) -> Iterator[dict[str, tuple[list[float], list[int]]]]:
    """In a process of the job, yield what it measures."""
    quick_mindspore.install()
    gc.freeze()  # Each compilation collects garbage, which takes longest in the modules that never become any.
    init()
    ms.set_context(mode=ms.GRAPH_MODE)
    yield measure_windows(micro_size, args)


def print_rows(processes: int, micro_size: int, args: argparse.Namespace) -> None:
    # The job imports the function from its file, which is the main program here.
    with Job(processes, import_module(Path(__file__).stem).measured, micro_size, args) as job:
        ranks = job.wait(600.0)
    # The best run, each as long as its slowest rank.
    times = {name: min(max(runs) for runs in zip(*(rank[name][0] for rank in ranks))) for name in NAMES}
    for name in NAMES:
        sent = ranks[0][name][1]
        print(
            f"{processes:5}{micro_size:11}  {name:44}{len(sent):5}{sum(sent) / 1e6:8.2f} MB"
            f"{times[name] * 1e3:9.1f} ms{times[name] / times[OURS]:5.2f}",
            flush=True,
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1024, help="rows per rank and window")
    parser.add_argument("--repeat", type=int, default=5, help="windows per time, after two to warm up")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch} per rank, Adam; {versions()}")
    print(f"{'ranks':5}{'micro_size':>11}  {'window':44}{'calls':>5}{'sent':>11}{'time':>12}")
    for processes in args.processes:
        for micro_size in args.micro_sizes:
            print_rows(processes, micro_size, args)


if __name__ == "__main__":
    main()
