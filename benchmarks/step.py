"""Time, memory and compile time of one window, side by side. Prints one table; never fails.

python benchmarks/step.py            # 6 x (Dense(1024), GELU), batch 8192
python benchmarks/step.py --small    # 2 x (Dense(8), GELU), batch 64
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.parallel.nn import GradAccumulation as StockGradAccumulation
from windows import (
    loop_by_hand,
    loop_of_bare_parts,
    make_batch,
    make_network,
    reset_peak,
    run_child,
    run_window,
    status,
    versions,
)

from ms_gradaccum import GradAccumulation, TrainOneStepCell

FULL = "full batch, stock"
LOOP = "PYNATIVE loop by hand"
WHOLE = "ours, whole graph"
OURS = "ours, GRAPH"
OURS_PYNATIVE = "ours, PYNATIVE"
STOCK = "stock GradAccumulation"
BARE = "bare parts"
SPLIT = (OURS, OURS_PYNATIVE, WHOLE, LOOP, BARE, STOCK)


class Program(NamedTuple):
    """One way to run a window."""

    mode: int
    step: Callable[..., Any]
    network: nn.Cell

    def run(self, batch: tuple[ms.Tensor, ...]) -> float:
        """Run one window to its end and return the seconds that it took."""
        ms.set_context(mode=self.mode)
        return run_window(self.step, self.network, batch)


class Cost(NamedTuple):
    """What a window costs in a process of its own."""

    megabytes: float
    compile_s: float
    trains: bool


class Row(NamedTuple):
    name: str
    micro_size: int
    seconds: float
    cost: Cost
    time_ratio: float


class Outer(nn.Cell):
    """Makes the whole window part of one graph, as data sink mode does."""

    def __init__(self, train_step: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.train_step = train_step

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        return self.train_step(x, y)[0]


def build(name: str, micro_size: int, args: argparse.Namespace) -> Program:
    ms.set_context(mode=ms.PYNATIVE_MODE if name in (LOOP, OURS_PYNATIVE) else ms.GRAPH_MODE)
    network = make_network(args)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    if name == FULL:
        step = nn.TrainOneStepCell(network, optimizer)
    elif name == LOOP:
        loss_and_grads = ms.value_and_grad(network.set_train(), None, optimizer.parameters)
        step = loop_by_hand(loss_and_grads, optimizer, micro_size)
    elif name == BARE:
        step = loop_of_bare_parts(network.set_train(), optimizer, micro_size)
    elif name == STOCK:
        # What MindSpore's own Model builds. Its step applies accumulators that only semi-auto-parallel fills.
        step = ms.amp.build_train_network(StockGradAccumulation(network, micro_size), optimizer)
    else:
        step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, compile=True)
    if name == WHOLE:
        step = Outer(step).set_train()
    return Program(ms.get_context("mode"), step, network)


def measure_child(name: str, micro_size: int, args: argparse.Namespace) -> Cost:
    """Measure memory and compile time; a child process calls this once.

    The memory is the peak of the resident memory over two windows minus the resident memory before the first,
    when MindSpore is loaded and the network, the optimizer and the batch exist. It holds what compiling leaves,
    activations, gradients and the accumulation buffer. Pages of zeros (the optimizer's state) that a window is the
    first to touch count too, in all rows alike. The compile time is what the first call takes longer than the next.
    """
    batch = make_batch(args)
    program = build(name, micro_size, args)
    before = [parameter.asnumpy().copy() for parameter in program.network.trainable_params()]
    resident = status("VmRSS")
    reset_peak()
    first, second = program.run(batch), program.run(batch)
    peak = status("VmHWM")
    after = [parameter.asnumpy() for parameter in program.network.trainable_params()]
    trains = any(np.any(a != b) for a, b in zip(after, before))
    return Cost(peak - resident, first - second, trains)


def cost_of(name: str, micro_size: int, args: argparse.Namespace, batch: int) -> Cost:
    settings = [f"--width={args.width}", f"--layers={args.layers}", f"--batch={batch}"]
    return Cost(*json.loads(run_child(__file__, *settings, "--child", name, "--micro-sizes", str(micro_size))))


def measure_cost(name: str, micro_size: int, args: argparse.Namespace) -> Cost:
    """Return the memory of one child process and the compile time of another one."""
    # Compiling takes as long for a small batch, whose windows are too short to disturb the difference.
    small = cost_of(name, micro_size, args, min(args.batch, max(64, micro_size)))
    return cost_of(name, micro_size, args, args.batch)._replace(compile_s=small.compile_s)


def measure_times(micro_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of one window per row: the best of interleaved runs, after two to warm up."""
    batch = make_batch(args)
    programs = {name: build(name, micro_size, args) for name in (FULL, *SPLIT)}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2 + args.repeat):
        for name, program in programs.items():
            seconds[name].append(program.run(batch))
    return {name: min(runs[2:]) for name, runs in seconds.items()}


def measure(args: argparse.Namespace) -> list[Row]:
    full_cost = measure_cost(FULL, 1, args)
    full_times, rows = [], []
    for micro_size in args.micro_sizes:
        print(f"measuring micro_size {micro_size} ...", file=sys.stderr, flush=True)
        costs = {name: measure_cost(name, micro_size, args) for name in SPLIT}
        times = measure_times(micro_size, args)
        full_times.append(times[FULL])
        rows += [Row(name, micro_size, times[name], costs[name], times[name] / times[FULL]) for name in SPLIT]
    return [Row(FULL, 1, min(full_times), full_cost, 1.0), *rows]


def print_table(rows: list[Row]) -> None:
    print(f"{'window':24}{'micro_size':>11}{'time':>12}{'':7}{'memory':>10}{'':7}{'compile':>10}")
    full = rows[0].cost
    for row in rows:
        memory, compiling = row.cost.megabytes / full.megabytes, row.cost.compile_s / full.compile_s
        print(
            f"{row.name:24}{row.micro_size:11}{row.seconds * 1e3:9.2f} ms{row.time_ratio:7.2f}"
            f"{row.cost.megabytes:7.0f} MB{memory:7.2f}{row.cost.compile_s:8.2f} s{compiling:7.2f}"
            f"{'' if row.cost.trains or row.name == BARE else '  does not train: the weights stay as they were'}"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny net, which shows the cost of a call")
    sizes = {"width": (1024, 8), "layers": (6, 2), "batch": (8192, 64), "repeat": (5, 30)}
    for key, (big, small) in sizes.items():
        parser.add_argument(f"--{key}", type=int, help=f"default: {big}, with --small {small}")
    parser.add_argument("--micro-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for key, defaults in sizes.items():
        if getattr(args, key) is None:
            setattr(args, key, defaults[args.small])
    return args


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(measure_child(args.child, args.micro_sizes[0], args)))
        return
    rows = measure(args)
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch}, Momentum; {versions()}")
    print_table(rows)


if __name__ == "__main__":
    main()
