"""Hand-written loops on two processes against one process on all rows."""

import functools
import itertools
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
import scenarios
from described_messages import sizes_sent
from linear_toy import momentum, mse, sgd
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from open_window import reducer_of
from quick_mindspore import eagerly
from ranks import RANK, on_ranks, own_data, own_share, states, told
from refusal import refuses
from scenarios import (
    BY_HAND,
    ONE_SHAPE,
    ROWS,
    batch,
    build_network,
    close,
    joined,
    stock_clipped,
    train_clipped,
    uneven_data,
    weights_of,
    whole_batches,
)

from ms_gradaccum import HSDP, AccumulationConfig, Accumulator

KINDS = {name: replace(kind, check_weights=True) for name, kind in scenarios.KINDS.items()}


def build_loop(steps=2, **settings):
    """A network and an Accumulator whose optimizer has a state."""
    network = build_network()
    return network, Accumulator(mse(network), momentum(network, 0.1), steps, check_loss=False, **settings)


def sgd_with_schedule(network):
    """An optimizer whose rate is halved after every second update."""
    optimizer = optim.SGD(network.trainable_params(), 0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, 2, 0.5)


@functools.cache
def trained_with_schedule(carries):
    """Weights and rate after windows of all rows: two epochs of batches of 2, 2 and 1 times two rows."""
    per_rank = [uneven_data(rank) for rank in range(2)]
    first, second, third = [joined(*([array[i : i + 2] for array in each] for each in per_rank)) for i in (0, 2, 4)]
    # The last batch belongs to rank 0 alone, and is a window of its own unless the window goes on in the next epoch.
    windows = [(first, second), (third, first), (second, third)] if carries else [(first, second), (third,)] * 2
    network = build_network()
    optimizer, scheduler = sgd_with_schedule(network)

    def batches():
        for window in windows:
            yield joined(*window)
            scheduler.step()

    train_clipped(mse(network), optimizer, batches(), BY_HAND["norm"])
    return weights_of(network), len(windows), float(optimizer.lrs[0].asnumpy())


@on_ranks(2, cases=[(name, carries) for name in ("data parallel", "level2") for carries in (False, True)])
def test_a_rank_that_runs_out_of_data_joins_with_its_clip_and_its_scheduler(name, carries):
    network = build_network()
    optimizer, scheduler = sgd_with_schedule(network)
    config = AccumulationConfig(2, sync_with_dataloader=not carries)
    accumulator = Accumulator(mse(network), optimizer, config=config, parallel=KINDS[name])
    loader, scheduler = accumulator.prepare(own_data(), scheduler)
    for _ in range(2):
        for each in loader:
            with accumulator.accumulate():
                accumulator.backward(*each)
                accumulator.clip_grad_norm(0.5)
                accumulator.step()
                scheduler.step()
                accumulator.zero_grad()
    weights, updates, rate = trained_with_schedule(carries)
    close(weights_of(network), weights)
    assert accumulator.driver.updates == updates
    np.testing.assert_allclose(optimizer.lrs[0].asnumpy(), rate)
    assert rate < 0.1


@on_ranks(2, cases=[*itertools.product(KINDS, ["loop"]), ("data parallel", "dataset"), ("data parallel", "nobody")])
def test_gradients_that_the_caller_took_count_by_their_rows_if_anybody_knows_these(kind, who_knows):
    """And they have a loss if the caller gives it."""
    network, accumulator = build_loop(parallel=KINDS[kind])
    grad_fn = ms.value_and_grad(mse(network), None, network.trainable_params())
    batches = [own_share(0), own_share(1, ONE_SHAPE)]
    with told("must have a weight") as said:
        for x, y in accumulator.prepare(batches) if who_knows == "dataset" else batches:
            loss, grads = grad_fn(x, y)
            known = (len(x), loss) if who_knows == "loop" else ()
            output = accumulator(grads, *known)
    weights, [[loss, *_]] = stock_clipped("Momentum", [joined(batch(0), batch(1))], lambda grads, norm: grads)
    if who_knows == "nobody":
        assert len(said) == 1 and "all batches and ranks count alike" in said[0]
        assert not np.allclose(weights_of(network), weights, rtol=1e-3)
        return
    close(weights_of(network), weights)
    assert said == [] and output.updated and output.weight == 24
    if who_knows == "loop":
        np.testing.assert_allclose(output.loss.asnumpy(), loss, rtol=1e-5)
    else:
        assert output.loss is None


