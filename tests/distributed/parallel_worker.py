"""What each process of `test_parallel.py` does."""

import gc
import os
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from scenarios import (  # noqa: E402
    CLIPS,
    OPTIMIZERS,
    batch,
    build_network,
    build_step,
    fingerprint,
    share,
    train,
    train_batches,
    train_lookup,
    uneven_data,
    weights_of,
)

from ms_gradaccum import (  # noqa: E402
    HSDP,
    Accumulator,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    Model,
    TrainingPlan,
    TrainOneStepCell,
)
from ms_gradaccum.parallel import world

# Each compilation collects garbage, which takes longest in the modules that never become any.
gc.freeze()
init()
rank, size = get_rank(), get_group_size()
results = {}
KINDS = {
    "data parallel": DataParallel(),
    "data parallel, overlapping": DataParallel(overlap=True),
    "data parallel, each batch": DataParallel(sync_each_batch=True),
    "all shards": HSDP(threshold=0),
    "two shards": HSDP(2, 0),
    "all shards, level2": HSDP(-1, 0, "level2"),
    "two shards, level2": HSDP(2, 0, "level2"),
}


def record(name, network, optimizer, output):
    results[name] = {
        "weights": weights_of(network),
        "fingerprint": fingerprint(network),
        "state": sum(parameter.size for parameter in optimizer.get_parameters()),
        "loss": float(output.loss.asnumpy()),
        "norms": [float(output.grad_norm.asnumpy()), float(output.clipped_grad_norm.asnumpy())],
    }


# Of these the messages of a window are counted, for some micro_size.
COUNTED = {
    2: ["data parallel", "data parallel, overlapping", "data parallel, each batch", "all shards", "all shards, level2"],
    4: ["two shards", "two shards, level2"],
}


