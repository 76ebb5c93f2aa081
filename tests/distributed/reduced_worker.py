"""A process of `test_reduced_gradients.py`: train networks that reduce their gradients themselves."""

import os
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
from described_messages import described, sizes_sent
from launch import meet, report, run_scenarios
from mindspore import Tensor, nn, ops
from open_window import reducer_of
from reducing_network import RESUMED, TRAININGS, WRONG, Scheduler, build_layers, gradients, reduce_itself, whole_weights
from scenarios import OPTIMIZERS, batch, share

from ms_gradaccum import (
    EMA,
    Accumulator,
    ClipByGlobalNorm,
    DataParallel,
    GradAccumulation,
    Reduced,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum.parallel import reduced

rank, size = meet(eager=True)
STATES = Path(os.environ["STATES"]) / f"of{size}"
results = {}


def mine(number):
    return [Tensor(array) for array in share(batch(number), rank, size)]


def build(steps, clip=None, tokens=False, parallel="auto", **options):
    network = reduce_itself(build_layers(), **options)
    optimizer = OPTIMIZERS["Adam"](network.trainable_params())
    cell = SumAndRows(network) if tokens else nn.WithLossCell(network, nn.MSELoss())
    return network, Accumulator(cell, optimizer, steps, clip=clip, parallel=parallel)


class SumAndRows(nn.Cell):
    """A weighted loss: rows whose first label is negative count thrice, as sentences of more tokens do."""

    returns_weight = True

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y):
        weights = ops.where(y[:, 0] < 0, 3.0, 1.0)
        return (weights * ((self.network(x) - y) ** 2).mean(1)).sum(), weights.sum()


def train(network, accumulator, steps, windows=2, first=0, evaluates=False):
    for number in range(first, first + steps * windows):
        with accumulator.accumulate():
            accumulator.backward(*mine(number))
            if evaluates:
                network(mine(0)[0])
            output = accumulator.step()
            if evaluates:
                network(mine(0)[0])
            accumulator.zero_grad()
    return output


def row(network, output):
    return [whole_weights(network), *(float(each.asnumpy()) for each in (output.loss, output.grad_norm, output.weight))]


def options_of(level, accumulates):
    return {"level": level, "shard_size": 1 if level == 0 else min(size, 2), "accumulates": accumulates}


def train_levels():
    for accumulates in (False, True):
        for level, steps in TRAININGS[size]:
            network, accumulator = build(steps, ClipByGlobalNorm(0.5), **options_of(level, accumulates))
            output = train(network, accumulator, steps)
            key = f"level{level} {accumulates} {steps}"
            results[f"{key} sent"] = [network.hsdp_scheduler.sent.count(what) for what in ("gather", "reduce")]
            results[key] = row(network, output)


def train_tokens():
    for accumulates in (False, True):
        network, accumulator = build(2, tokens=True, **options_of(2, accumulates))
        results[f"tokens {accumulates}"] = row(network, train(network, accumulator, 2))


def train_by_gradients():
    """The caller's own value_and_grad: sums, and means of batches of the same rows everywhere."""
    for accumulates in (False, True):
        for reduction in ("sum", "mean"):
            network, accumulator = build(2, **options_of(1, accumulates))
            loss_fn = nn.MSELoss(reduction)
            for number in range(4):
                x, y = mine(number) if reduction == "sum" else [Tensor(each[rank::size]) for each in batch(number)]
                with accumulator.accumulate():
                    loss, grads = gradients(network, loss_fn, x, y)
                    weight = y.size if reduction == "sum" else len(x)
                    output = accumulator(grads, weight, loss, reduction=reduction)
            results[f"{reduction} {accumulates}"] = row(network, output)


def train_step_and_scale():
    """A step with micro batches, means over the ranks, and a scale of the network's own."""
    for name, parallel, scale in (("mean", Reduced(mean=True), 1.0 / size), ("scale", "auto", 0.125)):
        network = reduce_itself(build_layers(), scale=scale)
        scheduler = network.hsdp_scheduler
        if name == "mean":
            # Nobody knows the mean but the caller.
            del network.hsdp_scheduler
        optimizer = OPTIMIZERS["Adam"](network.trainable_params())
        step = TrainOneStepCell(
            GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 1),
            optimizer,
            accumulation_steps=2,
            parallel=parallel,
        )
        for number in range(4):
            output = step(*mine(number))
        network.hsdp_scheduler = scheduler
        results[name] = row(network, output)


def train_wrongly():
    """As if nobody knew that the gradients are reduced: the errors, or numbers that are not right."""
    for level in WRONG[size]:
        for accumulates in (False, True):
            with mock.patch.object(reduced, "schedulers_of", lambda network: []):
                key = f"wrong level{level} {accumulates}"
                try:
                    network, accumulator = build(2, parallel=DataParallel(), **options_of(level, accumulates))
                    # Otherwise the shards of rank 0 would be everybody's.
                    results[key] = row(network, train(network, accumulator, 2))
                except Exception as error:
                    results[key] = str(error).splitlines()[0]


def count_messages():
    network, accumulator = build(3, ClipByGlobalNorm(0.5), **options_of(2, False))
    reducer = reducer_of(accumulator)
    sizes = sizes_sent(reducer)
    counts, gather = [], reduced.gather_counts
    # The first update also compares the weights.
    train(network, accumulator, 3, 1)
    del sizes[:]
    with mock.patch.object(reduced, "gather_counts", lambda doing, count: counts.append(count) or gather(doing, count)):
        train(network, accumulator, 3, 1, first=3)
    planned = described(reducer.layout).of_window(3, 3)
    results["messages"] = [sizes, counts, [[each.operator, each.nbytes] for each in planned]]


