"""Hand-written loops on two processes against one process on all rows."""

import functools

import mindspore as ms
import numpy as np
import pytest
from described_messages import sizes_sent
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import StepLR
from open_window import reducer_of
from quick_mindspore import eagerly
from ranks import RANK, SIZE, on_ranks, own_share, states
from refusal import refuses
from scenarios import batch, build_network, joined, stock_clipped, uneven_data, weights_of, whole_batches

from ms_gradaccum import HSDP, AccumulationConfig, Accumulator, DataParallel, TokenMeanLoss

PART, SIZES = "test_loops_of_ranks", (2,)
KINDS = {
    "data parallel": DataParallel(check_weights=True),
    "data parallel, each batch": DataParallel(sync_each_batch=True, check_weights=True),
    "level1": HSDP(threshold=0, check_weights=True),
    "level2": HSDP(-1, 0, "level2", check_weights=True),
}
START = np.array([[-0.00748682], [0.53644359]], np.float32)
TARGET = [0.2117, 0.3172]
PADDING = -100


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def sentences(numbers):
    """Sentence i has the words 1 to i + 1; a word's label is whether it is odd."""
    length = max(*numbers, 0) + 1  # -1 is a sentence without words.
    words = np.full((len(numbers), length, 1), PADDING, np.float32)
    labels = np.full((len(numbers), length), PADDING, np.int32)
    for row, number in enumerate(numbers):
        words[row, : number + 1, 0] = np.arange(1, number + 2)
        labels[row, : number + 1] = np.arange(1, number + 2) % 2
    return words, labels


def train_sentences(parts, block_tokens=None, parallel="auto"):
    """One window of micro batches; return the weights and what the step reported.

    With `block_tokens` the model is the head of a network without a body.
    """
    backbone = nn.Dense(1, 2, weight_init=Tensor(START), has_bias=False)
    loss_cell = TokenMeanLoss(backbone)
    if block_tokens is not None:
        loss_cell = TokenMeanLoss(nn.Identity(), head=backbone, block_tokens=block_tokens)
    accumulator = Accumulator(loss_cell, nn.SGD(backbone.trainable_params(), 0.08), len(parts), parallel=parallel)
    for part in parts:
        with accumulator.accumulate():
            accumulator.backward(*[Tensor(array) for array in sentences(part)])
            output = accumulator.step()
    return backbone.weight.asnumpy().ravel().tolist(), output


# Micro batches dealt one by one, and sentences dealt one by one.
PARTS = [list(range(i, i + 4)) for i in range(0, 16, 4)]
BY_BATCH, BY_SENTENCE = PARTS[RANK::2], [[4 * i + j for j in range(RANK, 8, 2)] for i in (0, 2)]


def by_hand(numbers):
    """The mean loss of the tokens of these sentences, and the weights after an update, in float64."""
    words, labels = sentences(numbers)
    x, labels = words[labels >= 0].astype(np.float64), labels[labels >= 0]
    exponents = np.exp(x @ START.T)
    shares = exponents / exponents.sum(1, keepdims=True)
    one_hot = np.eye(2)[labels]
    weights = START - 0.08 * (shares - one_hot).T @ x / len(x)
    return -np.log((shares * one_hot).sum(1)).mean(), weights.ravel()


@on_ranks(2, cases=[*((name, block) for name in KINDS for block in (None, 5)), ("data parallel", "by sentence")])
def test_a_token_counts_the_same_on_whichever_rank_it_is(name, way):
    """With a head in blocks of five tokens too, and however sentences are dealt."""
    counted = [int((sentences(sum(mine, []))[1] >= 0).sum()) for mine in (BY_BATCH, BY_SENTENCE)]
    assert counted == [[52, 64], [84, 72]][RANK]
    block = way if way == 5 else None
    weights, output = train_sentences(BY_SENTENCE if way == "by sentence" else BY_BATCH, block, KINDS[name])
    loss, expected = by_hand(range(16))
    np.testing.assert_allclose(expected, TARGET, atol=5e-5)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(output.loss.asnumpy(), loss, rtol=1e-5)
    assert output.updated and output.weight == 136
    # The known wrong answers: one division per rank, and one per micro batch.
    for groups, wrong in (([sum(PARTS[::2], []), sum(PARTS[1::2], [])], [0.2042, 0.3247]), (PARTS, [0.1622, 0.3668])):
        np.testing.assert_allclose(np.mean([by_hand(group)[1] for group in groups], 0), wrong, atol=5e-5)


@on_ranks(2)
def test_a_rank_without_tokens_follows_the_others():
    weights, output = train_sentences([[0, 1, 2], [3]] if RANK == 0 else [[-1], [-1]])
    np.testing.assert_allclose(weights, by_hand(range(4))[1], rtol=1e-5)
    assert output.updated and output.weight == 10
    # And a window without tokens on any rank changes nothing.
    weights, output = train_sentences([[-1], [-1]])
    assert weights == START.ravel().tolist()
    assert (output.loss, output.updated, output.weight) == (0, False, 0)


def batches_of(arrays, rows=2):
    return [tuple(Tensor(array[i : i + rows]) for array in arrays) for i in range(0, len(arrays[0]), rows)]


def sgd_with_schedule(network):
    """An optimizer whose rate is halved after every second update."""
    optimizer = optim.SGD(network.trainable_params(), 0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, 2, 0.5)


