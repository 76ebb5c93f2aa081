"""What the compiler takes for a step with many parameter tensors on 2 processes, each graph. Prints one table.

python benchmarks/compile_ranks.py                       # 100, 300 and 1,000 tensors
python benchmarks/compile_ranks.py --tensors 300
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
from figures import print_target, status
from mindspore import nn, ops
from mindspore.communication import get_rank, init

from ms_gradaccum import HSDP, ClipByGlobalNorm, DataParallel, GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend.compiled import Compiled

# The tests start their processes with the same launcher.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))
from launch import launch, report

WIDTH, ROWS, MICRO_SIZE = 16, 16, 4
KINDS = {
    "DataParallel": DataParallel(),
    "HSDP level1": HSDP(threshold=0),
    "HSDP level2": HSDP(threshold=0, optimizer_level="level2"),
}
STOCK = "MindSpore's own step, clipped"
GRAPHS = ("MicroStep", "Report", "Update")


class ClippedStep(nn.TrainOneStepCell):
    """MindSpore's own step with a clip, as its tutorials write it: one graph for the whole batch."""

    def construct(self, *inputs: ms.Tensor) -> ms.Tensor:
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer(ops.clip_by_global_norm(grads, 1.0)))


def seconds_of_graphs(step: TrainOneStepCell, batch: tuple[ms.Tensor, ...]) -> dict[str, float]:
    """Run the first window and return the seconds of a core that each of its graphs took to compile."""
    seconds: dict[str, float] = {}
    compiled_for = Compiled._compiled_for

    def timed(self: Compiled, *args: Any) -> Any:
        start = time.process_time()
        compiled = compiled_for(self, *args)
        name = type(self.cell).__name__
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
        return compiled

    Compiled._compiled_for = timed
    step(*batch)
    return seconds


def measure(kind: str, tensors: int) -> dict[str, float]:
    """Return the seconds of a core, of the first window and of each graph, and the peak of the memory in MB."""
    layers = [nn.Dense(WIDTH, WIDTH) for _ in range(tensors // 2)]
    network = nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())
    optimizer = nn.Momentum(network.trainable_params(), 1e-3, 0.9)
    batch = (ops.ones((ROWS, WIDTH)), ops.ones((ROWS, WIDTH)))
    seconds: dict[str, float] = {}
    if kind == STOCK:
        stock = ClippedStep(network, optimizer).set_train()
        start = time.process_time()
        stock(*batch)
    else:
        accumulating = GradAccumulation(network, MICRO_SIZE)
        step = TrainOneStepCell(accumulating, optimizer, clip=ClipByGlobalNorm(1.0), parallel=KINDS[kind])
        start = time.process_time()
        seconds = seconds_of_graphs(step, batch)
    return {"all": time.process_time() - start, **seconds, "peak": status("VmHWM")}


def worker(kind: str, tensors: int) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_recursion_limit(10000)
    ms.set_seed(0)
    init()
    report(get_rank(), measure(kind, tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 300, 1000])
    args = parser.parse_args()
    print(f"Dense({WIDTH}), Momentum, a clip, {MICRO_SIZE} micro batches; seconds of a core, the slower rank of 2")
    print(f"{'tensors':>8}  {'':30}{'micro step':>11}{'report':>9}{'update':>9}{'all':>9}{'memory':>11}")
    for tensors in args.tensors:
        for kind in (STOCK, *KINDS):
            with tempfile.TemporaryDirectory() as folder:
                ranks = launch(Path(__file__).resolve(), 2, Path(folder), 1800.0, arguments=[kind, str(tensors)])
            most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            graphs = "".join(f"{most.get(name, float('nan')):9.1f}" for name in GRAPHS)
            print(f"{tensors:8}  {kind:30}  {graphs}{most['all']:9.1f}{most['peak']:8.0f} MB", flush=True)
            if tensors == 300 and kind == "HSDP level1":
                print_target("HSDP level1, 300 tensors, seconds of a core", most["all"], 10.0, "<=")


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2])) if "RANK_ID" in os.environ and len(sys.argv) == 3 else main()
