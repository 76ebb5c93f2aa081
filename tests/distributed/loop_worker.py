"""A process of `test_loops.py`."""

import os
from pathlib import Path

import mindspore as ms
import numpy as np
from described_messages import sizes_sent
from launch import meet, report, run_scenarios
from loop_scenarios import (
    batches_of,
    build_loop,
    sentences,
    train_adversaries,
    train_functionally,
    train_loop,
    train_sentences,
    train_with_scheduler,
)
from mindspore import Tensor, nn
from open_window import reducer_of
from scenarios import batch, build_network, share, uneven_data, weights_of

from ms_gradaccum import HSDP, AccumulationConfig, Accumulator, DataParallel, TokenMeanLoss

rank, size = meet()
results = {}
KINDS = {
    "data parallel": DataParallel(check_weights=True),
    "data parallel, each batch": DataParallel(sync_each_batch=True, check_weights=True),
    "level1": HSDP(threshold=0, check_weights=True),
    "level2": HSDP(-1, 0, "level2", check_weights=True),
}


def train_tokens():
    # Micro batches dealt one by one, and sentences dealt one by one.
    parts = [list(range(i, i + 4)) for i in range(0, 16, 4)]
    by_batch, by_sentence = parts[rank::2], [[4 * i + j for j in range(rank, 8, 2)] for i in (0, 2)]
    for name, kind in KINDS.items():
        results[f"tokens {name}"] = _row(*train_sentences(by_batch, parallel=kind))
        results[f"blocks {name}"] = _row(*train_sentences(by_batch, block_tokens=5, parallel=kind))
    results["by sentence"] = _row(*train_sentences(by_sentence))
    results["own tokens"] = [int((sentences(sum(mine, []))[1] >= 0).sum()) for mine in (by_batch, by_sentence)]
    # Only rank 0 has any valid token, then nobody.
    results["tokens of one"] = _row(*train_sentences([[0, 1, 2], [3]] if rank == 0 else [[-1], [-1]]))
    results["no tokens"] = _row(*train_sentences([[-1], [-1]]))


def _row(weights, output):
    return [weights, *(float(item.asnumpy()) for item in (output.loss, output.updated, output.weight))]


def run_out_of_data_early():
    for name in ("data parallel", "level2"):
        for carry in (False, True):
            config = AccumulationConfig(sync_with_dataloader=not carry)
            key = f"early {name} {'carry' if carry else 'apply'}"
            settings = {"config": config, "parallel": KINDS[name]}
            results[key] = train_with_scheduler(batches_of(uneven_data(rank)), 2, 2, **settings)


def train_by_gradients():
    mine = [tuple(Tensor(array) for array in share(batch(number), rank, size)) for number in (0, 1)]
    for name, kind in KINDS.items():
        results[f"functional {name}"] = _row(*train_functionally(mine, parallel=kind))


def skip_what_is_not_finite():
    network = build_network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer)
    x, y = share(batch(0), rank, size)
    before = weights_of(network)
    accumulator.backward(Tensor(x * (np.nan if rank == 1 else 1)), Tensor(y))
    output = accumulator.step()
    results["one has NaN"] = [bool(output.overflow.asnumpy()), accumulator.updated, weights_of(network) == before]
    accumulator.backward(Tensor(x), Tensor(y))
    accumulator.step()
    results["and then"] = [accumulator.updated, weights_of(network) == before]


def save_at_an_update():
    for name in ("level1", "level2"):
        _, accumulator = build_loop(parallel=KINDS[name])
        train_loop(accumulator, range(2), rank, size)
        results[f"checkpoint {name}"] = str(Path(os.environ["REPORT_FOLDER"]) / f"{name}_{rank}.ckpt")
        ms.save_checkpoint(accumulator, results[f"checkpoint {name}"])


def be_refused():
    network = build_network()
    cell, optimizer = nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1)
    errors = []
    for settings in (
        {"accumulation_steps": 1 + rank},
        {"config": AccumulationConfig(sync_each_batch=True), "parallel": HSDP()},
    ):
        try:
            Accumulator(cell, optimizer, **settings)
        except ValueError as error:
            errors.append(str(error))
    try:
        Accumulator(cell, optimizer).prepare(part for part in ())
    except TypeError as error:
        errors.append(str(error))
    results["errors"] = errors


def count_shared_batches():
    """Messages of three batches and one update, where each batch is shared."""
    backbone = nn.Dense(1, 2, has_bias=False)
    config = AccumulationConfig(3, sync_each_batch=True)
    accumulator = Accumulator(TokenMeanLoss(backbone), nn.SGD(backbone.trainable_params(), 0.1), config=config)
    sizes = sizes_sent(reducer_of(accumulator.driver))
    for _ in range(3):
        with accumulator.accumulate():
            accumulator.backward(*[Tensor(array) for array in sentences([1, 2])])
            accumulator.step()
        sizes.append("batch")
    results["shared batches"] = sizes


ms.set_context(mode=ms.GRAPH_MODE)
results["adversaries"] = train_adversaries(rank, size)
# Op by op, for which nothing is compiled.
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"
run_scenarios(
    train_tokens,
    run_out_of_data_early,
    train_by_gradients,
    skip_what_is_not_finite,
    save_at_an_update,
    be_refused,
    count_shared_batches,
)
report(rank, results)
