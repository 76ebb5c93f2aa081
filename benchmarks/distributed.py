"""Messages, time and memory of one window on several processes. Prints one table; never fails.

python benchmarks/distributed.py    # 6 x (Dense(512), GELU), batch 1024 per rank, Adam, on 2 and 4 processes
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mindspore as ms
from figures import reset_peak, status
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from windows import AddingMicroStep, UpdateFromSums, adding_loop_by_hand, make_batch, make_network, run_window, versions

from ms_gradaccum import HSDP, DataParallel, GradAccumulation, TrainOneStepCell
from ms_gradaccum.parallel import layout, shards
from ms_gradaccum.parallel.world import gather_counts

# The tests start their processes with the same launcher.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))
from launch import launch, report

NAIVE = "naive, sync each micro batch"
OURS = "ours, data parallel"
UNFUSED = "ours, data parallel, one call per parameter"
KINDS = {
    OURS: DataParallel(),
    UNFUSED: DataParallel(),
    "ours, DataParallel(sync_each_batch=True)": DataParallel(sync_each_batch=True),
    "ours, HSDP level1": HSDP(threshold=0),
    "ours, HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}
NAMES = (NAIVE, *KINDS)
WINDOWS = "windows"


class Program(NamedTuple):
    """One way to run a window, and what this rank keeps for it."""

    step: Callable[..., Any]
    # The cells whose messages are counted.
    cells: nn.Cell
    network: nn.Cell
    optimizer: nn.Cell
    sums: tuple[ms.Parameter, ...]

    def run(self, batch: tuple[ms.Tensor, ...]) -> float:
        """Run one window to its end and return the seconds that it took."""
        gather_counts(0)  # All ranks start together.
        return run_window(self.step, self.network, batch)


class Kept(NamedTuple):
    """What a window sends and what is kept on one rank, in bytes and elements."""

    messages: int
    sent: int
    state: int
    sums: int
    weights: int


class Memory(NamedTuple):
    """What a window needs on one rank in MB, above what is there before the window and before the network."""

    window: float
    total: float


class Row(NamedTuple):
    processes: int
    micro_size: int
    name: str
    seconds: float
    time_ratio: float
    kept: Kept
    memory: Memory | None


class Counter:
    """Stands in for a collective operator and notes the bytes of each message."""

    def __init__(self, operator: Callable[..., Any], sent: list[int]) -> None:
        self.operator, self.sent = operator, sent

    def __call__(self, values: ms.Tensor) -> ms.Tensor:
        self.sent.append(values.nbytes)
        return self.operator(values)


def build_naive(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Program:
    """Return what a user writes without this package, compiled as far as it goes."""
    micro_step = AddingMicroStep(network.set_train(), optimizer.parameters, ops.AllReduce())
    update = UpdateFromSums(optimizer, micro_step.sums, micro_size * get_group_size())
    step = adding_loop_by_hand(micro_step, update, micro_size)
    return Program(step, micro_step, network, optimizer, tuple(micro_step.sums))


def build(name: str, micro_size: int, args: argparse.Namespace) -> Program:
    network = make_network(args)
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    if name == NAIVE:
        return build_naive(network, optimizer, micro_size)
    with mock.patch.object(layout, "BUCKET_SIZE", 1 if name == UNFUSED else layout.BUCKET_SIZE):
        step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, parallel=KINDS[name])
    return Program(step, step, network, optimizer, (*step.body.buffer.sums, *step.body.reducer.sums))


def measure_memory(name: str, micro_size: int, args: argparse.Namespace) -> Memory:
    """Return the peak resident memory over two windows; each rank calls this once in a process of its own."""
    batch = make_batch(args)
    gather_counts(0)  # What the first message allocates is no row's own.
    before = status("VmRSS")
    program = build(name, micro_size, args)
    built = status("VmRSS")
    reset_peak()
    for _ in range(2):
        program.run(batch)
    peak = status("VmHWM")
    return Memory(peak - built, peak - before)


def what_is_kept(program: Program, batch: tuple[ms.Tensor, ...]) -> Kept:
    """Count the messages of a window and what this rank keeps. The program is of no use after that."""
    sent = count_messages(program, batch)
    weights = {id(weight): weight for weight in (*program.network.trainable_params(), *program.optimizer.parameters)}
    state = {id(item): item for item in program.optimizer.get_parameters() if id(item) not in weights}
    sums = {id(total): total for total in program.sums}
    return Kept(len(sent), sum(sent), *(sum(item.size for item in some.values()) for some in (state, sums, weights)))


def count_messages(program: Program, batch: tuple[ms.Tensor, ...]) -> list[int]:
    """Return the bytes of each message of a window, run op by op."""
    sent: list[int] = []
    for _, cell in program.cells.cells_and_names():
        for attribute in ("all_reduce", "reduce_scatter", "all_gather"):
            if isinstance(getattr(cell, attribute, None), ops.Primitive):
                setattr(cell, attribute, Counter(getattr(cell, attribute), sent))

    def gather_one(count: int) -> list[int]:
        sent.append(4)
        return gather_counts(count)

    shards.gather_counts = gather_one  # A graph of its own, which has no place for a counter.
    ms.set_context(mode=ms.PYNATIVE_MODE)
    os.environ["MS_JIT"] = "0"
    program.step(*batch)
    shards.gather_counts = gather_counts
    return sent


def measure_windows(micro_size: int, args: argparse.Namespace) -> dict[str, tuple[list[float], Kept]]:
    """Return the seconds of each window on this rank and what is kept: all rows take turns, after two to warm up."""
    batch = make_batch(args)
    programs = {name: build(name, micro_size, args) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2 + args.repeat):
        for name, program in programs.items():
            seconds[name].append(program.run(batch))
    return {name: (seconds[name][2:], what_is_kept(program, batch)) for name, program in programs.items()}


def run_child(args: argparse.Namespace) -> None:
    """Measure as one of the ranks and leave the report where the launcher looks."""
    gc.freeze()  # Each compilation collects garbage, which takes longest in the modules that never become any.
    init()
    ms.set_context(mode=ms.GRAPH_MODE)
    micro_size = args.micro_sizes[0]
    if args.child == WINDOWS:
        measured: Any = measure_windows(micro_size, args)
    else:
        measured = measure_memory(args.child, micro_size, args)
    report(get_rank(), measured)


def measure_ranks(child: str, processes: int, micro_size: int, args: argparse.Namespace) -> list[Any]:
    """Run one measurement under msrun and return what the ranks report."""
    arguments = ["--child", child, "--micro-sizes", str(micro_size)]
    arguments += [f"--{key}={getattr(args, key)}" for key in ("width", "layers", "batch", "repeat")]
    with tempfile.TemporaryDirectory() as folder:
        return launch(Path(__file__).resolve(), processes, Path(folder), arguments=arguments)


def measure_rows(processes: int, micro_size: int, args: argparse.Namespace) -> list[Row]:
    ranks = measure_ranks(WINDOWS, processes, micro_size, args)
    # The best run, each as long as its slowest rank.
    times = {name: min(max(runs) for runs in zip(*(rank[name][0] for rank in ranks))) for name in NAMES}
    rows = []
    for name in NAMES:
        kept = Kept(*most(rank[name][1] for rank in ranks))
        memory = None
        if micro_size in args.memory_micro_sizes:
            memory = Memory(*most(measure_ranks(name, processes, micro_size, args)))
        rows.append(Row(processes, micro_size, name, times[name], times[name] / times[OURS], kept, memory))
    return rows


def most(ranks: Iterable[Any]) -> Iterator[Any]:
    """Return the highest of each figure over the ranks."""
    return (max(figures) for figures in zip(*ranks))


def print_heading(args: argparse.Namespace) -> None:
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch} per rank, Adam; {versions()}")
    print(
        f"{'ranks':5}{'micro_size':>11}  {'window':44}{'calls':>5}{'sent':>11}{'time':>12}{'':5}"
        f"{'memory':>10}{'with build':>11}{'state':>10}{'sums':>10}{'weights':>10}"
    )


def print_row(row: Row) -> None:
    kept = row.kept
    memory = ("-", "-") if row.memory is None else tuple(f"{megabytes:.0f} MB" for megabytes in row.memory)
    print(
        f"{row.processes:5}{row.micro_size:11}  {row.name:44}{kept.messages:5}{kept.sent / 1e6:8.2f} MB"
        f"{row.seconds * 1e3:9.1f} ms{row.time_ratio:5.2f}{memory[0]:>10}{memory[1]:>11}"
        f"{kept.state:10}{kept.sums:10}{kept.weights:10}",
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
    parser.add_argument("--memory-micro-sizes", type=int, nargs="*", help="default: all; each row costs a launch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_micro_sizes is None:
        args.memory_micro_sizes = args.micro_sizes
    return args


def main() -> None:
    args = parse_args()
    if args.child:
        run_child(args)
        return
    print_heading(args)
    for processes in args.processes:
        for micro_size in args.micro_sizes:
            for row in measure_rows(processes, micro_size, args):
                print_row(row)


if __name__ == "__main__":
    main()
