"""A process of `test_parallel.py`."""

import copy
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
from described_messages import bytes_of_sums, described
from launch import meet, report, run_scenarios
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size
from mindspore.dataset import NumpySlicesDataset
from mindspore.graph.api import _cell_graph_executor
from mindspore.train import CheckpointConfig, ModelCheckpoint, RunContext
from mindspore.train.callback import _InternalCallbackParam
from open_window import buffer_of, reducer_of, window_of
from quick_mindspore import compiling, eagerly
from scenarios import (
    CLIPS,
    NO_SPIKE,
    ONE_SHAPE,
    OPTIMIZERS,
    SPIKE,
    STEPS,
    Halved,
    batch,
    build_network,
    build_step,
    fingerprint,
    share,
    train,
    train_batches,
    train_factors,
    train_lookup,
    uneven_data,
    weights_of,
)
from step_probe import operators

from ms_gradaccum import (
    HSDP,
    ClipByGroupNorm,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    MixedPrecision,
    Model,
    NormSpike,
    TrainOneStepCell,
)
from ms_gradaccum.parallel import world

rank, size = meet()
results = {}
KINDS = {
    "data parallel": DataParallel(),
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


# Of these each entry is clipped by itself, too: of whole gradients, of shards of them, and in each batch.
CLIPPED_BY_VALUE = ["data parallel", "all shards", "two shards, level2"]
COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather")
# These are compiled, and the collectives in their graphs are counted.
COMPILED = {2: ["data parallel", "all shards"], 4: ["two shards, level2"]}
# Of these the messages of a window are counted, for some micro_size.
COUNTED = {
    2: ["data parallel", "data parallel, each batch", "all shards", "all shards, level2"],
    4: ["two shards", "two shards, level2"],
}


def train_all_kinds():
    for name, kind in KINDS.items():
        if name in COMPILED[size]:
            train_and_look_at_the_graphs(name, kind)
        else:
            with eagerly():
                record(f"{name}, norm", *train("Adam", "norm", rank, size, parallel=kind))
        with eagerly():
            for clip in () if size == 4 else ("none", "value") if name in CLIPPED_BY_VALUE else ("none",):
                record(f"{name}, {clip}", *train("Adam", clip, rank, size, parallel=kind))
    if size == 2:
        with eagerly():
            record("nothing above the threshold, norm", *train("Adam", "norm", rank, size, parallel=HSDP()))


def train_and_look_at_the_graphs(name, kind):
    cells, compile_cell = [], _cell_graph_executor.compile

    def note(cell, *inputs, **settings):
        cells.append(cell)
        return compile_cell(cell, *inputs, **settings)

    network, step = build_step(clip=CLIPS["norm"](), parallel=kind, check_loss=name == COMPILED[size][-1])
    with mock.patch.object(_cell_graph_executor, "compile", note):
        record(f"{name}, norm", network, step.optimizer, train_batches(step, range(STEPS), rank, size, ONE_SHAPE))
    traffic = described(reducer_of(step).layout)
    results[f"graphs {name}"] = {
        "sent": collectives_in(cells),
        "described": sorted(message.operator for message in traffic.per_micro_batch + traffic.per_update),
    }


def collectives_in(cells):
    """The collective operators of a micro batch and of an update: of each kind of graph once, whatever its shapes.

    Some ranks have no micro batch left and take part by `add_nothing`; a `_Collective` asks how many they are.
    """
    graphs = {}
    for cell in cells:
        adds_nothing = getattr(getattr(cell, "method", None), "__name__", "") == "add_nothing"
        if not adds_nothing and type(cell).__name__ != "_Collective":
            found = sorted(each for each in operators(cell, cell.current_phase) if each in COLLECTIVES)
            graphs[type(cell).__name__, tuple(found)] = found
    return sorted(sum(graphs.values(), []))


def train_all_optimizers():
    with eagerly():
        for optimizer in OPTIMIZERS:
            record(f"{optimizer}", *train(optimizer, "none", rank, size, parallel=HSDP(2, 0)))


def train_in_pynative_mode():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    record("PYNATIVE two shards", *train("Adam", "norm", rank, size, parallel=KINDS["two shards"]))


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
    micro_sizes = (1, 4) if size == 2 else (2,)
    with eagerly():
        for name in COUNTED[size]:
            results[f"messages {name}"] = [messages_of(KINDS[name], micro_size) for micro_size in micro_sizes]
        if size == 2:
            results["messages nothing above the threshold"] = [messages_of(HSDP(), 1)]
            results["messages clipped"] = [messages_of(KINDS["all shards"], 1, ClipByValue(0.1), 2)]
            limits = ClipByGroupNorm({"*weight": 0.1, "*": 1.0})
            results["messages clipped by groups"] = [messages_of(KINDS["all shards, level2"], 2, limits, 3)]
            for name in ("data parallel", "all shards", "all shards, level2"):
                results[f"messages unforeseen {name}"] = unforeseen_messages_of(KINDS[name])


def messages_of(kind, micro_size, clip=None, num_norm_reductions=1, skip_above=None):
    """Return the messages and sums of a window of one batch, and those that its layout stands for.

    The norm after a clip by value takes one more reduction, and the norms of groups another one.
    """
    network = build_network()
    parameters = network.trainable_params()
    settings = {"parallel": kind, "clip": clip, "skip_above": skip_above, "check_loss": False}
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size)
    step = TrainOneStepCell(loss_cell, nn.SGD(parameters, 0.1), **settings)
    sent = count_in(step)
    kept = {total.name: total.nbytes for total in (*buffer_of(step).sums, *reducer_of(step).sums)}
    traffic = described(reducer_of(step).layout, num_norm_reductions)
    return {
        "sent": sent,
        "described": traffic.of_window(1, micro_size),
        "kept": sum(kept.values()),
        "kept by description": bytes_of_sums(reducer_of(step).layout),
    }