@functools.cache
def trained_with_schedule(carries):
    """Weights and rate after windows of all rows: two epochs of batches of 2, 2 and 1 times two rows."""
    per_rank = [uneven_data(rank) for rank in range(2)]
    rows = [[[array[i : i + 2] for array in arrays] for arrays in per_rank] for i in (0, 2, 4)]
    first, second, third = [[np.concatenate(arrays) for arrays in zip(*each)] for each in rows]
    # The last batch belongs to rank 0 alone, and is a window of its own unless the window goes on in the next epoch.
    windows = [(first, second), (third, first), (second, third)] if carries else [(first, second), (third,)] * 2
    network = build_network()
    optimizer, scheduler = sgd_with_schedule(network)
    grad_fn = ms.grad(nn.WithLossCell(network, nn.MSELoss()), None, network.trainable_params())
    for window in windows:
        grads = grad_fn(*(Tensor(np.concatenate(arrays)) for arrays in zip(*window)))
        norm = np.sqrt(sum(np.square(grad.asnumpy()).sum() for grad in grads))
        optimizer(tuple(grad * float(min(1.0, 0.5 / norm)) for grad in grads))
        scheduler.step()
    return weights_of(network), len(windows), float(optimizer.lrs[0].asnumpy())


@on_ranks(2, cases=[(name, carries) for name in ("data parallel", "level2") for carries in (False, True)])
def test_a_rank_that_runs_out_of_data_joins_with_its_clip_and_its_scheduler(name, carries):
    network = build_network()
    optimizer, scheduler = sgd_with_schedule(network)
    config = AccumulationConfig(2, sync_with_dataloader=not carries)
    loss_cell = nn.WithLossCell(network, nn.MSELoss())
    accumulator = Accumulator(loss_cell, optimizer, config=config, parallel=KINDS[name])
    loader, scheduler = accumulator.prepare(batches_of(uneven_data(RANK)), scheduler)
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


@on_ranks(2, cases=KINDS)
def test_gradients_that_the_caller_took_are_added_over_the_ranks(kind):
    network, loss_fn = build_network(), nn.MSELoss()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(network, optimizer, 2, parallel=kind)
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(network(x), y), None, network.trainable_params())
    for number in (0, 1):
        x, y = own_share(number)
        loss, grads = grad_fn(x, y)
        output = accumulator(grads, weight=len(x), loss=loss)
    rows = joined(batch(0), batch(1))
    weights, [[loss, *_]] = stock_clipped("Momentum", [rows], lambda grads, norm: grads)
    close(weights_of(network), weights)
    np.testing.assert_allclose(output.loss.asnumpy(), loss, rtol=1e-5)
    assert output.updated and output.weight == 24


@on_ranks(2)
def test_all_ranks_skip_what_one_cannot_use():
    network = build_network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer)
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
    """The first one is stepped before the second one's turn."""
    first, second = build_network(), build_network()
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in (first, second)]
    cells = [nn.WithLossCell(network, nn.MSELoss()) for network in (first, second)]
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
    """The same with MindSpore's own optimizers, on all rows."""
    first, second = build_network(), build_network()
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in (first, second)]
    (x, y), (next_x, next_y) = [[Tensor(array) for array in batch(number)] for number in (0, 1)]
    early = first(x)
    inputs = [Tensor(array) for array in joined(batch(0), batch(1))]
    optimizers[0](ms.grad(nn.WithLossCell(first, nn.MSELoss()), None, first.trainable_params())(*inputs))
    targets = ops.concat((early, first(next_x)))
    optimizers[1](ms.grad(nn.WithLossCell(second, nn.MSELoss()), None, second.trainable_params())(inputs[0], targets))
    return [weights_of(first), weights_of(second)]


def build_loop(**settings):
    """A network and an Accumulator whose optimizer has a state."""
    network = build_network()
    cell, optimizer = nn.WithLossCell(network, nn.MSELoss()), nn.Momentum(network.trainable_params(), 0.1, 0.9)
    return network, Accumulator(cell, optimizer, 2, check_loss=False, **settings)


def train_loop(accumulator, numbers):
    for number in numbers:
        with accumulator.accumulate():
            accumulator.backward(*(own_share(number) if SIZE > 1 else map(Tensor, batch(number))))
            accumulator.step()


@on_ranks(2, cases=["level1", "level2"])
def test_a_checkpoint_of_any_rank_holds_the_whole_loop(name):
    """One process goes on from it, below."""
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
    cell, optimizer = nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1)
    with refuses(ValueError, "For 'Accumulator', the ranks must agree about 'config', but got Accumulation"):
        Accumulator(cell, optimizer, accumulation_steps=1 + RANK)
    with refuses(ValueError, "'parallel'", "sync_each_batch", "optimizer_level='level1'"):
        Accumulator(cell, optimizer, config=AccumulationConfig(sync_each_batch=True), parallel=HSDP())
    with refuses(TypeError, "'dataset'", "got generator"):
        Accumulator(cell, optimizer).prepare(part for part in ())


@on_ranks(2)
def test_sync_each_batch_sends_the_gradient_in_each_batch():
    """Messages of three batches and one update. The gradient has two elements, of which each rank keeps one."""
    backbone = nn.Dense(1, 2, has_bias=False)
    config = AccumulationConfig(3, sync_each_batch=True)
    accumulator = Accumulator(TokenMeanLoss(backbone), nn.SGD(backbone.trainable_params(), 0.1), config=config)
    sizes = sizes_sent(reducer_of(accumulator.driver))
    for _ in range(3):
        with accumulator.accumulate():
            accumulator.backward(*[Tensor(array) for array in sentences([1, 2])])
            accumulator.step()
        sizes.append("batch")
    at_the_end = [2, 1, 1]  # Loss and weight, the norm, this rank's part of the mean gradient.
    assert sizes == [2, "batch", 2, "batch", 2, *at_the_end, "batch"]
