"""A process of `test_grad_cache_of_ranks.py`: losses over the rows of all ranks, which are uneven."""

import os

import mindspore as ms
import numpy as np
from launch import meet, report
from mindspore import Tensor, nn
from quick_mindspore import compiling
from whole_batch_losses import (
    LOSSES,
    OrdinaryLoss,
    batch,
    bounds_of,
    flat,
    parts_of,
    values_of,
)

from ms_gradaccum import (
    HSDP,
    ContrastiveLoss,
    DataParallel,
    GradAccumulation,
    GradCacheLoss,
    TrainOneStepCell,
)
from ms_gradaccum.parallel.world import gather_rows

rank, size = meet()
KINDS = {
    "data parallel": DataParallel(),
    "each batch": DataParallel(sync_each_batch=True),
    "level1": HSDP(shard_size=2, threshold=0),
    "level2": HSDP(threshold=0, optimizer_level="level2"),
}


def train(name, kind, cell_kind=GradCacheLoss, loss=None, **settings):
    """Three windows; in the last one the last rank has run out of data. Return the weights, losses and weights."""
    cell = cell_kind(*parts_of(name, loss))
    optimizer = nn.Momentum(cell.trainable_params(), 0.05, 0.9)
    step = TrainOneStepCell(GradAccumulation(cell, 3), optimizer, parallel=kind, **settings)
    outputs = []
    for number in range(3):
        begin, end = bounds_of(number, size)[rank]
        rows = [Tensor(array[begin:end]) for array in batch(name, number, 18 + number % 2)]
        outputs.append(step(*rows) if end > begin else step.join())
    numbers = [[float(each.loss.asnumpy()), float(each.weight.asnumpy())] for each in outputs]
    return {"weights": flat(values_of(cell.trainable_params())).tolist(), "outputs": numbers}


results = {}
if size == 2:
    with compiling("the network", "the loss"):
        results["compiled"] = train("clip", DataParallel(), compile=True)
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"
for name in LOSSES:
    results[name] = train(name, DataParallel())
    if size == 2:
        results[f"{name} plain"] = train(name, DataParallel(), OrdinaryLoss, check_loss=False)
for kind in KINDS:
    results[kind] = train("clip", KINDS[kind])
results["blocks"] = train("clip", DataParallel(), loss=lambda: ContrastiveLoss(np.exp(-1.5), block_rows=5))
# What one rank alone could not know is an error on all of them, and nobody waits.
try:
    gather_rows([np.zeros((2, 3 + rank), np.float32)])
except ValueError as error:
    results["widths"] = str(error)
# Any dtype arrives bit for bit.
arrays = [np.arange(2 + rank) % 2 == 0, np.full((2 + rank, 2), -(2**40) - rank), np.full(2 + rank, np.nan)]
begin, rows, gathered = gather_rows(arrays)
results["gathered"] = [begin, rows, *(array.tolist() for array in gathered[:2]), bool(np.isnan(gathered[2]).all())]
report(rank, results)