def unforeseen_messages_of(kind):
    """Return the messages of a window of four micro batches and those that its layout stands for."""
    network = build_network()
    settings = {
        "parallel": kind,
        "mixed_precision": MixedPrecision(level="O0", init_scale=1.0, reduce_dtype=ms.float16),
    }
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = TrainOneStepCell(loss_cell, optimizer, bad_micro_batch="drop", compile=True, **settings)
    sent = count_in(step)
    sums = [*buffer_of(step).sums, *reducer_of(step).sums]
    return {
        "sent": sent,
        "described": described(reducer_of(step).layout).of_window(1, 4),
        "kept": sum({total.name: total.nbytes for total in sums}.values()),
        "kept by description": bytes_of_sums(reducer_of(step).layout),
    }


def count_in(step):
    """Run a window of one batch and return the messages that it sends."""
    inputs = [Tensor(np.ones((16, columns), np.float32)) for columns in (6, 3)]
    for _ in range(2):  # In the first two the ranks also compare what they train.
        step(*inputs)
    sent = []
    for _, cell in reducer_of(step).cells_and_names():
        for attribute in ("all_reduce", "all_gather"):
            if isinstance(getattr(cell, attribute, None), ms.ops.Primitive):
                setattr(cell, attribute, Counter(getattr(cell, attribute), sent))
    gather = world._send

    def counted_gather(values):
        sent.append(["AllGather", size, values.nbytes])
        return gather(values)

    with mock.patch.object(world, "_send", counted_gather):
        step(*inputs)
    return sent


def leave_a_window_out():
    for name in ("data parallel", "all shards", "all shards, level2"):
        for limit in (NormSpike(std=3.0, windows=4), 50.0):
            result = train_factors(SPIKE, rank, size, skip_above=limit, parallel=KINDS[name])
            results[f"left out {name}, {type(limit).__name__}"] = result
        results[f"messages left out {name}"] = [
            messages_of(KINDS[name], 2, skip_above=limit)["sent"] for limit in (None, NormSpike())
        ]


def clip_by_a_cell_of_its_own():
    results["own clip"] = train_factors(NO_SPIKE, rank, size, clip=Halved(), parallel=KINDS["data parallel"])
    network = build_network()
    before = [weight.shape for weight in network.trainable_params()]
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    try:
        TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, clip=Halved(), parallel=HSDP(2, 0))
    except ValueError as error:
        results["own clip refused"] = str(error)
    results["left whole"] = [weight.shape for weight in optimizer.parameters] == before


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
    for name in ("data parallel", "two shards, level2"):
        for last_window in ("apply", "drop"):
            network = build_network()
            optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
            settings = {"accumulation_steps": 2, "last_window": last_window, "parallel": KINDS[name]}
            model = Model(network, nn.MSELoss(), optimizer, **settings)
            model.train(2, NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2))
            results[f"early {name} {last_window}"] = weights_of(network)
            results[f"updates {name} {last_window}"] = int(optimizer.global_step.asnumpy()[0])


def without_redundancy(step, saved):
    """Save with MindSpore's callback that leaves out what other ranks have, and return the names of what differs."""
    config = CheckpointConfig(remove_redundancy=True, integrated_save=False, format="safetensors")
    folder = Path(os.environ["REPORT_FOLDER"]) / f"callback_{rank}"
    params = _InternalCallbackParam(
        train_network=step,
        cur_step_num=3,
        cur_epoch_num=1,
        batch_num=4,
        last_save_ckpt_step=None,
        latest_ckpt_file=None,
    )
    ModelCheckpoint("step", str(folder), config).end(RunContext(params))
    (file,) = folder.glob("*.safetensors")
    found = ms.load_checkpoint(str(file), format="safetensors", remove_redundancy=True)
    parts = step.parameter_layout_dict
    return [name for name in parts if name not in found or (found[name] != saved[name]).any()]