@contextmanager
def eagerly():
    """Run everything op by op in PYNATIVE mode, for which nothing is compiled."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    os.environ["MS_JIT"] = "0"
    yield
    del os.environ["MS_JIT"]
    ms.set_context(mode=ms.GRAPH_MODE)


def train_all_kinds():
    """Compiled are those whose messages are counted: of two processes, two shards are all shards."""
    for name, kind in KINDS.items():
        with nullcontext() if name in COUNTED[size] else eagerly():
            record(f"{name}, norm", *train("Adam", "norm", rank, size, parallel=kind))
        with eagerly():
            for clip in ("none", "value") if size == 2 else ():
                record(f"{name}, {clip}", *train("Adam", clip, rank, size, parallel=kind))
    if size == 2:
        with eagerly():
            record("nothing above the threshold, norm", *train("Adam", "norm", rank, size, parallel=HSDP()))


def train_all_optimizers():
    with eagerly():
        for optimizer in OPTIMIZERS:
            record(f"{optimizer}", *train(optimizer, "none", rank, size, parallel=HSDP(2, 0)))


def train_in_pynative_mode():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for name, kind in (("data parallel", DataParallel()), ("two shards", HSDP(2, 0))):
        record(f"PYNATIVE {name}", *train("Adam", "norm", rank, size, parallel=kind))


class Counter:
    """Stands in for a collective operator and notes its name, its ranks and the bytes of each message."""

    def __init__(self, operator, sent):
        self.operator, self.sent = operator, sent

    def __call__(self, values):
        name, ranks = type(self.operator).__name__, get_group_size(self.operator.group)
        self.sent.append([name, ranks, values.size * values.itemsize])
        return self.operator(values)


def count_messages():
    """Count the messages of a window, each one a call in PYNATIVE mode when nothing is compiled."""
    micro_sizes = (1, 16) if size == 2 else (2,)
    with eagerly():
        for name in COUNTED[size]:
            results[f"messages {name}"] = [messages_of(KINDS[name], micro_size) for micro_size in micro_sizes]
        if size == 2:
            results["messages nothing above the threshold"] = [messages_of(HSDP(), 1)]
            results["messages clipped"] = [messages_of(KINDS["all shards"], 1, ClipByValue(0.1))]


def messages_of(kind, micro_size, clip=None):
    """What a window of one batch sends and keeps, and what was planned."""
    network = build_network()
    parameters = network.trainable_params()
    settings = {"parallel": kind, "clip": clip}
    plan = TrainingPlan(
        dataset_size=16 * size,
        batch_size=16,
        epochs=1,
        ranks=size,
        micro_size=micro_size,
        parameters=parameters,
        **settings,
    )
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size)
    step = TrainOneStepCell(loss_cell, nn.SGD(parameters, 0.1), **settings)
    sent = []
    for _, cell in step.body.reducer.cells_and_names():
        for attribute in ("all_reduce", "all_gather"):
            if isinstance(getattr(cell, attribute, None), ms.ops.Primitive):
                setattr(cell, attribute, Counter(getattr(cell, attribute), sent))
    gather = world._gather_floats

    def counted_gather(values):
        sent.append(["AllGather", size, values.nbytes])
        return gather(values)

    with mock.patch.object(world, "_gather_floats", counted_gather):
        step(*[Tensor(np.ones((16, columns), np.float32)) for columns in (6, 3)])
    kept = {total.name: total.nbytes for total in (*step.body.buffer.sums, *step.body.reducer.sums)}
    return {
        "sent": sent,
        "planned": plan.window_messages,
        "kept": sum(kept.values()),
        "planned to keep": plan.buffer_bytes,
    }


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
    for name in ("data parallel", "data parallel, overlapping", "two shards, level2"):
        for last_window in ("apply", "drop"):
            network = build_network()
            optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
            settings = {"accumulation_steps": 2, "last_window": last_window, "parallel": KINDS[name]}
            model = Model(network, nn.MSELoss(), optimizer, **settings)
            model.train(2, NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2))
            results[f"early {name} {last_window}"] = weights_of(network)
            results[f"updates {name} {last_window}"] = int(optimizer.global_step.asnumpy()[0])


def save_and_load():
    """Save in the middle of the second window, and go on from there with other numbers of shards."""
    network, step = build_step(parallel=KINDS["all shards"], accumulation_steps=2)
    train_batches(step, range(3), rank, size)
    path = Path(os.environ["REPORT_FOLDER"]) / f"rank_{rank}.ckpt"
    ms.save_checkpoint(step, str(path))
    saved = ms.load_checkpoint(str(path))
    results["saved shapes"] = {name: list(value.shape) for name, value in saved.items()}
    train_batches(step, [3], rank, size)
    results["not interrupted"] = weights_of(network)
    for name in ("data parallel", "two shards"):
        network, step = build_step(parallel=KINDS[name], accumulation_steps=2)
        results[f"not loaded {name}"] = ms.load_param_into_net(step, saved)
        train_batches(step, [3], rank, size)
        results[f"resumed {name}"] = weights_of(network)


def train_on_from_another_world():
    """The file of two processes, at an update, in four."""
    network, step = build_step(parallel=KINDS["all shards, level2"], accumulation_steps=2)
    ms.load_checkpoint(os.environ["CHECKPOINT"], step)
    train_batches(step, [2, 3], rank, size)
    results["from two"] = weights_of(network)


def look_inside_a_window():
    """What each rank has before and at the boundary, as Accelerate's and Colossal-AI's tests look at it."""
    network, step = build_step(parallel=KINDS["data parallel"], accumulation_steps=2, clip=CLIPS["norm"]())
    start = fingerprint(network)
    train_batches(step, [0], rank, size)
    inside = [total.asnumpy().ravel().tolist() for total in step.body.buffer.sums]
    results["inside"] = {"sums": sum(inside, []), "moved": fingerprint(network) != start}
    # What the end of the window does first.
    step.body.window.measure()
    results["at the boundary"] = fingerprint(step.body.buffer.sums)
    step.body.buffer.clear()


def save_at_an_update():
    _, step = build_step(parallel=KINDS["all shards, level2"], accumulation_steps=2)
    train_batches(step, range(2), rank, size)
    results["level2 sums"] = {total.name: list(total.shape) for total in step.body.buffer.sums}
    results["checkpoint"] = str(Path(os.environ["REPORT_FOLDER"]) / f"update_{rank}.ckpt")
    ms.save_checkpoint(step, results["checkpoint"])


def notice_different_weights():
    network = build_network()
    kind = DataParallel(check_weights=True)
    loss_cell = nn.WithLossCell(network, nn.MSELoss())
    step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1), parallel=kind)
    inputs = [Tensor(array) for array in share(batch(0), rank, size)]
    step(*inputs)
    if rank:
        network[0].bias.set_data(network[0].bias + 1e-6)
    try:
        step(*inputs)
    except RuntimeError as error:
        results["different"] = str(error)


def look_rows_up():
    for name in ("data parallel", "all shards"):
        results[f"lookup {name}"] = train_lookup(rank, size, parallel=KINDS[name])
    try:
        train_lookup(rank, size, parallel=KINDS["all shards, level2"])
    except ValueError as error:
        results["lookup refused"] = str(error).splitlines()[0]


def overlap():
    kind = KINDS["data parallel, overlapping"]
    _, step = build_step(parallel=kind, accumulation_steps=2)
    train_batches(step, (0, 1), rank, size)
    reports = [len(report.graphs) for (reduced, _), report in step.body.end.reports.items() if reduced]
    results["reports of an overlapping window"] = [len(step.body.end.reports) - len(reports), *reports]
    network = build_network()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    cell = nn.WithLossCell(network, nn.MSELoss())
    for name, build in (
        (
            "terms",
            lambda: TrainOneStepCell(GradAccumulation(cell, 2, terms=2, weighted=True), optimizer, parallel=kind),
        ),
        ("loop", lambda: Accumulator(cell, optimizer, 2, parallel=kind)),
    ):
        try:
            build()
        except ValueError as error:
            results[f"overlap refused, {name}"] = str(error)


def warn_about_level3():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_step(parallel=HSDP(-1, 0, "level3"))
    results["level3"] = [str(warning.message) for warning in caught if "level3" in str(warning.message)]


PARTS = [train_all_kinds, start_from_different_weights, disagree, save_and_load]
PARTS += [train_on_from_another_world] if size == 4 else [save_at_an_update, notice_different_weights]
PARTS += (
    []
    if size == 4
    else [look_rows_up, overlap, warn_about_level3, look_inside_a_window, train_all_optimizers, run_out_of_data_early]
)
PARTS += [count_messages] if size == 4 else [train_in_pynative_mode, count_messages]
# What is not about the compiler: it would take most of the time.
EAGER = [save_and_load, train_on_from_another_world, save_at_an_update, notice_different_weights, look_inside_a_window]
EAGER += [run_out_of_data_early]
ms.set_context(mode=ms.GRAPH_MODE)
for part in PARTS:
    begin = time.monotonic()
    with eagerly() if part in EAGER else nullcontext():
        part()
    print(f"{part.__name__}: {time.monotonic() - begin:.0f} s", flush=True)
report(rank, results)
