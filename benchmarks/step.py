"""Time, memory and compile time of one window, side by side. Prints one table and the targets; never fails.

python benchmarks/step.py            # 6 x (Dense(1024), GELU), batch 8192
python benchmarks/step.py --small    # 2 x (Dense(8), GELU), batch 64
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.parallel.nn import GradAccumulation as StockGradAccumulation

from ms_gradaccum import GradAccumulation, TrainOneStepCell

FULL = "full batch, stock"
LOOP = "PYNATIVE loop by hand"
WHOLE = "ours, whole graph"
OURS = "ours, GRAPH"
OURS_PYNATIVE = "ours, PYNATIVE"
STOCK = "stock GradAccumulation"
SPLIT = (OURS, OURS_PYNATIVE, WHOLE, LOOP, STOCK)


class Program(NamedTuple):
    """One way to run a window."""

    mode: int
    step: Callable[..., Any]
    network: nn.Cell

    def run(self, batch: tuple[ms.Tensor, ...]) -> float:
        """Run one window to its end and return the seconds that it took."""
        ms.set_context(mode=self.mode)
        start = time.perf_counter()
        self.step(*batch)
        for parameter in self.network.trainable_params():
            parameter.asnumpy()  # waits for the update
        return time.perf_counter() - start


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


def make_network(args: argparse.Namespace) -> nn.Cell:
    ms.set_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Dense(args.width, args.width), nn.GELU())]
    return nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())


def make_batch(args: argparse.Namespace) -> tuple[ms.Tensor, ...]:
    random = np.random.default_rng(0)
    shape = (args.batch, args.width)
    return tuple(ms.Tensor.from_numpy(random.standard_normal(shape, np.float32)) for _ in range(2))


def loop_by_hand(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Callable[..., Any]:
    """Return what a user writes without this package."""
    loss_and_grads = ms.value_and_grad(network, None, optimizer.parameters)

    def step(x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        rows = len(x) // micro_size
        loss = sums = None
        for begin in range(0, len(x), rows):
            part_loss, grads = loss_and_grads(x[begin : begin + rows], y[begin : begin + rows])
            loss = part_loss if loss is None else loss + part_loss
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        optimizer(tuple(total / micro_size for total in sums))
        return loss / micro_size

    return step


def build(name: str, micro_size: int, args: argparse.Namespace) -> Program:
    ms.set_context(mode=ms.PYNATIVE_MODE if name in (LOOP, OURS_PYNATIVE) else ms.GRAPH_MODE)
    network = make_network(args)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    if name == FULL:
        step = nn.TrainOneStepCell(network, optimizer)
    elif name == LOOP:
        step = loop_by_hand(network.set_train(), optimizer, micro_size)
    elif name == STOCK:
        step = nn.TrainOneStepCell(StockGradAccumulation(network, micro_size), optimizer).set_train()
    else:
        step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer)
    if name == WHOLE:
        step = Outer(step).set_train()
    return Program(ms.get_context("mode"), step, network)


def measure_cost(name: str, micro_size: int, args: argparse.Namespace) -> Cost:
    """Measure memory and compile time; a child process calls this once.

    The memory is the peak of the resident memory over three windows minus the resident memory before the first,
    when MindSpore is loaded and the network, the optimizer and the batch exist. It holds what compiling leaves,
    activations, gradients and the accumulation buffer; where pages of zeros (the optimizer's state) are
    first touched inside a window they count too, for all rows alike.
    """
    batch = make_batch(args)
    program = build(name, micro_size, args)
    before = [parameter.asnumpy().copy() for parameter in program.network.trainable_params()]
    resident = _status("VmRSS")
    _reset_peak()
    seconds = [program.run(batch) for _ in range(3)]
    peak = _status("VmHWM")
    after = [parameter.asnumpy() for parameter in program.network.trainable_params()]
    trains = any(np.any(a != b) for a, b in zip(after, before))
    return Cost(peak - resident, seconds[0] - min(seconds[1:]), trains)


def _status(key: str) -> float:
    """Return a figure of this process in MB: VmRSS is now, VmHWM the peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
    except OSError:  # Not Linux. The peak is that of the whole life, and stands for both.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # The peak then includes that of loading MindSpore, if it was higher.


def cost_in_child(name: str, micro_size: int, args: argparse.Namespace) -> Cost:
    settings = [f"--{key}={getattr(args, key)}" for key in ("width", "layers", "batch")]
    command = [sys.executable, __file__, *settings, "--child", name, "--micro-sizes", str(micro_size)]
    costs = []
    for _ in range(args.children):
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        costs.append(Cost(*json.loads(child.stdout.splitlines()[-1])))
    megabytes, compile_s, trains = zip(*costs)
    return Cost(statistics.median(megabytes), min(compile_s), all(trains))


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
    full_cost = cost_in_child(FULL, 1, args)
    full_times, rows = [], []
    for micro_size in args.micro_sizes:
        print(f"measuring micro_size {micro_size} ...", file=sys.stderr, flush=True)
        costs = {name: cost_in_child(name, micro_size, args) for name in SPLIT}
        times = measure_times(micro_size, args)
        full_times.append(times[FULL])
        rows += [Row(name, micro_size, times[name], costs[name], times[name] / times[FULL]) for name in SPLIT]
    return [Row(FULL, 1, min(full_times), full_cost, 1.0), *rows]


def print_table(rows: list[Row]) -> None:
    print(
        f"{'window':24}{'micro_size':>11}{'time':>12}{'ratio':>7}{'memory':>10}{'ratio':>7}{'compile':>10}{'ratio':>7}"
    )
    full = rows[0].cost
    for row in rows:
        memory, compiling = row.cost.megabytes / full.megabytes, row.cost.compile_s / full.compile_s
        print(
            f"{row.name:24}{row.micro_size:11}{row.seconds * 1e3:9.2f} ms{row.time_ratio:7.2f}"
            f"{row.cost.megabytes:7.0f} MB{memory:7.2f}{row.cost.compile_s:8.2f} s{compiling:7.2f}"
            f"{'' if row.cost.trains else '  does not train: the weights stay as they were'}"
        )


def print_targets(rows: list[Row], small: bool) -> None:
    found = {(row.name, row.micro_size): row for row in rows}
    ours, loop = found.get((OURS_PYNATIVE, 16)), found.get((LOOP, 16))
    if ours and loop:
        wanted = 20 if small else 3
        _print_target("PYNATIVE loop by hand / ours in PYNATIVE, time", loop.seconds / ours.seconds, wanted, ">=")
    ours, many, few = (found.get((OURS, micro_size)) for micro_size in (16, 64, 2))
    if many and few:
        compiling = many.cost.compile_s / few.cost.compile_s
        _print_target("ours, compile time of micro_size 64 / micro_size 2", compiling, 1.1, "<=")
    if ours and not small:
        _print_target("ours / full batch, time", ours.time_ratio, 0.75, "<=")
        memory = ours.cost.megabytes / rows[0].cost.megabytes
        _print_target("ours / full batch, memory", memory, 0.3, "<=")


def _print_target(what: str, reached: float, wanted: float, sign: str) -> None:
    met = reached >= wanted if sign == ">=" else reached <= wanted
    print(f"{what:52} target {sign} {wanted:5.2f}  reached {reached:6.2f}  {'yes' if met else 'NO'}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, help="features of each layer (1024)")
    parser.add_argument("--layers", type=int, help="number of Dense + GELU layers (6)")
    parser.add_argument("--batch", type=int, help="rows of a batch (8192)")
    parser.add_argument("--micro-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeat", type=int, help="timed windows per row, the best counts (5)")
    parser.add_argument("--children", type=int, default=1, help="processes per memory and compile figure (1)")
    parser.add_argument("--small", action="store_true", help="a tiny net, which shows the cost of a call")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    defaults = {"width": 8, "layers": 2, "batch": 64, "repeat": 30}
    if not args.small:
        defaults = {"width": 1024, "layers": 6, "batch": 8192, "repeat": 5}
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    return args


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(measure_cost(args.child, args.micro_sizes[0], args)))
        return
    rows = measure(args)
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch}, Momentum; MindSpore {ms.__version__}")
    print_table(rows)
    print_targets(rows, args.small)


if __name__ == "__main__":
    main()
