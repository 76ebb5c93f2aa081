"""A process of `test_ranks_that_differ.py`: what the ranks do not have in common."""

import itertools
import math
import os
import signal
import warnings
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import mindspore as ms
import numpy as np
from launch import meet, report
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim as experimental
from mindspore.train import OnRequestExit
from quick_mindspore import eagerly
from scenarios import APART, KINDS, batch, build_network, build_step, share, uneven_data, weights_of

from ms_gradaccum import (
    EMA,
    HSDP,
    Accumulator,
    DataParallel,
    GradAccumulation,
    Model,
    Reduced,
    StateCheckpoint,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum.parallel import world

rank, _ = meet()
results = {}


def disagree_about(what, build):
    """Note the error that both ranks must get, each of its own."""
    try:
        build(build_network())
    except ValueError as error:
        results.setdefault("disagreements", {})[what] = str(error)


def step_with(optimizer, network, loss=None, **settings):
    loss_cell = GradAccumulation(
        nn.WithLossCell(network, loss or nn.MSELoss()), 2, batch_axis=settings.pop("batch_axis", 0)
    )
    return TrainOneStepCell(loss_cell, optimizer, **settings)


def train_unlike(network, epochs=1, callbacks=(), **settings):
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1), **settings)
    data = NumpySlicesDataset(tuple(uneven_data(1)), shuffle=False).batch(2)
    model.train(epochs, data, callbacks=[*callbacks])


def cast_on_one_rank(network):
    if rank:
        network[2].to_float(ms.float16)
    step_with(sgd(network), network)


def in_another_mode(network):
    ms.set_context(mode=ms.PYNATIVE_MODE if rank else ms.GRAPH_MODE)
    try:
        step_with(nn.SGD(network.trainable_params(), 0.1), network)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


def weights(network):
    return network.trainable_params()


def train_half_frozen(network):
    optimizer = sgd(network)
    weights(network)[0].requires_grad = rank == 0
    step_with(optimizer, network)


def halves(network):
    return [{"params": weights(network)[: 1 + rank]}, {"params": weights(network)[1 + rank :]}]


def sgd(network):
    return nn.SGD(weights(network), 0.1)


def disagree_about_what_trains():
    """Everything that makes ranks train different weights, or wait for each other, if they are told it unlike."""
    makers = {
        "decay": lambda net: nn.Momentum(weights(net), 0.1, 0.9, weight_decay=0.1 * rank),
        "epsilon": lambda net: nn.Adam(weights(net), 0.1, eps=1e-8 * (1 + rank)),
        "class": lambda net: nn.Adam(weights(net), 0.1) if rank else nn.Momentum(weights(net), 0.1, 0.9),
        "parameters": lambda net: nn.SGD(weights(net)[rank:], 0.1),
    }
    for what, make in makers.items():
        disagree_about(what, lambda network, make=make: step_with(make(network), network))
    disagree_about("mode", in_another_mode)
    disagree_about("loss", lambda net: step_with(sgd(net), net, nn.L1Loss() if rank else nn.MSELoss()))
    disagree_about("axis", lambda net: step_with(sgd(net), net, batch_axis=rank))
    disagree_about("compile", lambda net: step_with(sgd(net), net, compile=rank == 1 or None))
    disagree_about("drop", lambda net: step_with(sgd(net), net, bad_micro_batch="drop" if rank else "skip_window"))
    disagree_about("kind", lambda net: step_with(sgd(net), net, parallel=HSDP() if rank else DataParallel()))
    disagree_about(
        "cell", lambda net: (Accumulator if rank else TrainOneStepCell)(nn.WithLossCell(net, nn.MSELoss()), sgd(net))
    )
    disagree_about("layers", lambda net: step_with(sgd(net), nn.SequentialCell(net, nn.Dense(3, 3 + rank))))
    disagree_about("frozen", train_half_frozen)
    disagree_about("last_window", lambda net: train_unlike(net, last_window="drop" if rank else "apply"))
    with TemporaryDirectory() as folder:
        own = StateCheckpoint(folder)
        disagree_about("states", lambda net: train_unlike(net, callbacks=[own] if rank else []))
        disagree_about("averages", lambda net: train_unlike(net, callbacks=[own, EMA(0.5)] if rank else [own]))
        each = StateCheckpoint(folder, save_checkpoint_steps=1 + rank)
        disagree_about("steps", lambda net: train_unlike(net, callbacks=[each]))
    disagree_about("cast", cast_on_one_rank)
    disagree_about("epoch", lambda net: train_unlike(net, 1 + rank))


