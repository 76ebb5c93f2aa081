"""Memory, step time and compiled graphs of a long training with batches of changing sizes.

for seed in 0 1 2; do python benchmarks/long_run.py --seed $seed --output docs/benchmarks/long_run.json; done
OMP_NUM_THREADS=1 msrun --worker_num=8 --local_worker_num=8 --join=True benchmarks/long_run.py --windows 500
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from windows import status, versions

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend.compiled import Compiled

FEATURES, SLICES = 64, 50


def build() -> TrainOneStepCell:
    """Return a step of two batches a window, each in four micro batches."""
    network = nn.SequentialCell(nn.Dense(FEATURES, 128), nn.ReLU(), nn.Dense(128, 1))
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
    return TrainOneStepCell(loss_cell, nn.Adam(network.trainable_params(), 1e-4), accumulation_steps=2)


def graphs(step: TrainOneStepCell) -> int:
    """Return the number of graphs that the step has compiled."""
    compiled = [step.body.end.reduction.compiled_report, step.body.end.updates]
    compiled += vars(step.body.window.micro_steps).values()
    found = [each for each in compiled if isinstance(each, Compiled)]
    found += [each for value in compiled if isinstance(value, dict) for each in value.values()]
    cells = [cell for each in found if isinstance(each, Compiled) for cell in (each.cell, each.general_cell)]
    return sum(len(cell.compile_cache) for cell in cells if cell is not None)


def run(windows: int, seed: int) -> list[tuple[int, float, float, int]]:
    """Train and return, now and then: windows, memory, median seconds of a window, graphs."""
    step, numbers = build(), np.random.default_rng(seed)
    facts, times = [], []
    for window in range(1, windows + 1):
        batches = []
        for _ in range(2):
            rows = int(numbers.integers(1, 33))
            batches.append(numbers.normal(size=(rows, FEATURES + 1)).astype(np.float32))
        begun = time.perf_counter()
        for batch in batches:
            output = step(Tensor(batch[:, 1:]), Tensor(batch[:, :1]))
        float(output.loss.asnumpy())
        times.append(time.perf_counter() - begun)
        if window % max(1, windows // SLICES) == 0:
            facts.append((window, status("VmRSS"), statistics.median(times), graphs(step)))
            times = []
    return facts


def write(facts: list[tuple[int, float, float, int]], output: Path, seed: int) -> None:
    """Write the facts of a seed beside those of the others."""
    known = json.loads(output.read_text()) if output.exists() else {"rows": []}
    rows = [row for row in known["rows"] if row["seed"] != seed]
    rows += [{"seed": seed, "windows": window, "mb": mb, "ms": 1000 * s} for window, mb, s, _ in facts]
    output.write_text(json.dumps({**known, "versions": versions(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory, step time and graphs of a long training.")
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the rows of the batches, and of their numbers")
    parser.add_argument("--output", type=Path, help="JSON to write the figures to, beside those of other seeds")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    rank, size = 0, 1
    if os.getenv("MS_ROLE"):
        init()
        rank, size = get_rank(), get_group_size()
    facts = run(args.windows, args.seed + rank)
    if rank:
        return
    title = f"{args.windows} windows, {size} process(es), {versions()}"
    print(f"{title}\n windows  memory (MB)  window (ms)  graphs")
    for fact in facts[:: max(1, len(facts) // 10)] + facts[-1:]:
        print(f"{fact[0]:8}  {fact[1]:11.1f}  {1000 * fact[2]:11.2f}  {fact[3]:6}")
    tenth = max(1, len(facts) // 10)
    early, late = facts[tenth : 2 * tenth] or facts, facts[-tenth:]
    times = [statistics.median(fact[2] for fact in part) for part in (early, late)]
    print(
        f"the last tenth beside the second: memory {late[-1][1] - early[0][1]:+.1f} MB, time x{times[1] / times[0]:.2f}"
    )
    if args.output:
        write(facts, args.output, args.seed)


if __name__ == "__main__":
    main()
