"""What each process of `test_parallel.py` does."""

import sys
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from scenarios import OPTIMIZERS, build_network, fingerprint, train, weights_of  # noqa: E402

from ms_gradaccum import HSDP, DataParallel, GradAccumulation, Model, TrainOneStepCell  # noqa: E402

init()
rank, size = get_rank(), get_group_size()
results = {}


def record(name, network, optimizer, output):
    results[name] = {
        "weights": weights_of(network),
        "fingerprint": fingerprint(network),
        "state": sum(parameter.size for parameter in optimizer.get_parameters()),
        "loss": float(output.loss.asnumpy()),
        "norms": [float(output.grad_norm.asnumpy()), float(output.clipped_grad_norm.asnumpy())],
    }


def train_all_kinds():
    kinds = {"data parallel": DataParallel(), "all shards": HSDP(threshold=0), "two shards": HSDP(2, 0)}
    for name, kind in kinds.items():
        for clip in ("none", "norm", "value"):
            record(f"{name}, {clip}", *train("Adam", clip, rank, size, parallel=kind))
    record("nothing above the threshold, norm", *train("Adam", "norm", rank, size, parallel=HSDP()))


def train_all_optimizers():
    for optimizer in OPTIMIZERS:
        record(f"{optimizer}", *train(optimizer, "none", rank, size, parallel=HSDP(2, 0)))


def train_in_pynative_mode():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for name, kind in (("data parallel", DataParallel()), ("two shards", HSDP(2, 0))):
        record(f"PYNATIVE {name}", *train("Adam", "norm", rank, size, parallel=kind))


class Counter:
    """Stands in for an all-reduce and notes the size of each message."""

    def __init__(self, all_reduce):
        self.all_reduce, self.sizes = all_reduce, []

    def __call__(self, values):
        self.sizes.append(values.size)
        return self.all_reduce(values)


def count_messages():
    """Count all-reduces, each one a call in PYNATIVE mode when nothing is compiled."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for micro_size in (1, 16):
        network = build_network()
        loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size)
        step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1))
        step.window.run_report.eager = step.window.run_update.eager = True
        counter = Counter(step.parallel.sum_over_ranks.sum.all_reduce)
        step.parallel.sum_over_ranks.sum.all_reduce = counter
        step(Tensor(np.ones((16, 6), np.float32)), Tensor(np.ones((16, 3), np.float32)))
        results[f"messages {micro_size}"] = counter.sizes
    ms.set_context(mode=ms.GRAPH_MODE)


def start_from_different_weights():
    network = build_network()
    if rank:
        network[0].weight.set_data(Tensor(np.full(network[0].weight.shape, 7.0, np.float32)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))
    results["unified"] = fingerprint(network)
    results["warnings"] = [str(warning.message) for warning in caught if "ranks" in str(warning.message)]


def disagree():
    network = build_network()
    try:
        loss_cell = nn.WithLossCell(network, nn.MSELoss())
        TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1), accumulation_steps=1 + rank)
    except ValueError as error:
        results["disagreement"] = str(error)


def run_out_of_data_early():
    """Rank 0 has three batches of two rows, the others two."""
    for last_window in ("apply", "drop"):
        network = build_network()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        model = Model(network, nn.MSELoss(), optimizer, accumulation_steps=2, last_window=last_window)
        rows = 6 if rank == 0 else 4
        generator = np.random.default_rng(rank)
        x, y = (generator.normal(size=(rows, n)).astype(np.float32) for n in (6, 3))
        model.train(2, NumpySlicesDataset((x, y), shuffle=False).batch(2))
        results[f"early {last_window}"] = weights_of(network)
        results[f"updates {last_window}"] = int(optimizer.global_step.asnumpy()[0])


ms.set_context(mode=ms.GRAPH_MODE)
train_all_kinds()
start_from_different_weights()
disagree()
if size == 2:
    train_all_optimizers()
    run_out_of_data_early()
    train_in_pynative_mode()
    count_messages()
report(rank, results)