def save_and_go_on():
    for level, accumulates in RESUMED[size]:
        folder = STATES / f"level{level}_{accumulates}"
        network, accumulator = build(2, **options_of(level, accumulates))
        batches = 2 if accumulates else 3
        # A forward pass without a backward pass leaves whole parameters.
        train(network, accumulator, 1, batches, evaluates=True)
        save_state(accumulator, folder)
        train(network, accumulator, 1, 4 - batches, first=batches)
        again, accumulator = build(2, **options_of(level, accumulates))
        load_state(accumulator, folder)
        train(again, accumulator, 1, 4 - batches, first=batches)
        results[f"resumed level{level} {accumulates}"] = [whole_weights(network), whole_weights(again)]
    if size == 4:
        _, accumulator = build(2, **options_of(2, False))
        results["elastic"] = error_of(load_state, accumulator, STATES.parent / "of2" / "level2_False")


def average():
    """An EMA of two updates, evaluated in between; and what it should be."""
    for level in (1, 2, 3):
        network, accumulator = build(1, **options_of(level, False))
        ema = EMA(0.75, warmup_updates=0)
        accumulator.add_callback(ema)
        expected = np.array(whole_weights(network))
        for number in range(2):
            train(network, accumulator, 1, 1, first=number, evaluates=True)
            with ema.swapped():
                network(mine(0)[0])
            expected = 0.75 * expected + 0.25 * np.array(whole_weights(network))
        with ema.swapped():
            results[f"averages level{level}"] = [whole_weights(network), expected.tolist()]


def error_of(work, *args, **kwargs):
    try:
        work(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def be_refused():
    options = options_of(1, False)
    errors = {}
    errors["parallel"] = error_of(build, 2, parallel=DataParallel(), **options)
    errors["mean"] = error_of(build, 2, parallel=Reduced(mean=True), **options)
    for name, shard_size in (("late", 2), ("late, whole", 1)):
        network = build_layers()
        cell = nn.WithLossCell(network, nn.MSELoss())
        accumulator = Accumulator(cell, OPTIMIZERS["Adam"](network.trainable_params()))
        grads = gradients(network, nn.MSELoss(), *mine(0))[1]
        reduce_itself(network, 1, shard_size)
        errors[name] = error_of(accumulator.backward, *mine(0))
        errors[f"{name}, gradients"] = error_of(accumulator, grads, 2)
    network = reduce_itself(build_layers(), **options)
    head = nn.Dense(3, 2)
    cell = nn.SequentialCell(network, head)
    errors["outside"] = error_of(Accumulator, cell, nn.SGD(cell.trainable_params(), 0.1))
    network = build_layers()
    optimizer = OPTIMIZERS["Adam"](network.trainable_params())
    reduce_itself(network, 1, 2)
    errors["state"] = error_of(Accumulator, nn.WithLossCell(network, nn.MSELoss()), optimizer)
    network, accumulator = build(2, **options)
    x, y = mine(0)
    for _ in range(2):
        loss, grads = gradients(network, nn.MSELoss(), x, y)
        errors["weight"] = error_of(accumulator, grads, len(x), loss)
    network, accumulator = build(2, **options_of(1, True))
    errors["outside accumulate"] = error_of(accumulator, grads, len(x), loss)
    with accumulator.accumulate():
        accumulator.backward(x, y)
    errors["save"] = error_of(save_state, accumulator, STATES / "refused")
    errors["flush"] = error_of(accumulator.flush)
    cell = nn.WithLossCell(network, nn.MSELoss())
    for key, settings in (
        ("drop", {"bad_micro_batch": "drop"}),
        ("precision", {"mixed_precision": "fp16"}),
        ("compile", {"compile": True}),
    ):
        step = error_of(TrainOneStepCell, cell, OPTIMIZERS["Adam"](network.trainable_params()), **settings)
        errors[key] = step
    network = build_layers()
    network.hsdp_scheduler = mock.Mock(spec=["set_requires_grad_sync"])
    errors["fully_shard"] = error_of(Accumulator, network, nn.SGD(network.trainable_params(), 0.1))
    ms.set_context(mode=ms.GRAPH_MODE)
    with mock.patch.dict(os.environ, MS_JIT="1"):
        errors["graph"] = error_of(build, 2, **options)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    with mock.patch.object(Scheduler, "zero_grads", side_effect=RuntimeError("The kernel InplaceZero unregistered.")):
        errors["operators"] = error_of(build, 2, **options_of(1, True))
    network, accumulator = build(1, **options)
    cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    step = TrainOneStepCell(cell, OPTIMIZERS["Adam"](network.trainable_params()))
    rows = 1 if rank == 0 else 2
    errors["micro batches"] = error_of(step, x[:rows], y[:rows])
    network, accumulator = build(1, **options)
    rows = 0 if rank == 0 else 2
    errors["no rows"] = error_of(accumulator.backward, x[:rows], y[:rows])
    errors["joined"] = error_of(accumulator.backward, x, y) if rank else error_of(accumulator.join)
    # A network that was said to reduce its gradients, but does not.
    network = build_layers()
    cell, optimizer = nn.WithLossCell(network, nn.MSELoss()), OPTIMIZERS["Adam"](network.trainable_params())
    step = TrainOneStepCell(cell, optimizer, parallel=Reduced())
    errors["not reduced"] = error_of(step, x, y)
    results["errors"] = errors


run_scenarios(
    train_levels,
    train_tokens,
    train_by_gradients,
    train_step_and_scale,
    train_wrongly,
    count_messages,
    save_and_go_on,
    average,
    be_refused,
)
report(rank, results)