def agree_although_unlike():
    """A rank may know its number, and have counted its updates."""
    network = build_network()
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    optimizer.rank_id = network.shard = rank
    optimizer.global_step.set_data(Tensor([3 * (1 - rank)], ms.int32))
    step_with(optimizer, network)
    results["agreed"] = int(optimizer.global_step.asnumpy()[0])


def send_every_bit():
    """Parameters of all dtypes and sizes, with NaN of different bits, arrive as rank 0 has them; so do large counts."""
    random = np.random.default_rng(rank)
    bits = [random.integers(0, 256, size, np.uint8) for size in (12, 6, 5, 24, 16, 2)]
    dtypes = [np.float32, np.float16, np.uint8, np.int64, np.float64, np.float16]
    values = [part.view(dtype) for part, dtype in zip(bits, dtypes)] + [np.arange(5) % 2 == rank]
    values[0][0] = np.array([0x7F812345 + rank], np.uint32).view(np.float32)[0]
    values[0][1:] = np.array([0xFFC00001 + rank, 0x80000000], np.uint32).view(np.float32)
    values.append(np.array(1.5 + rank, np.float32))
    parameters = [Parameter(Tensor(value), f"p{i}", requires_grad=False) for i, value in enumerate(values)]
    results["differ"] = [bool(world.differing_ranks(parameters))]
    world.broadcast_parameters(parameters)
    results["differ"].append(bool(world.differing_ranks(parameters)))
    results["bits"] = [each.asnumpy().tobytes().hex() for each in parameters]
    results["shapes"] = [each.shape == value.shape for each, value in zip(parameters, values)]
    results["own bits"] = [value.tobytes().hex() for value in values]
    results["counts"] = world.gather_counts("counts", 2**24 + 1 + rank)


class Drawn(nn.Cell):
    """A layer with a buffer and a tensor that each rank draws, as random features are."""

    def __init__(self, buffer, constant):
        super().__init__()
        self.layer = nn.Dense(3, 3, "ones", "zeros")
        self.register_buffer("buffer", Tensor(np.full(3, 1.0 + buffer, np.float32)), persistent=False)
        self.constant, self.number = Tensor(np.full(3, 1.0 + constant, np.float32)), Tensor(rank)

    def construct(self, x):
        return self.layer(x * self.buffer + self.constant)


def draw_tensors():
    for what in ("nothing", "buffer", "constant"):
        network = Drawn(rank if what == "buffer" else 0, rank if what == "constant" else 0)
        with noting(f"drawn {what}"):
            step_with(sgd(network), network)
        results[f"drawn {what}"] = network.buffer.asnumpy().tolist(), network.constant.asnumpy().tolist()


class Experts(nn.Cell):
    """A mixture of two experts, of which each rank has one, for the rows of both; a gate that both have."""

    def __init__(self, name, is_marked):
        super().__init__()
        gate, *experts = np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32)
        self.gate = Parameter(Tensor(gate[:, :2]), "gate")
        self.expert = Parameter(Tensor(experts[rank]), name, layerwise_parallel=is_marked)
        self.gather, self.add_up = ops.AllGather(), ops.AllReduce()

    def construct(self, x):
        rows, everyone = x.shape[0], self.gather(x)
        share = ops.softmax(ops.matmul(everyone, self.gate))[:, rank : rank + 1]
        return self.add_up(ops.matmul(everyone, self.expert) * share)[rank * rows : rank * rows + rows]


