"""Time, memory and compile time of one window, side by side. Prints one table; never fails.

python benchmarks/step.py            # 6 x (Dense(1024), GELU), batch 8192
python benchmarks/step.py --small    # 2 x (Dense(8), GELU), batch 64
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.parallel.nn import GradAccumulation as StockGradAccumulation
from windows import in_child, loop_by_hand, loop_of_bare_parts, make_batch, make_network, peak_of, run_window, versions

from ms_gradaccum import GradAccumulation, TrainOneStepCell

FULL, STOCK, LOOP, BARE = "full batch, stock", "stock GradAccumulation", "PYNATIVE loop by hand", "bare parts"
OURS, OURS_PYNATIVE, WHOLE = "ours, GRAPH", "ours, PYNATIVE", "ours, whole graph"
SPLIT = (OURS, OURS_PYNATIVE, WHOLE, LOOP, BARE, STOCK)


class Outer(nn.Cell):
    """Makes the whole window part of one graph, as data sink mode does."""

    def __init__(self, train_step: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.train_step = train_step

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        return self.train_step(x, y)[0]


def build(name: str, micro_size: int, sizes: argparse.Namespace) -> tuple[nn.Cell, Callable[..., float]]:
    """Return a network, and what runs one window of a batch to its end and returns its seconds."""
    mode = ms.PYNATIVE_MODE if name in (LOOP, OURS_PYNATIVE) else ms.GRAPH_MODE
    ms.set_context(mode=mode)
    network = make_network(sizes)
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

    def run(batch: tuple[ms.Tensor, ...]) -> float:
        ms.set_context(mode=mode)
        return run_window(step, network, batch)

    return network, run


def cost(name: str, micro_size: int, width: int, layers: int, rows: int) -> tuple[float, float, bool]:
    """Return the memory in MB, the compile time, and whether the window trains. A child process calls this once.

    The memory is the peak of the resident memory over two windows minus the resident memory before the first,
    when MindSpore is loaded and the network, the optimizer and the batch exist. It holds what compiling leaves,
    activations, gradients and the accumulation buffer. Pages of zeros (the optimizer's state) that a window is the
    first to touch count too, in all rows alike. The compile time is what the first call takes longer than the next.
    """
    sizes = argparse.Namespace(width=width, layers=layers, batch=rows)
    batch = make_batch(sizes)
    network, run = build(name, micro_size, sizes)
    before = [parameter.asnumpy().copy() for parameter in network.trainable_params()]
    (first, second), memory = peak_of(lambda: run(batch), 2)
    trains = any(np.any(a.asnumpy() != b) for a, b in zip(network.trainable_params(), before))
    return memory, first - second, bool(trains)


def measure_cost(name: str, micro_size: int, args: argparse.Namespace) -> tuple[float, float, bool]:
    """Return the memory of one child process, the compile time of another one, and whether the window trains."""
    # Compiling takes as long for a small batch, whose windows are too short to disturb the difference.
    _, compiling, _ = in_child(cost, name, micro_size, args.width, args.layers, min(args.batch, max(64, micro_size)))
    memory, _, trains = in_child(cost, name, micro_size, args.width, args.layers, args.batch)
    return memory, compiling, trains


def measure_times(micro_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of one window per row: the best of interleaved runs, after two to warm up."""
    batch = make_batch(args)
    programs = {name: build(name, micro_size, args)[1] for name in (FULL, *SPLIT)}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2 + args.repeat):
        for name, run in programs.items():
            seconds[name].append(run(batch))
    return {name: min(runs[2:]) for name, runs in seconds.items()}


def print_row(name: str, micro_size: int, times: dict[str, float], cost: Any, full: Any) -> None:
    memory, compiling, trains = cost
    print(
        f"{name:24}{micro_size:11}{times[name] * 1e3:9.2f} ms{times[name] / times[FULL]:7.2f}"
        f"{memory:7.0f} MB{memory / full[0]:7.2f}{compiling:8.2f} s{compiling / full[1]:7.2f}"
        f"{'' if trains or name == BARE else '  does not train: the weights stay as they were'}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny net, which shows the cost of a call")
    sizes = {"width": (1024, 8), "layers": (6, 2), "batch": (8192, 64), "repeat": (5, 30)}
    for key, (big, small) in sizes.items():
        parser.add_argument(f"--{key}", type=int, help=f"default: {big}, with --small {small}")
    parser.add_argument("--micro-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    for key, defaults in sizes.items():
        if getattr(args, key) is None:
            setattr(args, key, defaults[args.small])
    return args


def main() -> None:
    args = parse_args()
    full = measure_cost(FULL, 1, args)
    found: dict[int, Any] = {}
    for micro_size in args.micro_sizes:
        print(f"measuring micro_size {micro_size} ...", file=sys.stderr, flush=True)
        costs = {name: measure_cost(name, micro_size, args) for name in SPLIT}
        found[micro_size] = costs, measure_times(micro_size, args)
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch}, Momentum; {versions()}")
    print(f"{'window':24}{'micro_size':>11}{'time':>12}{'':7}{'memory':>10}{'':7}{'compile':>10}")
    print_row(FULL, 1, {FULL: min(times[FULL] for _, times in found.values())}, full, full)
    for micro_size, (costs, times) in found.items():
        for name in SPLIT:
            print_row(name, micro_size, times, costs[name], full)


if __name__ == "__main__":
    main()
