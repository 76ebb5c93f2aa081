"""Which kernels take how much of a compiled micro step of ours: forward, backward and adding into the sums.

python benchmarks/shares.py                # the peers' four networks, micro_size 16
python benchmarks/shares.py --networks conv --micro-size 64 --shapes
python benchmarks/shares.py --other-kernels    # the networks of other_kernels.py

Times are means of the fastest quarter of the micro steps, those of kernels by MindSpore's profiler, that of a whole
micro step from Python, without it. shares_torch.py shows the same of PyTorch.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before MindSpore starts its threads.
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import mindspore as ms
import numpy as np
from mindspore import nn
from other_kernels import use_other_kernels
from peers import DEFAULT, TRIALS
from peers_mindspore import FUSION_FLAGS, make_network
from windows import versions
from workload import MOMENTUM, WORKLOADS

from ms_gradaccum import GradAccumulation, TrainOneStepCell


class Kernel(NamedTuple):
    """One kernel of the graph: its operator, the shapes of its inputs, and how many ms each run of it took."""

    operator: str
    shapes: str
    times: np.ndarray


def make_micro_step(name: str, micro_size: int, other_kernels: bool) -> Callable[[], Any]:
    """Return what runs the first micro batch of the network's window again and again."""
    workload = WORKLOADS[name]
    network = make_network(workload)
    if other_kernels:
        use_other_kernels(network)
    optimizer = nn.Momentum(network.trainable_params(), workload.learning_rate, MOMENTUM)
    step = TrainOneStepCell(GradAccumulation(network, 1), optimizer)
    # The kernels alone.
    step.body.window.micro_steps.may_use_thread_pool = False
    batch = tuple(ms.Tensor(np.split(array, micro_size)[0]) for array in workload.batch(micro_size))

    def run() -> None:
        # No window, which would end with an update.
        step.body.window.micro_steps.run(batch, {})[0][2].asnumpy()

    return run


def run_for(seconds: float, run: Callable[[], Any]) -> np.ndarray:
    """Run again and again, and return how many ms each run took."""
    times, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < TRIALS:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return np.array(times)


def profiled(run: Callable[[], Any], seconds: float) -> list[Kernel]:
    """Run again and again, and return all kernels."""
    with tempfile.TemporaryDirectory() as folder:
        profile = ms.profiler.profile(
            activities=[ms.profiler.ProfilerActivity.CPU],
            start_profile=False,
            on_trace_ready=ms.profiler.tensorboard_trace_handler(folder, analyse_flag=False),
        )
        profile.start()
        runs = len(run_for(seconds, run))
        profile.stop()
        times, inputs = (next(Path(folder).rglob(f"cpu_{n}_0.txt")) for n in ("op_execute_timestamp", "framework"))
        return read_kernels(times.read_text().splitlines(), inputs.read_text().splitlines(), runs)


def read_kernels(times: Sequence[str], inputs: Sequence[str], runs: int) -> list[Kernel]:
    """Read the profiler's "scope/name;side;begin,ms,thread begin,ms,thread" and "operator;name;graph;shapes"."""
    shapes = defaultdict(set)
    for line in inputs:
        _, name, _, *found = line.rstrip(";").split(";")
        shapes[name].add(" ".join(text.split(":")[1].replace(" ", "") for text in found if text.endswith("]")))
    kernels = []
    for line in times:
        name, _, executions = line.split(";")
        name = name.rpartition("/")[2]
        took = np.array([float(execution.split(",")[1]) for execution in executions.split()])
        if len(took) != runs:
            raise RuntimeError(f"{name} ran {len(took)} times in {runs} micro steps")
        # Without their scopes names of small kernels may be those of others too.
        kernels.append(Kernel(name.rpartition("-")[0], " | ".join(sorted(shapes[name])), took))
    return kernels


def fastest(times: np.ndarray) -> np.ndarray:
    """Return which of these runs are the fastest quarter."""
    return np.argsort(times)[: max(1, len(times) // 4)]


def print_table(kernels: Sequence[Kernel], whole: np.ndarray, shapes: bool, least: float) -> None:
    runs = fastest(np.sum([kernel.times for kernel in kernels], 0))
    rows: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        rows[f"{kernel.operator} {kernel.shapes}" if shapes else kernel.operator].append(kernel.times[runs].mean())
    total = sum(sum(row) for row in rows.values())
    large = {label: row for label, row in rows.items() if sum(row) >= least * total}
    others = [took for label, row in rows.items() if label not in large for took in row]
    print(f"{'operator':24}{'calls':>7}{'ms':>10}{'share':>8}")
    for label, row in [*sorted(large.items(), key=lambda item: -sum(item[1])), ("all others", others)]:
        print(f"{label:24}{len(row):7d}{sum(row):10.3f}{sum(row) / total:8.1%}")
    print(f"{'all kernels':24}{len(kernels):7d}{total:10.3f}{1:8.0%}")
    print(f"{'the whole micro step':31}{whole[fastest(whole)].mean():10.3f}    ({len(kernels[0].times)} runs profiled)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=WORKLOADS, default=DEFAULT[0])
    parser.add_argument("--micro-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--least", type=float, default=0.01, help="share below which an operator has no row")
    parser.add_argument("--shapes", action="store_true", help="a row for each shape of the inputs")
    parser.add_argument("--other-kernels", action="store_true", help="the networks of other_kernels.py")
    parser.add_argument("--fused", action="store_true", help="with MindSpore's fusion of kernels")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE, enable_graph_kernel=args.fused, graph_kernel_flags=FUSION_FLAGS)
    print(f"{versions()}; {os.environ['OMP_NUM_THREADS']} OMP threads")
    for name in args.networks:
        run = make_micro_step(name, args.micro_size, args.other_kernels)
        run_for(0, run)
        whole, kernels = run_for(args.seconds / 2, run), profiled(run, args.seconds)
        print(f"\n{name}: {WORKLOADS[name]}, micro_size {args.micro_size}")
        print_table(kernels, whole, args.shapes, args.least)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        # Fused kernels are built there, and logs are written.
        os.chdir(scratch)
        main()