def have_experts_of_their_own():
    """Each way to write experts that only one rank has, in both modes; the values stay as they are."""
    for what, name, is_marked in (
        ("named", f"expert{rank}", False),
        ("alike", "expert", False),
        ("marked", "expert", True),
    ):
        network = Experts(name, is_marked)
        before = network.expert.asnumpy().copy()
        try:
            step_with(sgd(network), network)
        except ValueError as error:
            results[f"experts {what}"] = str(error), bool((network.expert.asnumpy() == before).all())


class Failure(Exception):
    """An error of one rank."""


class Fails:
    """Raises on rank 1 where an event of one batch has a name."""

    def __init__(self, batch, name, micro_batch=None):
        self.batch, self.name, self.micro_batch = batch, name, micro_batch

    def _fail(self, name, event):
        if rank and (event.batch, name, event.micro_batch) == (self.batch, self.name, self.micro_batch):
            raise Failure("of this rank")

    def on_micro_batch_begin(self, event):
        self._fail("begin", event)

    def on_micro_batch_end(self, event):
        self._fail("end", event)

    def on_update_begin(self, event):
        self._fail("update", event)


@contextmanager
def noting(key):
    """Note what is warned of, and the errors that the program catches."""
    errors = results[f"errors {key}"] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield errors
    results[f"warnings {key}"] = [text for each in caught if "ranks" in (text := str(each.message))]


# The batch that fails, where, and whether the window has rows of it: windows have two batches of three micro batches.
FAILURES = {
    "first micro batch": (1, "begin", 0),
    "mid-batch": (1, "begin", 2),
    "last micro batch": (2, "end", 2),
    "update": (2, "update", None),
}


def train_on_after_an_error(kind, failure):
    """Two windows of two batches; in the first one rank 1 catches an error and goes on."""
    network, step = build_step(
        "Momentum", accumulation_steps=2, parallel=KINDS[kind], check_loss=kind == "data parallel"
    )
    step.add_callback(Fails(*FAILURES[failure]))
    key, ended = f"{kind}, {failure}", []
    with noting(key) as errors:
        for number in range(4):
            try:
                output = step(*[Tensor(array) for array in share(batch(number), rank, 2)])
                ended.append(output.ends_window)
            except Failure as error:
                errors.append(str(error))
    results[key] = [weights_of(network), step.events.updates, step.events.skipped_updates, step.open_batches(), ended]


def give_one_batch_wrong():
    """Rank 1 hands over a batch without its labels: nothing of it was added, and the window is that of the rest."""
    network, step = build_step("Momentum", accumulation_steps=2, check_loss=True)
    with noting("wrong batch") as errors:
        for number in range(2):
            inputs = [Tensor(array) for array in share(batch(number), rank, 2)]
            try:
                step(*inputs[: 1 if rank and number == 1 else 2])
            except TypeError as error:
                errors.append(str(error))
    results["wrong batch"] = [weights_of(network), step.events.updates, step.events.skipped_updates]


def loop_on_after_an_error(kind, place):
    """The same in a hand-written loop; an error can also be the program's own, before or after the backward pass."""
    network = build_network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 3)
    settings = {"parallel": KINDS[kind], "check_loss": kind == "data parallel"}
    accumulator = Accumulator(loss_cell, optimizer, 2, **settings)
    accumulator.add_callback(Fails(place[0], "begin", 1) if place[1] == "inside" else Fails(0, ""))
    key = f"loop {kind}, {place[1]} {place[0]}"
    with noting(key) as errors:
        for number in range(4):
            here = rank and number + 1 == place[0]
            try:
                with accumulator.accumulate():
                    if here and place[1] == "before":
                        raise Failure("of this rank")
                    accumulator.backward(*[Tensor(array) for array in share(batch(number), rank, 2)])
                    if here and place[1] == "after":
                        raise Failure("of this rank")
                    accumulator.step()
            except Failure as error:
                errors.append(str(error))
    results[key] = [weights_of(network), accumulator.driver.updates]