def save_and_load():
    """Save in the middle of the second window, and go on from there with other numbers of shards."""
    network, step = build_step(parallel=KINDS["all shards"], accumulation_steps=2)
    train_batches(step, range(3), rank, size)
    path = Path(os.environ["REPORT_FOLDER"]) / f"rank_{rank}.ckpt"
    ms.save_checkpoint(step, str(path))
    saved = ms.load_checkpoint(str(path))
    results["saved shapes"] = {name: list(value.shape) for name, value in saved.items()}
    results["differs without redundancy"] = without_redundancy(step, saved)
    whole = step.parameters_dict()
    path_of_dict = str(path.with_name(f"dict_{rank}.ckpt"))
    ms.save_checkpoint(whole, path_of_dict)
    ways = {
        "read": whole,
        "copied": copy.deepcopy(whole),  # EarlyStopping keeps the best parameters in such a copy.
        "cloned": {name: each.clone() for name, each in whole.items()},
        "listed": {name: Tensor(each.tolist(), each.dtype) for name, each in whole.items()},
        "set": {name: Parameter(ops.zeros(each.shape, each.dtype)).set_data(each) for name, each in whole.items()},
        "saved": ms.load_checkpoint(path_of_dict),
    }
    for how, parameters in ways.items():
        different = [name for name, each in parameters.items() if (each.asnumpy() != saved[name].asnumpy()).any()]
        results[f"differs where {how}"] = different
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
    """Return the gradients of each rank before and at the boundary, as Accelerate's and Colossal-AI's tests do."""
    network, step = build_step(parallel=KINDS["data parallel"], accumulation_steps=2, clip=CLIPS["norm"]())
    start = fingerprint(network)
    train_batches(step, [0], rank, size)
    inside = [total.asnumpy().ravel().tolist() for total in buffer_of(step).sums]
    results["inside"] = {"sums": sum(inside, []), "moved": fingerprint(network) != start}
    # What the end of the window does first.
    window_of(step).reduce()
    results["at the boundary"] = fingerprint(buffer_of(step).sums)
    step.drop()


def save_at_an_update():
    _, step = build_step(parallel=KINDS["all shards, level2"], accumulation_steps=2)
    train_batches(step, range(2), rank, size)
    results["level2 sums"] = {total.name: list(total.shape) for total in buffer_of(step).sums}
    results["checkpoint"] = str(Path(os.environ["REPORT_FOLDER"]) / f"update_{rank}.ckpt")
    ms.save_checkpoint(step, results["checkpoint"])


def notice_different_weights():
    network = build_network()
    kind = DataParallel(check_weights=True)
    loss_cell = nn.WithLossCell(network, nn.MSELoss())
    step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1), parallel=kind)
    inputs = [Tensor(array) for array in share(batch(0), rank, size)]
    step(*inputs), step(*inputs)
    if rank:
        network[0].bias.set_data(network[0].bias + 1e-6)
    # In window 3, in which the ranks compare nothing else.
    try:
        step(*inputs)
    except RuntimeError as error:
        results["different"] = str(error)


def look_rows_up():
    for name in ("data parallel", "all shards"):
        with compiling("the network"):
            results[f"lookup {name}"] = train_lookup(rank, size, parallel=KINDS[name])
    try:
        train_lookup(rank, size, parallel=KINDS["all shards, level2"])
    except ValueError as error:
        results["lookup refused"] = str(error).splitlines()[0]


def warn_about_level3():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_step(parallel=HSDP(-1, 0, "level3"))
    results["level3"] = [str(warning.message) for warning in caught if "level3" in str(warning.message)]


def train_in_the_context_of_data_parallel():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mean in (True, False):
            ms.set_auto_parallel_context(parallel_mode="data_parallel", parameter_broadcast=True, gradients_mean=mean)
            try:
                # The graphs of one of them are enough.
                with eagerly() if mean else nullcontext():
                    record(f"parameter_broadcast, mean {mean}", *train("Adam", "norm", rank, size, parallel=HSDP(2, 0)))
            finally:
                ms.reset_auto_parallel_context()
    results["warned of a sum"] = [str(each.message) for each in caught if "gradients_mean" in str(each.message)]


PARTS = [train_all_kinds, start_from_different_weights, disagree, save_and_load]
PARTS += [train_on_from_another_world] if size == 4 else [save_at_an_update, notice_different_weights]
PARTS += (
    []
    if size == 4
    else [look_rows_up, warn_about_level3, look_inside_a_window, train_all_optimizers, run_out_of_data_early]
)
PARTS += [] if size == 4 else [train_in_the_context_of_data_parallel, train_in_pynative_mode]
PARTS += [] if size == 4 else [leave_a_window_out, clip_by_a_cell_of_its_own]
PARTS += [count_messages]
# What is not about the compiler: it would take most of the time.
EAGER = [save_and_load, train_on_from_another_world, save_at_an_update, notice_different_weights, look_inside_a_window]
EAGER += [run_out_of_data_early, leave_a_window_out, clip_by_a_cell_of_its_own]
ms.set_context(mode=ms.GRAPH_MODE)
for part in PARTS:
    with eagerly() if part in EAGER else nullcontext():
        run_scenarios(part)
report(rank, results)
