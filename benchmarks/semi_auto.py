"""The time that MindSpore compiles a step in semi-auto-parallel. Prints one table.

python benchmarks/semi_auto.py                      # Dense layers: 200, 400 and 1,000 parameter tensors on 2 devices
python benchmarks/semi_auto.py --cases llama        # a network of Llama's shape on 8 devices

Each case is a job of its own. The targets are GPUs that need not be there.
"""

import argparse
import json
import os
import resource
from typing import Any

import mindspore as ms
import numpy as np
from llama import LazyLlamaLoss, Llama, tokens_of
from mindspore import Tensor, lazy_inline, nn
from mindspore.parallel.auto_parallel import AutoParallel
from simulate import simulate
from windows import versions

from ms_gradaccum import GradAccumulation, TrainOneStepCell

# The case that the processes build, as JSON.
_CASE = "MS_GRADACCUM_BENCHMARK_CASE"
_MICRO_SIZE, _WIDTH = 4, 16
# Graphs of 500 layers are deeper than MindSpore allows by itself.
_DEPTH = 20000
_STACK = 4 * 2**30
_TENSORS = (200, 400, 1000)


class Layers(nn.Cell):
    """Dense layers of two parameters each, compiled once for all micro batches."""

    @lazy_inline
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(*[nn.Dense(_WIDTH, _WIDTH) for _ in range(tensors // 2)])

    def construct(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build() -> Any:
    """Return the step of the case that the environment names, and a batch."""
    case = json.loads(os.environ[_CASE])
    ms.set_recursion_limit(_DEPTH)
    if "tensors" in case:
        network: nn.Cell = Layers(case["tensors"])
        cell = AutoParallel(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), _MICRO_SIZE))
        batch = (np.ones((64, _WIDTH), np.float32),) * 2
    else:
        shape = Llama(dp=case["dp"], mp=case["mp"], layers=12, heads=8)
        network = LazyLlamaLoss(shape)
        cell = AutoParallel(GradAccumulation(network, 2, weighted=True))
        cell.dataset_strategy(((shape.dp, 1), (shape.dp, 1)))
        batch = tokens_of(shape, 16, 0)
    if case["level"]:
        cell.hsdp(threshold=0, optimizer_level=case["level"])
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 1e-3)
    return TrainOneStepCell(cell, optimizer), tuple(map(Tensor, batch))


def cases_of(kind: str) -> dict[str, dict[str, Any]]:
    if kind == "dense":
        pairs = ((tensors, level) for tensors in _TENSORS for level in (None, "level1"))
        return {
            f"{tensors} tensors, {level or 'plain'}": {"tensors": tensors, "level": level} for tensors, level in pairs
        }
    # level2 grows beyond any memory, in MindSpore's own cell too.
    pairs = ((dp, level) for dp in (2, 4) for level in ("level1", "level3"))
    return {f"dp {dp} x mp {8 // dp}, {level}": {"dp": dp, "mp": 8 // dp, "level": level} for dp, level in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", choices=["dense", "llama"], default="dense")
    parser.add_argument("--only", default="", help="a part of the names of the cases to measure")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    print(versions())
    print(f"{'':44}{'time':>10}{'memory':>11}")
    for name, case in cases_of(args.cases).items():
        if args.only not in name:
            continue
        os.environ[_CASE] = json.dumps(case)
        ours = simulate(f"{__file__}:build", 2 if args.cases == "dense" else 8, timeout=7200.0)
        print(f"{name:44}{ours.compile_seconds:8.1f} s{ours.compile_bytes / 2**20:8.0f} MB", flush=True)


if __name__ == "__main__":
    main()
