"""What each process of the semi-auto-parallel tests does: compile, count, run, report."""

import sys
import tempfile
import traceback
from typing import Any

import numpy as np
from gpu_compile import connect, count_operators, gpu_target, partition, report
from mindspore import Tensor, nn
from run_partitioned import PartitionedProgram, part_of, values_of
from semi_auto_cells import BATCHES, ROWS, StockStep, Variant, WholeBatch, network_of, optimizer_of, our_step

# Where numbers are compared; each names what it adds to the plain path.
NUMBERS = {
    2: {
        "plain-1": Variant(1),
        "plain-2-adam-tokens-clip": Variant(2, optimizer="adam", weighted=True, max_norm=0.3),
        "plain-8-scale": Variant(8, loss_scale=1024.0),
        "level1-1-tokens": Variant(1, "level1", weighted=True),
        "level1-2-limit-full": Variant(2, "level1", limit=0.05, strategy="full_batch"),
        "level1-8-adam-tokens-clip-scale": Variant(
            8, "level1", optimizer="adam", weighted=True, max_norm=0.3, loss_scale=1024.0
        ),
        "plain-2-no_init": Variant(2, no_init=True),
        "level1-2-overflow": Variant(2, "level1", loss_scale=3e38),
    },
    4: {
        "plain-2-tokens": Variant(2, weighted=True, max_norm=0.3),
        "level1-2-clip": Variant(2, "level1", max_norm=0.3),
        "level1-2-limit": Variant(2, "level1", optimizer="adam", limit=0.05),
    },
}
# Where communication is compared with that of the stock cells.
COUNTS = {
    2: {
        f"{level or 'plain'}-{size}": Variant(size, level, lazy=level in ("level2", "level3"))
        for level in (None, "level1", "level2", "level3")
        for size in (1, 2, 8)
    },
    4: {
        f"{level or 'plain'}-2": Variant(2, level, lazy=level in ("level2", "level3"))
        for level in (None, "level1", "level2", "level3")
    },
}


def local_batch(variant: Variant, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return what ``rank`` loads of a batch."""
    x, y = BATCHES[number]
    rows = slice(None) if variant.strategy == "full_batch" else slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return Tensor(x[rows]), Tensor(y[rows])


def run_whole(variant: Variant) -> tuple[list[float], dict[str, Any]]:
    """Train on the whole batches in one process; return the losses and the parameters."""
    network = network_of(variant)
    network.init_parameters_data()
    step = WholeBatch(network, optimizer_of(variant, network), variant)
    step.set_train()
    losses = [float(step(Tensor(x), Tensor(y)).asnumpy()) for x, y in BATCHES]
    return losses, {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}


def run_partitioned(step: nn.Cell, model: Any, variant: Variant, rank: int, size: int, start: dict[str, Any]) -> Any:
    """Run a partitioned step; return what it printed and this rank's part of each weight."""
    with tempfile.TemporaryDirectory() as folder:
        program = PartitionedProgram(model, start, rank, f"{folder}/step.mindir")
        outputs = [program(*local_batch(variant, number, rank, size)) for number in range(len(BATCHES))]
    return outputs, program.values()


def largest_difference(ours: dict[str, Any], whole: dict[str, Any], rank: int) -> float:
    """Return by how much this rank's part of the weights differs from the whole ones at most."""
    pairs = [(ours[name], part_of(value, ours[name].shape, rank)) for name, value in whole.items()]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def numbers_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    """Compare our step with one process on the whole batch."""
    losses, whole = run_whole(variant)
    with gpu_target():
        step = our_step(variant)
        model = partition(step, *local_batch(variant, 0, rank, size))
    start = values_of(step)
    outputs, ours = run_partitioned(step, model, variant, rank, size, start)
    weights = {name: start[name] for name in whole}
    return {
        "whole": losses,
        "items": [[float(item.asnumpy()) for item in output] for output in outputs],
        "difference": largest_difference(ours, whole, rank),
        "moved": largest_difference(ours, weights, rank),
        "sums": max(float(np.abs(value).max()) for name, value in ours.items() if name.startswith("accu_grads.")),
        "counts": count_operators(model),
    }


def counts_of(variant: Variant, rank: int, size: int) -> dict[str, Any]:
    """Compare the communication of our step with that of the stock one."""
    batch = local_batch(variant, 0, rank, size)
    with gpu_target():
        return {
            "ours": count_operators(partition(our_step(variant), *batch)),
            "stock": count_operators(partition(StockStep(variant), *batch)),
        }


def attempt(function: Any, *args: Any) -> Any:
    """Return the result, or the error: one variant shall not hide the others."""
    try:
        return function(*args)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


def main() -> None:
    rank, size = connect()
    part = sys.argv[1]
    if part == "numbers":
        result = {name: attempt(numbers_of, variant, rank, size) for name, variant in NUMBERS[size].items()}
    else:
        result = {name: attempt(counts_of, variant, rank, size) for name, variant in COUNTS[size].items()}
    report(result)


if __name__ == "__main__":
    main()
