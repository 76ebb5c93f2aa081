"""A process of the semi-auto-parallel tests: compile, count, run, report."""

import traceback
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Tensor
from quick_mindspore import eagerly
from semi_auto_cells import BATCHES, ROWS, Variant, WholeBatch, loss_of, network_of, optimizer_of, our_step, stock_step
from semi_auto_contracts import count_operators, refusals, ways
from simulation.cpu_program import CpuProgram, own_part, own_parts, whole_values
from simulation.partition import collectives_of, connect, gpu_target, partition

# Where numbers are compared; each names what it adds to the plain path.
NUMBERS = {
    2: {
        "plain-1-no_init": Variant(1, no_init=True),
        "plain-2-tokens-clip-scale": Variant(2, weighted=True, max_norm=0.3, loss_scale=1024.0),
        "level1-1-tokens-limit": Variant(1, "level1", weighted=True, limit=0.05),
        "level1-4-adam-tokens-clip-scale": Variant(
            4, "level1", optimizer="adam", weighted=True, max_norm=0.3, loss_scale=1024.0
        ),
        "level1-2-overflow": Variant(2, "level1", loss_scale=3e38),
        "level1-2-half-full": Variant(2, "level1", loss_scale=64.0, half=True, max_norm=0.3, strategy="full_batch"),
    },
    4: {
        "level1-2-adam-tokens-clip": Variant(
            2, "level1", optimizer="adam", weighted=True, max_norm=0.3, strategy=((4, 1), (4, 1))
        ),
        "2x2-level1-four-clip-scale": Variant(4, "level1", max_norm=0.3, loss_scale=1024.0, dp=2, mp=2),
        "1x4-one-tokens-clip-adam": Variant(1, optimizer="adam", weighted=True, max_norm=0.3, dp=1, mp=4),
        "2x2-level2-clip-recompute": Variant(2, "level2", lazy=True, recompute=True, max_norm=0.3, dp=2, mp=2),
        "4x1-level3-tokens-adam": Variant(2, "level3", "adam", weighted=True, lazy=True, dp=4),
    },
}
# Where communication is compared with that of the stock cells.
COUNTS = {
    2: {
        f"{level or 'plain'}-{size}": Variant(size, level, lazy=level in ("level2", "level3"))
        for level, sizes in ((None, (1, 4)), ("level1", (2,)), ("level2", (2,)), ("level3", (2,)))
        for size in sizes
    },
    4: {
        # By the first rank, with which a group begins: the others would wait for it.
        "level1-2-groups": Variant(2, "level1", shard_size=2),
    },
}


def local_batch(variant: Variant, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return what ``rank`` loads of a batch. Of sharded operators the compiler uses only its shape."""
    x, y = BATCHES[number]
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    if variant.dp:
        rows = slice(ROWS // variant.dp)
    elif variant.strategy == "full_batch":
        rows = slice(None)
    return Tensor(x[rows]), Tensor(y[rows])


def own_batch(variant: Variant, number: int, layouts: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return what ``rank`` trains on of a batch."""
    if not variant.dp:
        return local_batch(variant, number, rank, size)
    x, y = BATCHES[number]
    return Tensor(own_part(x, layouts["inputs0"], rank)), Tensor(own_part(y, layouts["inputs1"], rank))


def run_whole(variant: Variant) -> tuple[list[Any], dict[str, Any]]:
    """Train on the whole batches in one process; return loss and norms of each update and the parameters."""
    network = network_of(replace(variant, lazy=False))
    network.init_parameters_data()
    optimizer, loss = optimizer_of(variant, network), loss_of(variant, network)
    step = WholeBatch(loss, optimizer, variant.weighted, variant.max_norm, variant.limit)
    step.set_train()
    with eagerly():
        printed = [[float(item.asnumpy()) for item in step(Tensor(x), Tensor(y))] for x, y in BATCHES]
    return printed, {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}


def compile_step(step: Any, variant: Variant, rank: int, size: int) -> tuple[Any, dict[str, Any]]:
    """Return this rank's program, and the values of the parameters at the start."""
    # The compiler cuts them; without values, there is nothing to cut.
    start = {} if variant.no_init else whole_values(step)
    with gpu_target():
        model = partition(step, *local_batch(variant, 0, rank, size))
    return model, start or whole_values(step)


def run_partitioned(model: Any, start: Any, step: Any, variant: Variant, rank: int, size: int) -> Any:
    """Run a partitioned step; return what it printed and this rank's part of each parameter."""
    layouts = step.parameter_layout_dict
    program = CpuProgram(model, start, layouts, rank)
    outputs = [program(*own_batch(variant, number, layouts, rank, size)) for number in range(len(BATCHES))]
    return outputs, program.values()


def largest_difference(ours: dict[str, Any], whole: dict[str, Any], step: Any, rank: int) -> float:
    """Return by how much this rank's part of the weights differs from the whole ones at most."""
    own = own_parts(whole, step.parameter_layout_dict, rank)
    return max(float(np.abs(ours[name] - value).max()) for name, value in own.items())


def numbers_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    """Compare our step with one process on the whole batch."""
    printed, whole = run_whole(variant)
    with gpu_target():
        step = our_step(variant)
    model, start = compile_step(step, variant, rank, size)
    outputs, ours = run_partitioned(model, start, step, variant, rank, size)
    weights = {name: start[name] for name in whole}
    return {
        "whole": printed,
        "items": [[float(item.asnumpy()) for item in output] for output in outputs],
        "difference": largest_difference(ours, whole, step, rank),
        "moved": largest_difference(ours, weights, step, rank),
        "scale": float(ours.get("mixed_precision.loss_scale", 1.0)),
        "sums": max(float(np.abs(value).max()) for name, value in ours.items() if name.startswith("accu_grads.")),
        "parts": sum(ours[name].shape != value.shape for name, value in whole.items()),
        "purposes": purposes_of(model),
    }


def counts_of_program(model: Any) -> dict[str, int]:
    """Count the operators of a program, and its messages by their purpose too."""
    return count_operators(model) | purposes_of(model)


def purposes_of(model: Any) -> dict[str, int]:
    """Count the messages of a program by operator and purpose."""
    return Counter(f"{message.operator} of {message.purpose}" for message in collectives_of(model))


def counts_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    """Compare the communication of our step with that of the stock one."""
    batch = local_batch(variant, 0, rank, size)
    with gpu_target():
        ours = counts_of_program(partition(our_step(variant), *batch))
        with stock_step(variant) as step:
            return {"ours": ours, "stock": counts_of_program(partition(step, *batch))}


def attempt(function: Any, *args: Any) -> Any:
    """Return the result, or the error: one variant shall not hide the others."""
    try:
        return function(*args)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


def main() -> dict[str, Any]:
    rank, size = connect()
    result: dict[str, Any] = {"counts": {}}
    result["numbers"] = {name: attempt(numbers_of, variant, rank, size) for name, variant in NUMBERS[size].items()}
    # Compiling needs no other rank, and all have the same operators: each takes its share.
    for name in list(COUNTS[size])[rank::size]:
        result["counts"][name] = attempt(counts_of, COUNTS[size][name], rank, size)
    if size == 2:
        result["refusals"] = attempt(refusals, local_batch(Variant(1), 0, rank, size), rank, size)
        if rank == 1:  # The first one has more to count.
            result["ways"] = attempt(ways, local_batch(Variant(1), 0, rank, size))
    return result
