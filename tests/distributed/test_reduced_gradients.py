"""Networks whose hooks reduce their gradients, on two and four processes, against one process on all rows.

The stand-in has the protocol of HyperParallel's hsdp, which `clients/hyper_parallel_ranks.py` runs itself.
"""

import functools
import os
from unittest import mock

import mindspore as ms
import numpy as np
from described_messages import described, sizes_sent
from linear_toy import mse, sgd
from mindspore import Tensor, nn
from open_window import reducer_of
from ranks import RANK, SIZE, assert_same, on_ranks, own_share, states
from reducing_network import Scheduler, build_layers, gradients, reduce_itself, whole_weights
from refusal import refuses
from scenarios import OPTIMIZERS, batch, close, joined, scaled_by, train_clipped, weights_of

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


def adam(network):
    return OPTIMIZERS["Adam"](network.trainable_params())


def options_of(level, accumulates):
    """The options of a network; level 0 has whole parameters."""
    return {"level": level, "shard_size": 1 if level == 0 else min(SIZE, 2), "accumulates": accumulates}


PLAIN = options_of(1, False)


def build(steps, clip=None, parallel="auto", **options):
    network = reduce_itself(build_layers(), **options)
    return network, Accumulator(mse(network), adam(network), steps, clip=clip, parallel=parallel)


def train(network, accumulator, steps, windows=2, first=0, evaluates=False):
    for number in range(first, first + steps * windows):
        with accumulator.accumulate():
            accumulator.backward(*own_share(number))
            if evaluates:
                network(own_share(0)[0])
            output = accumulator.step()
            if evaluates:
                network(own_share(0)[0])
            accumulator.zero_grad()
    return output


@functools.cache
def whole(steps, limit=np.inf, windows=2):
    """MindSpore's optimizer on the gradient of all rows of each window: weights, last loss, norm and weight."""
    network = build_layers()
    batches = [joined(*map(batch, range(i * steps, (i + 1) * steps))) for i in range(windows)]
    clip = scaled_by(lambda norm: min(1.0, limit / norm))
    loss, norm, _ = train_clipped(mse(network), adam(network), batches, clip)[-1]
    return weights_of(network), loss, norm, len(batches[-1][0])


def check(network, output, expected):
    weights, numbers = whole_weights(network), [float(each.asnumpy()) for each in (output.loss, output.grad_norm)]
    assert_same([weights, numbers])
    close(weights, expected[0])
    np.testing.assert_allclose([*numbers, float(output.weight)], expected[1:], rtol=2e-5)


# The level and the batches of a window, and whether the network can wait for the end of the window.
ON_TWO = [(0, 3, True), (1, 1, False), (1, 2, True), (1, 4, False), (2, 3, False), (2, 3, True), (3, 3, False)]
ON_TWO += [(0, 3, False), (3, 3, True)]
ON_FOUR = [(0, 1, True), (1, 2, False), (2, 3, True), (2, 3, False), (3, 2, True)]


def train_level(level, steps, accumulates):
    network, accumulator = build(steps, ClipByGlobalNorm(0.5), **options_of(level, accumulates))
    output = train(network, accumulator, steps)
    sent = [network.hsdp_scheduler.sent.count(what) for what in ("gather", "reduce")]
    expected = whole(steps, limit=0.5)
    assert expected[2] > 0.5  # It clips.
    check(network, output, expected)
    # In two windows; level3 gathers for the backward pass, too.
    parameters, shards, passes = 6, 0 if level == 0 else 4, 2 * steps
    if not accumulates:
        assert sent == [shards * passes * (2 if level == 3 else 1), parameters * passes]
        return
    gathers = shards * (passes * 2 if level == 3 else 2)
    fully = level > 1 and SIZE == 2
    assert sent == [gathers, (shards * passes if fully else shards * 2) + (parameters - shards) * 2]


test_gradients_that_come_reduced_train_like_one_process = on_ranks(2, cases=ON_TWO)(train_level)
test_on_four_they_do = on_ranks(4, cases=ON_FOUR)(train_level)


@on_ranks(2, 4, cases=[("sum", False), ("mean", True)])
def test_gradients_of_the_callers_own_are_not_added_up_again(reduction, accumulates):
    network, accumulator = build(2, **options_of(1, accumulates))
    loss_fn = nn.MSELoss(reduction)
    for number in range(4):
        x, y = own_share(number) if reduction == "sum" else [Tensor(each[RANK::SIZE]) for each in batch(number)]
        with accumulator.accumulate():
            loss, grads = gradients(network, loss_fn, x, y)
            weight = y.size if reduction == "sum" else len(x)
            output = accumulator(grads, weight, loss, reduction=reduction)
    weights, loss, norm, rows = whole(2)
    # A sum over all numbers has the numbers for its weight.
    check(network, output, (weights, loss, norm, rows * (3 if reduction == "sum" else 1)))