def read_the_same_data(key, number, **settings):
    """One window of one batch, and one more."""
    _, step = build_step(check_loss=True, **settings)
    with noting(f"data {key}"):
        if key == "sunk":
            # As a Model does before a graph takes the batches by itself.
            step.body.measure_loss(tuple(Tensor(array) for array in batch(number)))
        for _ in range(2):
            step(*[Tensor(array) for array in batch(number)])
        if key == "joined":
            step.join()


class MaskedMean(nn.Cell):
    """A mean over the rows that a mask leaves, which is one over all rows where it leaves all."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y, mask):
        return (ops.square(self.network(x) - y).mean(-1) * mask).sum() / mask.sum()


def find_alone():
    """Rank 0 alone measures a loss that parts train otherwise, and measures no more; rank 1 goes on."""
    for check_loss in (True, False):
        network = build_network()
        step = TrainOneStepCell(GradAccumulation(MaskedMean(network), 2), sgd(network), check_loss=check_loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(4):
                x, y = share(batch(number), rank, 2)
                mask = np.ones(len(x), np.float32)
                mask[0] = rank
                step(Tensor(x), Tensor(y), Tensor(mask))
        found = ["is not the mean of their losses" in str(each.message) for each in caught]
        results[f"found {check_loss}"] = [sum(found), weights_of(network)]


def begin_without_a_batch():
    _, step = build_step(check_loss=True)
    with noting("data none"):
        step(*[Tensor(array) for array in batch(0)]) if rank else step.join()


def other_momentum(parameters):
    return experimental.SGD(parameters, 0.1, momentum=0.9 - 0.1 * rank)


def other_schedule(parameters):
    return nn.SGD(parameters, nn.ExponentialDecayLR(0.1, 0.5 + 0.1 * rank, 1))


def hold_the_momentum_in_a_parameter():
    network = build_network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9 - 0.1 * rank)
    with noting("momentum held"):
        TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
    results["momentum held"] = float(optimizer.momentum.asnumpy())


def one_optimizer(parameters):
    return experimental.SGD(parameters, 0.1)


def train_apart(key, window, changes, parallel="auto", loops=False, make=one_optimizer):
    """Rank 1 alone changes something before one of five windows; the error of each rank, and what it is told."""
    network, results[f"apart {key}"] = build_network(), []
    optimizer = make(network.trainable_params())
    build = Accumulator if loops else TrainOneStepCell
    step = build(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2), optimizer, parallel=parallel)
    with noting(f"apart {key}") as errors:
        for number in range(5):
            if rank and number == window:
                changes(network, optimizer)
            inputs = [Tensor(array) for array in share(batch(number), rank, 2)]
            try:
                if loops:
                    step.backward(*inputs)
                    step.clip_grad_norm(1.0)
                    step.step()
                else:
                    step(*inputs)
            except RuntimeError as error:
                errors.append(str(error))
        try:
            step.flush()
        except RuntimeError as error:
            errors.append(str(error))


def average_alone():
    """Rank 1 alone has averages."""
    network, step = build_step()
    before = weights_of(network)
    if rank:
        step.add_callback(EMA(0.5))
    with noting("averages alone") as errors:
        try:
            step(*[Tensor(array) for array in share(batch(0), rank, 2)])
        except RuntimeError as error:
            errors.append(str(error))
    results["averages alone"] = before == weights_of(network)


def do_different_things():
    """The ranks are one message apart; then they do the same again."""
    found = results["apart by a message"] = {}
    with TemporaryDirectory() as folder:
        for kind in ("data parallel", "level2"):
            _, step = build_step("Momentum", accumulation_steps=2, parallel=KINDS[kind])
            calls = {
                "saves a state": lambda step=step: save_state(step, folder),
                "loads a state": lambda step=step: load_state(step, folder),
                "flushes its window": step.flush,
                "builds a training step": build_step,
            }
            if kind == "level2":
                inputs = [Tensor(array) for array in share(batch(0), rank, 2)]
                calls["begins a batch"] = lambda step=step, inputs=inputs: step(*inputs)
            for pair in itertools.pairwise([*calls, "saves a state"]):
                try:
                    calls[pair[rank]]()
                except RuntimeError as error:
                    found[f"{kind}: rank 0 {pair[0]} and rank 1 {pair[1]}"] = str(error)
            output = [step(*[Tensor(array) for array in share(batch(n), rank, 2)]) for n in range(2)][-1]
            found[f"{kind}: trains"] = bool(output.updated.asnumpy())


def train_two_apart(key):
    """Two networks in a loop; rank 1 has other weights, and its data end early."""
    losses = [nn.WithLossCell(build_network(), nn.MSELoss()) for _ in range(2)]
    accumulator = Accumulator(losses, [nn.SGD(loss.trainable_params(), 0.1) for loss in losses], 2)
    if rank:
        load_last_layer(losses[0].backbone_network, None)
    data = [[Tensor(array) for array in share(batch(number), rank, 2)] for number in range(2 - rank)]
    with noting(f"apart {key}") as errors:
        try:
            for inputs in accumulator.prepare(data):
                with accumulator.accumulate():
                    for loss in losses:
                        accumulator.backward(*inputs, network=loss)
                    accumulator.step()
        except RuntimeError as error:
            errors.append(str(error))


def load_last_layer(network, optimizer):
    network[-1].bias.set_data(Tensor(np.array([1.0, 2.0, 3.0], np.float32)))


def give_gradients(key, number, mean=None, scale=1.0, parallel="auto"):
    """Two windows of gradients of the caller, who may have reduced them."""
    network = build_network()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, parallel=parallel)
    reduce = (lambda grads: grads) if mean is None else nn.DistributedGradReducer(optimizer.parameters, mean)
    forward = nn.WithLossCell(network, nn.MSELoss())
    with noting(f"gradients {key}"):
        for _ in range(2):
            inputs = [Tensor(array[: 3 + rank]) for array in batch(number)]
            grads = ops.grad(forward, None, optimizer.parameters)(*inputs)
            reduction = "mean" if parallel == "auto" else "sum"
            accumulator(reduce(tuple(grad * scale for grad in grads)), 3 + rank, reduction=reduction)


class ReducingSGD(nn.SGD):
    """An optimizer for a step that reduces nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.all_reduce = ops.AllReduce()

    def construct(self, grads):
        return super().construct(tuple(self.all_reduce(grad) / 2 for grad in grads))


