"""Losses over the rows of all processes: each sees the negatives of the others, and the update is the whole batch's."""

import functools

import numpy as np
from linear_toy import momentum
from mindspore import Tensor
from quick_mindspore import compiling, eagerly
from ranks import RANK, SIZE, assert_same, on_ranks
from refusal import refuses
from scenarios import weights_of
from whole_batch_losses import LOSSES, OrdinaryLoss, WholeBatches, batch, bounds_of, parts_of, train

from ms_gradaccum import HSDP, ContrastiveLoss, DataParallel, GradAccumulation, GradCacheLoss, TrainOneStepCell
from ms_gradaccum.parallel.world import gather_rows

WAYS = {
    **{name: (name,) for name in LOSSES},
    "each batch": ("clip", DataParallel(sync_each_batch=True)),
    "level1": ("clip", HSDP(shard_size=2, threshold=0)),
    "level2": ("clip", HSDP(threshold=0, optimizer_level="level2")),
    "blocks": ("clip", None, GradCacheLoss, lambda: ContrastiveLoss(np.exp(-1.5), block_rows=5)),
}


def rows_of(name, number):
    return batch(name, number, 18 + number % 2)


@functools.cache
def whole(name):
    """The start, the end and the losses of a training with all rows in one process."""
    cell = OrdinaryLoss(*parts_of(name))
    start = weights_of(cell)
    step = WholeBatches(cell, momentum(cell, 0.05))
    losses = train(step, [rows_of(name, number) for number in range(3)])
    return start, weights_of(cell), losses


def train_ranks(name, kind=None, cell_kind=GradCacheLoss, loss=None, **settings):
    """Three windows; in the last one the last rank has run out of data. Return the weights and the outputs."""
    cell = cell_kind(*parts_of(name, loss))
    optimizer = momentum(cell, 0.05)
    step = TrainOneStepCell(GradAccumulation(cell, 3), optimizer, parallel=kind or DataParallel(), **settings)
    outputs = []
    for number in range(3):
        begin, end = bounds_of(number, SIZE)[RANK]
        rows = [Tensor(array[begin:end]) for array in rows_of(name, number)]
        outputs.append(step(*rows) if end > begin else step.join())
    numbers = [[float(each.loss.asnumpy()), float(each.weight.asnumpy())] for each in outputs]
    return weights_of(cell), numbers


def check(name, *args, **settings):
    weights, numbers = train_ranks(name, *args, **settings)
    _, expected, losses = whole(name)
    assert_same(weights)
    assert np.linalg.norm(np.subtract(weights, expected)) < 1e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(numbers, list(zip(losses, (18, 19, 18))), rtol=1e-6)


@on_ranks(2, 4, cases=WAYS)
def test_ranks_train_like_one_process_on_all_rows(*way):
    check(*way)


@on_ranks(2, cases=LOSSES.keys())
def test_without_the_rows_of_the_others_they_would_train_something_else(name):
    start, expected, _ = whole(name)
    plain, _ = train_ranks(name, cell_kind=OrdinaryLoss, check_loss=False)
    assert np.linalg.norm(np.subtract(plain, expected)) > 0.1 * np.linalg.norm(np.subtract(expected, start))


@on_ranks(2, compiled=True)
def test_compiled_networks_do():
    with eagerly():
        whole("clip")
    with compiling("the network", "the loss"):
        check("clip", compile=True)


@on_ranks(2, 4)
def test_rows_are_gathered_in_the_order_of_the_ranks_bit_for_bit():
    """Any dtype arrives."""
    arrays = [np.arange(2 + RANK) % 2 == 0, np.full((2 + RANK, 2), -(2**40) - RANK), np.full(2 + RANK, np.nan)]
    begin, rows, (bools, ints, nans) = gather_rows(arrays)
    counts = [2 + rank for rank in range(SIZE)]
    assert (begin, rows) == (sum(counts[:RANK]), sum(counts))
    assert bools.tolist() == [i % 2 == 0 for count in counts for i in range(count)]
    assert ints.tolist() == [[-(2**40) - rank] * 2 for rank, count in enumerate(counts) for _ in range(count)]
    assert np.isnan(nans).all()


@on_ranks(2, 4)
def test_rows_of_different_lengths_are_refused_on_all_ranks():
    widths = ", ".join(str(4 * (3 + rank)) for rank in range(SIZE))
    with refuses(ValueError, "number of bytes", f"got {widths}. "):
        gather_rows([np.zeros((2, 3 + RANK), np.float32)])