@on_ranks(2, 4, cases=["mean", "scale"])
def test_a_mean_over_ranks_and_a_scale_of_the_network_are_undone(name):
    network = reduce_itself(build_layers(), scale=1.0 / SIZE if name == "mean" else 0.125)
    scheduler = network.hsdp_scheduler
    parallel = "auto"
    if name == "mean":
        # Nobody knows the mean but the caller.
        parallel = Reduced(mean=True)
        del network.hsdp_scheduler
    loss_cell = GradAccumulation(mse(network), 1)
    step = TrainOneStepCell(loss_cell, adam(network), accumulation_steps=2, parallel=parallel)
    for number in range(4):
        output = step(*own_share(number))
    network.hsdp_scheduler = scheduler
    check(network, output, whole(2))


@on_ranks(2, 4)
def test_the_ranks_send_scalars_alone():
    network, accumulator = build(3, ClipByGlobalNorm(0.5), **options_of(2, False))
    reducer = reducer_of(accumulator)
    sizes = sizes_sent(reducer)
    counts, gather = [], reduced.gather_counts
    # The first update also compares the weights.
    train(network, accumulator, 3, 1)
    del sizes[:]
    with mock.patch.object(reduced, "gather_counts", lambda doing, count: counts.append(count) or gather(doing, count)):
        train(network, accumulator, 3, 1, first=3)
    planned = [(each.operator, each.nbytes) for each in described(reducer).of_window(3, 3)]
    # Loss and weight, the squares of six gradients; and before each batch the number of its micro batches.
    assert (sizes, counts) == ([2, 6], [1, 1, 1])
    assert planned == [("AllGather", 16)] * 3 + [("AllReduce", 8), ("AllReduce", 24)]


@on_ranks(2, 4, cases=[(0, False), (1, False), (2, False), (2, True), (3, False)])
def test_each_rank_goes_on_with_its_shards(level, accumulates):
    place = states() / f"of{SIZE}" / f"level{level}_{accumulates}"
    network, accumulator = build(2, **options_of(level, accumulates))
    batches = 2 if accumulates else 3
    # A forward pass without a backward pass leaves whole parameters.
    train(network, accumulator, 1, batches, evaluates=True)
    save_state(accumulator, place)
    train(network, accumulator, 1, 4 - batches, first=batches)
    again, accumulator = build(2, **options_of(level, accumulates))
    load_state(accumulator, place)
    train(again, accumulator, 1, 4 - batches, first=batches)
    straight = whole_weights(network)
    assert straight == whole_weights(again)
    close(straight, whole(2)[0])


@on_ranks(4)
def test_the_shards_of_two_ranks_are_not_those_of_four():
    _, accumulator = build(2, **options_of(2, False))
    with refuses(ValueError, "has the network's shards of 2 processes, not 4. Use as many"):
        load_state(accumulator, states() / "of2" / "level2_False")


@on_ranks(2, 4, cases=[1, 2, 3])
def test_averages_are_those_of_the_shards_although_an_evaluation_makes_whole_parameters(level):
    network, accumulator = build(1, **options_of(level, False))
    ema = EMA(0.75, warmup_updates=0)
    accumulator.add_callback(ema)
    expected = np.array(whole_weights(network))
    for number in range(2):
        train(network, accumulator, 1, 1, first=number, evaluates=True)
        with ema.swapped():
            network(own_share(0)[0])
        expected = 0.75 * expected + 0.25 * np.array(whole_weights(network))
    with ema.swapped():
        averages = whole_weights(network)
    close(averages, expected)
    assert not np.allclose(averages, whole(1)[0], atol=1e-4)


# What cannot be right.
LATE = "hsdp() must come before the optimizer and the training step, but got it afterwards."
UNEVEN = "must have equally many micro batches on all ranks"


