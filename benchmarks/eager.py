"""Time and memory of windows that run op by op, beside the loop that a user writes by hand. Prints one table.

export ONEDNN_MAX_CPU_ISA=AVX2 MALLOC_MMAP_THRESHOLD_=131072
taskset -c 0 python benchmarks/eager.py                  # seven networks, two optimizers, with a clip and without
taskset -c 0 python benchmarks/eager.py --networks tiny  # the cost of a call
taskset -c 0 python benchmarks/eager.py --networks conv transformer --micro-size 16

Times are core-seconds. The variables choose convolutions that are not reference code, and a heap that returns memory.

Both do the same job in PYNATIVE mode: `value_and_grad` of each micro batch, sums in float32 in place, one division, a
clip by the global norm or none, the optimizer, zeros. The loop by hand neither looks for Inf and NaN nor reports.
"""

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.experimental import optim
from peers_mindspore import make_network as make_peer
from windows import in_child, make_batch, make_network, micro_batches, peak_of, run_window, versions
from workload import WORKLOADS, Workload

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TrainOneStepCell

OURS, LOOP = "ours", "loop"
MAX_NORM, WINDOWS = 1.0, 6
WORKLOADS = WORKLOADS | {
    "wide_transformer": Workload("transformer", 32, 512, 4, "GELU"),
    "wide_conv": Workload("conv", 64, 64, 4),
}


class Case(NamedTuple):
    """A network, its batch and its optimizer."""

    width: int
    layers: int
    batch: int
    micro_size: int
    # An optimizer of mindspore.nn, which MindSpore compiles in PYNATIVE mode too, or one that runs op by op.
    optimizer: str = "Momentum"
    clips: bool = False
    # The name of a network of peers.py in place of an MLP.
    workload: str = ""

    def __str__(self) -> str:
        return f"{self.optimizer}{', clip' if self.clips else ''}"


NETWORKS = {
    "tiny": Case(width=8, layers=2, batch=16, micro_size=4),
    "middle": Case(width=256, layers=6, batch=1024, micro_size=8),
    "large": Case(width=1024, layers=6, batch=1024, micro_size=8),
    "transformer": Case(width=128, layers=2, batch=64, micro_size=4, workload="transformer"),
    "conv": Case(width=16, layers=3, batch=256, micro_size=4, workload="conv"),
    "wide_transformer": Case(width=512, layers=4, batch=32, micro_size=4, workload="wide_transformer"),
    "wide_conv": Case(width=64, layers=4, batch=64, micro_size=4, workload="wide_conv"),
}


def build(row: str, case: Case) -> tuple[nn.Cell, Callable[..., Any]]:
    """Return a network and what runs one window of it."""
    network = make_peer(WORKLOADS[case.workload]) if case.workload else make_network(case).set_train()
    parameters = network.trainable_params()
    optimizer = nn.Momentum(parameters, 0.01, 0.9) if case.optimizer == "Momentum" else optim.Adam(parameters, 1e-3)
    if row == LOOP:
        return network, loop_by_hand(network, optimizer, case)
    clip = ClipByGlobalNorm(MAX_NORM) if case.clips else None
    return network, TrainOneStepCell(GradAccumulation(network, case.micro_size), optimizer, clip=clip)


def batch_of(case: Case) -> tuple[ms.Tensor, ...]:
    return tuple(map(ms.Tensor, WORKLOADS[case.workload].batch())) if case.workload else make_batch(case)


def loop_by_hand(network: nn.Cell, optimizer: nn.Cell, case: Case) -> Callable[..., Any]:
    loss_and_grads = ms.value_and_grad(network, None, optimizer.parameters)
    sums = optimizer.parameters.clone("sums", "zeros")

    def step(x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss = 0.0
        for part in micro_batches(x, y, case.micro_size):
            part_loss, grads = loss_and_grads(*part)
            loss = loss + part_loss
            for total, grad in zip(sums, grads):
                ops.assign_add(total, grad)
            del grads  # Or they would be there beside the next ones.
        means = tuple(total / case.micro_size for total in sums)
        optimizer(ops.clip_by_global_norm(means, MAX_NORM) if case.clips else means)
        for total in sums:
            ops.assign(total, ops.zeros_like(total))
        return loss / case.micro_size

    return step


def by_ops(case: list[Any]) -> Case:
    """Set PYNATIVE mode and return the case."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    logging.getLogger("ms_gradaccum").setLevel(logging.ERROR)  # It says that compiled windows are faster.
    return Case(*case)


def measure_times(given: list[Any], repeat: int) -> dict[str, list[float]]:
    """Return the core-seconds of windows that take turns, after two to warm up."""
    case = by_ops(given)
    batch = batch_of(case)
    programs = {row: build(row, case) for row in (LOOP, OURS)}
    seconds: dict[str, list[float]] = {row: [] for row in programs}
    for _ in range(2 + repeat):
        for row, (network, step) in programs.items():
            before = time.process_time()
            run_window(step, network, batch)
            seconds[row].append(time.process_time() - before)
    first, second = ([item.asnumpy() for item in network.trainable_params()] for network, _ in programs.values())
    if not all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(first, second)):
        raise RuntimeError("the two have not trained the same")
    return {row: runs[2:] for row, runs in seconds.items()}


def measure_memory(given: list[Any], row: str) -> float:
    """Return the memory that some windows take beside what was there, in MB."""
    case = by_ops(given)
    batch = batch_of(case)
    network, step = build(row, case)
    return peak_of(lambda: run_window(step, network, batch), WINDOWS)[1]


def measure(name: str, case: Case, args: argparse.Namespace) -> None:
    """Print one line."""
    repeat = args.repeat or (200 if name == "tiny" else 20)
    times: dict[str, list[float]] = {OURS: [], LOOP: []}
    children = range(args.children)
    for _ in children:
        for row, seconds in in_child(measure_times, case, repeat).items():
            times[row] += seconds
    memory = {row: np.median([in_child(measure_memory, case, row) for _ in children]) for row in (OURS, LOOP)}
    best = {row: 1e3 * min(seconds) for row, seconds in times.items()}
    # Other programs disturb a window; the fastest twentieth is disturbed the least.
    low = {row: float(np.percentile(seconds, 5)) for row, seconds in times.items()}
    print(
        f"{name:17}{case!s:16}{best[OURS]:9.2f}{best[LOOP]:9.2f} ms{best[OURS] / best[LOOP]:7.2f}"
        f"{low[OURS] / low[LOOP]:7.2f}{memory[OURS]:9.0f}{memory[LOOP]:6.0f} MB{memory[OURS] / memory[LOOP]:7.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--micro-size", type=int, help="instead of the network's own")
    parser.add_argument("--repeat", type=int, help="windows of each, in turns; default: 20, of the tiny one 200")
    parser.add_argument("--children", type=int, default=3, help="processes per figure")
    args = parser.parse_args()
    for name in args.networks:
        case = NETWORKS[name]
        mlp = f"{case.layers} x (Dense({case.width}), GELU), {case.batch} rows"
        network = str(WORKLOADS[case.workload]) if case.workload else mlp
        print(f"{name}: {network}, micro_size {args.micro_size or case.micro_size}")
    print(versions())
    print(f"{'':33}{'ours':>9}{'loop':>9}{'time':>10}{'5 %':>7}{'ours':>9}{'loop':>6}{'memory':>10}")
    for name in args.networks:
        for settings in ({}, {"clips": True}, {"optimizer": "Adam"}):
            sizes = {"micro_size": args.micro_size} if args.micro_size else {}
            measure(name, NETWORKS[name]._replace(**settings, **sizes), args)


if __name__ == "__main__":
    main()