@on_ranks(2)
def test_all_ranks_skip_what_one_cannot_use():
    network, accumulator = build_loop(steps=1)
    x, y = own_share(0)
    before = weights_of(network)
    accumulator.backward(x * (np.nan if RANK == 1 else 1), y)
    output = accumulator.step()
    assert output.overflow and not accumulator.updated and weights_of(network) == before
    accumulator.backward(x, y)
    accumulator.step()
    assert accumulator.updated and weights_of(network) != before


@on_ranks(2, compiled=True)
def test_two_networks_share_their_windows():
    first, second = build_network(), build_network()
    optimizers = [sgd(network, 0.1) for network in (first, second)]
    cells = [mse(network) for network in (first, second)]
    accumulator = Accumulator(cells, optimizers, 2)
    for number in (0, 1):
        x, y = own_share(number)
        with accumulator.accumulate():
            accumulator.backward(x, y, network=cells[0])
            accumulator.step(network=cells[0])
            accumulator.backward(x, first(x), network=cells[1])
            accumulator.step(network=cells[1])
    with eagerly():
        expected = adversaries()
    close([weights_of(first), weights_of(second)], expected)


def adversaries():
    """The same with MindSpore's own steps, on all rows."""
    first, second = build_network(), build_network()
    x, y = map(Tensor, joined(batch(0), batch(1)))
    early = first(x[:ROWS])
    nn.TrainOneStepCell(mse(first), sgd(first, 0.1))(x, y)
    targets = ops.concat((early, first(x[ROWS:])))
    nn.TrainOneStepCell(mse(second), sgd(second, 0.1))(x, targets)
    return [weights_of(first), weights_of(second)]


def train_loop(accumulator, numbers):
    for number in numbers:
        with accumulator.accumulate():
            accumulator.backward(*own_share(number))
            accumulator.step()


@on_ranks(2, cases=["level1", "level2"])
def test_a_checkpoint_of_any_rank_holds_the_whole_loop(name):
    network, accumulator = build_loop(parallel=KINDS[name])
    train_loop(accumulator, range(2))
    ms.save_checkpoint(accumulator, str(states() / f"{name}_{RANK}.ckpt"))
    close(weights_of(network), whole_batches("Momentum", ((0, 1),)))


@pytest.mark.parametrize("name", ["level1", "level2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_goes_on_from_it(rank, name, two, request, eager):
    network, accumulator = build_loop()
    path = str(request.getfixturevalue("states") / f"{name}_{rank}.ckpt")
    assert ms.load_param_into_net(accumulator, ms.load_checkpoint(path)) == ([], [])
    train_loop(accumulator, (2, 3))
    close(weights_of(network), whole_batches("Momentum", ((0, 1), (2, 3))))


@on_ranks(2)
def test_what_cannot_work_is_refused_on_all_ranks():
    network = build_network()
    cell, optimizer = mse(network), sgd(network, 0.1)
    with refuses(ValueError, "For 'Accumulator', the ranks must agree about 'config', but got Accumulation"):
        Accumulator(cell, optimizer, accumulation_steps=1 + RANK)
    with refuses(ValueError, "'parallel'", "sync_each_batch", "optimizer_level='level1'"):
        Accumulator(cell, optimizer, config=AccumulationConfig(sync_each_batch=True), parallel=HSDP())
    with refuses(TypeError, "'dataset'", "got generator"):
        Accumulator(cell, optimizer).prepare(part for part in ())


@on_ranks(2)
def test_sync_each_batch_sends_the_gradient_in_each_batch():
    """Messages of three batches and one update. The gradient has two elements, of which each rank keeps one."""
    network = nn.Dense(1, 2, has_bias=False)
    config = AccumulationConfig(3, sync_each_batch=True)
    loss_cell, optimizer = mse(network), sgd(network, 0.1)
    accumulator = Accumulator(loss_cell, optimizer, config=config)
    sizes = sizes_sent(reducer_of(accumulator.driver))
    for _ in range(3):
        with accumulator.accumulate():
            accumulator.backward(ops.ones((2, 1)), ops.ones((2, 2)))
            accumulator.step()
        sizes.append("batch")
    at_the_end = [2, 1, 1]  # Loss and weight, the norm, this rank's part of the mean gradient.
    assert sizes == [2, "batch", 2, "batch", 2, *at_the_end, "batch"]
