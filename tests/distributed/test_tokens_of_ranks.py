"""Windows whose ranks have other numbers of tokens, rows or micro batches: means over all, as of one whole batch."""

import itertools
from contextlib import nullcontext

import numpy as np
from linear_toy import sgd
from mindspore import Tensor, nn
from ranks import RANK, assert_same, everyone, on_ranks
from refusal import refuses
from scenarios import KINDS

from ms_gradaccum import Accumulator, GradAccumulation, TokenMeanLoss, TrainOneStepCell

PADDING, CLASSES, RATE = -100, 4, 0.3
# The tokens of each row, by rank and batch. A batch of rank 0 has none.
TOKENS = [[[5, 1, 3], [0, 0, 0]], [[2, 4, 1], [5, 2, 3]]]
START = np.random.default_rng(1).normal(size=(CLASSES, 3)).astype(np.float32)


def rows_of(lengths, seed, longest):
    """Inputs and labels of rows of so many tokens."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(lengths), longest, 3)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=x.shape[:2]).astype(np.int32)
    labels[np.arange(longest) >= np.array(lengths)[:, None]] = PADDING
    return x, labels


def token_batch(rank, number):
    return rows_of(TOKENS[rank][number], 10 * rank + number, 5)


def by_hand(*batches):
    """The gradient and the loss of each token of these batches, in float64."""
    x = np.concatenate([x[labels != PADDING] for x, labels in batches]).astype(np.float64)
    labels = np.concatenate([labels[labels != PADDING] for _, labels in batches])
    exponents = np.exp(x @ START.T.astype(np.float64))
    shares = exponents / exponents.sum(1, keepdims=True)
    one_hot = np.eye(CLASSES)[labels]
    return (shares - one_hot)[:, :, None] * x[:, None], -np.log((shares * one_hot).sum(1))


class TokenMean(nn.Cell):
    """A mean over tokens, NaN without any, alone or with the number of tokens."""

    def __init__(self, network, returns_tokens):
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss(ignore_index=PADDING)
        self.returns_tokens = returns_tokens

    def construct(self, x, y):
        mean = self.loss(self.network(x).reshape(-1, CLASSES), y.reshape(-1))
        return (mean, (y != PADDING).sum()) if self.returns_tokens else mean


# What knows the number of tokens: a loop or the network, of a mean, or a loss of this package.
LOSSES = {
    "loop": lambda dense: TokenMean(dense, False),
    "network": lambda dense: GradAccumulation(TokenMean(dense, True), 3, weighted="mean"),
    "loss": TokenMeanLoss,
    "blocks": lambda dense: TokenMeanLoss(nn.Identity(), head=dense, block_tokens=5),
}


@on_ranks(2, cases=[*itertools.product(KINDS, LOSSES), ("data parallel", "loss", (1, 1))])
def test_a_token_counts_the_same_on_whichever_rank_it_is(name, who_knows, of_first=(0, 1)):
    """Of the second batch the first rank has no token."""
    dense = nn.Dense(3, CLASSES, Tensor(START), has_bias=False)
    optimizer = sgd(dense, RATE)
    accumulator = Accumulator(LOSSES[who_knows](dense), optimizer, 2, parallel=KINDS[name])
    numbers = [of_first, (0, 1)]
    for number in numbers[RANK]:
        weight = {"weight": sum(TOKENS[RANK][number])} if who_knows == "loop" else {}
        accumulator.backward(*map(Tensor, token_batch(RANK, number)), **weight)
        output = accumulator.step()
    ranks = [by_hand(*(token_batch(rank, number) for number in numbers[rank])) for rank in (0, 1)]
    grads, losses = map(np.concatenate, zip(*ranks))
    np.testing.assert_allclose(dense.weight.asnumpy(), START - RATE * grads.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(output.loss.asnumpy(), losses.mean(), rtol=1e-5)
    assert output.updated and float(output.weight) == len(losses)
    # The known wrong answer: each rank counts alike.
    alike = sum(grads.sum(0) / max(len(grads), 1) for grads, _ in ranks) / 2
    assert RATE * np.abs(alike - grads.mean(0)).max() > 1e-2
    if who_knows in ("loop", "network"):
        return
    # A window without tokens on any rank changes nothing.
    before = dense.weight.asnumpy().copy()
    for _ in range(2):
        accumulator.backward(*map(Tensor, token_batch(0, 1)))
        output = accumulator.step()
    assert (dense.weight.asnumpy() == before).all()
    assert (output.loss, output.updated, output.weight) == (0, False, 0)


# Micro batches of so many tokens at most: 3 on rank 0 and 5 on rank 1.
LENGTHS = [[16, 9, 33, 20], [40, 33, 24, 17, 8, 2]]


def long_batch(rank):
    return rows_of(LENGTHS[rank], rank, 40)


def build(network, kind, *args, **settings):
    accumulation = GradAccumulation(TokenMeanLoss(network), *args, **settings)
    optimizer = sgd(network, RATE)
    return TrainOneStepCell(accumulation, optimizer, parallel=kind, check_loss=False)


def limited_step(kind):
    network = nn.Dense(3, CLASSES, Tensor(START), has_bias=False)
    return network, build(network, kind, micro_tokens=48, lengths=lambda x, labels: labels != PADDING)


def check_weights(weight):
    grads, losses = by_hand(long_batch(0), long_batch(1))
    np.testing.assert_allclose(weight.asnumpy(), START - RATE * grads.mean(0), rtol=0, atol=1e-6)
    return grads, losses


@on_ranks(2, cases=KINDS)
def test_ranks_with_other_numbers_of_micro_batches_train_as_one_batch(kind):
    network, step = limited_step(kind)
    inputs = [Tensor(each) for each in long_batch(RANK)]
    assert everyone(len(step.network.split(*inputs).micro_batches)) == [3, 5]
    output = step(*inputs)
    grads, losses = check_weights(network.weight)
    np.testing.assert_allclose(output.loss.asnumpy(), losses.mean(), rtol=1e-6)
    assert float(output.weight) == len(losses) == np.concatenate(LENGTHS).sum()
    # The known wrong answer: each rank counts alike.
    alike = np.mean([by_hand(long_batch(rank))[0].mean(0) for rank in range(2)], 0)
    assert np.abs(alike - grads.mean(0)).max() > 1e-2


@on_ranks(2, cases=["data parallel", "level2"])
def test_a_row_that_is_too_long_on_one_rank_takes_no_other_rank_along(name):
    network, step = limited_step(KINDS[name])
    inputs = [Tensor(each) for each in rows_of([[5, 6], [60, 7]][RANK], RANK, [40, 60][RANK])]
    with refuses(ValueError, "must be at least the length of each row") if RANK else nullcontext():
        step(*inputs)
    output = step(*[Tensor(each) for each in long_batch(RANK)])
    assert_same(network.weight.asnumpy().tolist())
    assert float(output.weight) == np.concatenate(LENGTHS).sum()


class Limited(nn.Cell):
    """A network that lacks memory for more than two rows on rank 1."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(3, CLASSES, Tensor(START), has_bias=False)

    def construct(self, x):
        if RANK == 1 and x.shape[0] > 2:
            raise RuntimeError("Allocate output memory failed, alloc node:BiasAdd")
        return self.head(x)


@on_ranks(2, cases=["data parallel", "level1", "level2"])
def test_a_rank_that_runs_out_of_memory_splits_its_batch_for_itself(name):
    """If each micro batch communicates, it is the error of that rank."""
    network = Limited()
    step = build(network, KINDS[name], "auto")
    inputs = [Tensor(each) for each in long_batch(RANK)]
    if name == "level2":
        with refuses(RuntimeError, "Allocate output memory failed") if RANK else nullcontext():
            step(*inputs)
        assert_same(network.head.weight.asnumpy().tolist())
        assert step.network.micro_size == 1
        return
    step(*inputs)
    assert step.network.micro_size == [1, 4][RANK]
    check_weights(network.head.weight)