@on_ranks(2, 4)
def test_what_cannot_be_right_is_refused_when_it_is_built():
    with refuses(ValueError, "the argument 'parallel' must be 'auto' for a network that reduces its gradients itself"):
        build(2, parallel=DataParallel(), **PLAIN)
    with refuses(ValueError, "must be 'auto' for a network of hsdp(), but got Reduced(mean=True"):
        build(2, parallel=Reduced(mean=True), **PLAIN)
    cell = nn.SequentialCell(reduce_itself(build_layers(), **PLAIN), nn.Dense(3, 2))
    with refuses(ValueError, "but got '1.weight' without a hook for it. Give the whole network to hsdp()."):
        Accumulator(cell, sgd(cell, 0.1))
    network = build_layers()
    optimizer = adam(network)
    reduce_itself(network, 1, 2)
    state = "but got the state 'moment1.0.weight' of shape (8, 6). Build it"
    with refuses(ValueError, "must be built from the network's shards", state):
        Accumulator(mse(network), optimizer)
    network = reduce_itself(build_layers(), **PLAIN)
    with refuses(ValueError, "the argument 'bad_micro_batch' must be 'skip_window' for a network that reduces"):
        TrainOneStepCell(mse(network), adam(network), bad_micro_batch="drop")
    with refuses(ValueError, "the argument 'mixed_precision' must be None or a loss scale for a network that reduces"):
        TrainOneStepCell(mse(network), adam(network), mixed_precision="fp16")
    with refuses(ValueError, "the argument 'compile' must be None for a network that reduces"):
        TrainOneStepCell(mse(network), adam(network), compile=True)
    network = build_layers()
    network.hsdp_scheduler = mock.Mock(spec=["set_requires_grad_sync"])
    with refuses((TypeError, ValueError), "must come from hsdp(), but got a Mock"):
        Accumulator(network, sgd(network, 0.1))
    ms.set_context(mode=ms.GRAPH_MODE)
    with mock.patch.dict(os.environ, MS_JIT="1"), refuses(ValueError, "but got a graph, which calls no hooks."):
        build(2, **PLAIN)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    error = RuntimeError("The kernel InplaceZero unregistered.")
    with mock.patch.object(Scheduler, "zero_grads", side_effect=error):
        what = "must accumulate its gradients with operators of this device, but got The kernel"
        with refuses((ValueError, RuntimeError), what):
            build(2, **options_of(1, True))


@on_ranks(2, 4, cases=[1, 2])
def test_a_network_that_reduces_afterwards_is_refused(shard_size):
    network = build_layers()
    accumulator = Accumulator(mse(network), adam(network))
    grads = gradients(network, nn.MSELoss(), *own_share(0))[1]
    reduce_itself(network, 1, shard_size)
    with refuses((ValueError, RuntimeError), LATE):
        accumulator.backward(*own_share(0))
    with refuses((ValueError, RuntimeError), LATE):
        accumulator(grads, 2)


@on_ranks(2, 4)
def test_what_a_network_that_waits_must_know_beforehand_is_refused():
    x, y = own_share(0)
    network, accumulator = build(2, **PLAIN)
    loss, grads = gradients(network, nn.MSELoss(), x, y)
    accumulator(grads, len(x), loss)
    loss, grads = gradients(network, nn.MSELoss(), x, y)
    with refuses(ValueError, "the argument 'weight' must be the same for all batches of a window"):
        accumulator(grads, len(x), loss)
    network, accumulator = build(2, **options_of(1, True))
    taken = "but got gradients that were taken outside accumulate()."
    with refuses((ValueError, RuntimeError), "must know it beforehand", taken):
        accumulator(grads, len(x), loss)
    with accumulator.accumulate():
        accumulator.backward(x, y)
    with refuses((ValueError, RuntimeError), "must be saved right after an update, but got an open window"):
        save_state(accumulator, states() / "refused")
    with refuses((ValueError, RuntimeError), "must know it beforehand, but got the end of one in its middle."):
        accumulator.flush()


@on_ranks(2, 4)
def test_ranks_with_other_numbers_of_micro_batches_are_refused():
    x, y = own_share(0)
    network, _ = build(1, **PLAIN)
    step = TrainOneStepCell(GradAccumulation(mse(network), 2), adam(network))
    rows = 1 if RANK == 0 else 2
    with refuses((ValueError, RuntimeError), UNEVEN):
        step(x[:rows], y[:rows])
    _, accumulator = build(1, **PLAIN)
    rows = 0 if RANK == 0 else 2
    sentence = UNEVEN if RANK else "a batch must have at least one row, but got 0 in input[1]. Skip it or, if other"
    with refuses((ValueError, RuntimeError), sentence, *["got [0, 1"] * RANK):
        accumulator.backward(x[:rows], y[:rows])
    with refuses((ValueError, RuntimeError), UNEVEN):
        accumulator.backward(x, y) if RANK else accumulator.join()


@on_ranks(2, 4)
def test_a_network_that_was_said_to_reduce_its_gradients_but_does_not_is_found():
    network = build_layers()
    step = TrainOneStepCell(mse(network), adam(network), parallel=Reduced())
    with refuses(RuntimeError, "the ranks must have the same weights after an update, but ranks [1"):
        step(*own_share(0))
