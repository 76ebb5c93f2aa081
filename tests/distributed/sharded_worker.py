"""A process of `test_sharded_operators.py`: compile, run, compare with one process."""

import time
from typing import Any

import numpy as np
from launch import report
from mindspore import Tensor
from quick_mindspore import eagerly
from semi_auto_worker import attempt, largest_difference, purposes_of
from sharded_cells import ROWS, UPDATES, Llama, Sharded, batch_of, our_step, whole_batch_of
from simulation.cpu_program import CpuProgram, own_part, whole_values
from simulation.partition import connect, gpu_target, partition

VARIANTS = {
    "2x2-level1-four-clip-scale": Sharded(2, 2, micro_size=4, level="level1", max_norm=0.3, loss_scale=1024.0),
    "1x4-one-tokens-clip-adam": Sharded(1, 4, micro_size=1, weighted=True, max_norm=0.3, adam=True),
    "2x2-level2-clip": Sharded(2, 2, level="level2", lazy=True, max_norm=0.3),
    "4x1-level3-tokens-adam": Sharded(4, 1, level="level3", lazy=True, weighted=True, adam=True),
    # Compiling it takes as long as all above: one has all that its layers can do.
    "llama-2x2-sequence-recompute-level3": Sharded(
        2, 2, level="level3", lazy=True, max_norm=0.3, llama=Llama(layers=1, sequence_parallel=True, recompute=True)
    ),
}


def run(variant: Sharded, rank: int) -> dict[str, Any]:
    """Train with the partitioned program, and with the whole batch in this process alone."""
    batches = [batch_of(variant, number) for number in range(UPDATES)]
    rows = ROWS // variant.dp
    with gpu_target():
        step = our_step(variant)
        start = whole_values(step)
        model = partition(step, *(Tensor(array[:rows]) for array in batches[0]))
    layouts = step.parameter_layout_dict

    def part(array: Any, place: int) -> Tensor:
        return Tensor(own_part(array, layouts[f"inputs{place}"], rank))

    program = CpuProgram(model, start, layouts, rank)
    outputs = [[float(item.asnumpy()) for item in program(*map(part, batch, (0, 1)))] for batch in batches]
    ours = program.values()
    whole = whole_batch_of(variant)
    with eagerly():
        said = [[float(item.asnumpy()) for item in whole(*map(Tensor, batch))] for batch in batches]
    weights = {weight.name: weight.asnumpy() for weight in whole.loss.trainable_params()}
    return {
        "items": outputs,
        "whole": said,
        "difference": largest_difference(ours, weights, step, rank),
        "moved": largest_difference(ours, {name: start[name] for name in weights}, step, rank),
        "sums": max(float(np.abs(value).max()) for name, value in ours.items() if name.startswith("accu_grads.")),
        "parts": sum(ours[name].shape != weights[name].shape for name in weights),
        "purposes": purposes_of(model),
    }


def main() -> None:
    rank, _ = connect()
    result = {}
    for name, variant in VARIANTS.items():
        begin = time.monotonic()
        result[name] = attempt(run, variant, rank)
        result[name]["seconds"] = time.monotonic() - begin
    report(rank, result)