def reduce_once_more(key, optimizer=nn.SGD, hook=None):
    """One update by a loop whose optimizer is prepared, and has been in another loop before."""
    network = build_network()
    optimizer = optimizer(network.trainable_params())
    if hook is not None:
        network[0].weight.register_hook(hook)
    with noting(f"reduced {key}"):
        for _ in range(2):
            accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer)
            accumulator.prepare(optimizer)
        accumulator.backward(*(Tensor(array) for array in share(batch(0), rank, 2)))
        optimizer.step()


class Stops(ms.Callback):
    """Stops rank 1 alone, after its first pass."""

    def on_train_epoch_end(self, run_context):
        if rank:
            run_context.request_stop()


def stop_alone():
    network = build_network()
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
    data = NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2)
    with noting("stop"):
        model.train(3, data, callbacks=[Stops()], dataset_sink_mode=False)
    results["stop"] = [weights_of(network), model.train_network.events.updates, -(-len(uneven_data(rank)[0]) // 2)]


class AsksForExit(ms.Callback):
    """Asks this rank to exit, in the fourth step on rank 0 and in the fifth one on rank 1, and counts the steps."""

    def __init__(self, path):
        super().__init__()
        self.path, self.steps = Path(path), 0

    def on_train_step_begin(self, run_context):
        self.steps = run_context.original_args().cur_step_num
        if self.steps == 4 + rank:
            self.path.write_text('{"GracefulExit": 1}')


def exit_together():
    """Three passes of three steps, in the last of which only rank 0 has a batch."""
    handler = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ, MS_ENABLE_GRACEFUL_EXIT="1"), TemporaryDirectory() as folder:
        network, path = build_network(), f"{folder}/exit.json"
        model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
        asks, exits = AsksForExit(path), OnRequestExit(False, False, config_file=path)
        data = NumpySlicesDataset(tuple(uneven_data(rank)), shuffle=False).batch(2)
        model.train(3, data, callbacks=[asks, exits])
    signal.signal(signal.SIGTERM, handler)
    results["exit"] = [asks.steps, model.train_network.events.updates, weights_of(network)]


def meet_what_is_not_finite():
    """The rows of rank 1 have a NaN, in a parameter of which each rank keeps a shard."""
    for kind in ("data parallel", "level2"):
        _, step = build_step("Momentum", parallel=KINDS[kind])
        with noting(f"not finite {kind}"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                x, y = share(batch(number), rank, 2)
                x[0, 0] = np.nan if rank else x[0, 0]
                step(Tensor(x), Tensor(y))
        results[f"not finite {kind}"] = [text for each in caught if "norm" in (text := str(each.message))]


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    disagree_about_what_trains()
    agree_although_unlike()
    send_every_bit()
    draw_tensors()
    have_experts_of_their_own()
    with eagerly():
        for kind in KINDS:
            train_on_after_an_error(kind, "mid-batch")
        for kind in APART:
            for failure in ("first micro batch", "last micro batch", "update"):
                train_on_after_an_error(kind, failure)
            for place in ((1, "before"), (1, "inside"), (2, "after")):
                loop_on_after_an_error(kind, place)
        give_one_batch_wrong()
        read_the_same_data("same", 0)
        read_the_same_data("other", rank)
        read_the_same_data("sunk", 0)
        read_the_same_data("joined", 0, accumulation_steps=3)
        begin_without_a_batch()
        average_alone()
        do_different_things()
        meet_what_is_not_finite()
        for key, parallel in (("loaded", "auto"), ("loaded, level1", HSDP(threshold=0)), ("loaded, loop", "auto")):
            train_apart(key, 0, load_last_layer, parallel, loops="loop" in key)
        train_two_apart("loaded, loop of two, joined")
        train_apart("loaded late", 2, load_last_layer)
        train_apart("loaded last", 4, load_last_layer)
        train_apart("rate", 2, lambda _, optimizer: ops.assign(optimizer.lrs[0], Tensor(0.05, ms.float32)))
        hold_the_momentum_in_a_parameter()
        find_alone()
        train_apart("momentum", -1, None, make=other_momentum)
        train_apart("schedule", -1, None, make=other_schedule)
        train_apart("alike", 0, lambda *_: None, HSDP(threshold=0))
        exit_together()
        all_reduce = ops.AllReduce()
        reduce_once_more("by optimizer", ReducingSGD)
        reduce_once_more("by hook", hook=lambda grad: all_reduce(grad) / 2)
        reduce_once_more("not", hook=lambda grad: grad * 2)
        give_gradients("own", rank)
        give_gradients("mean", rank, mean=True)
        give_gradients("sum", rank, mean=False)
        give_gradients("declared", rank, mean=False, parallel=Reduced())
        for scale in (0.0, math.nan):
            give_gradients(f"of {scale}", rank, scale=scale)
        stop_alone()
    report(rank, results)
