"""Train a causal language model on samples of different lengths: each token counts the same.

The causal LM example of Hugging Face Accelerate's guide "Performing gradient accumulation", in MindSpore. Sample i has
the tokens 1 to i + 1; the label of a token is its remainder modulo 2. The right loss of an update is the mean over
all tokens of its batches, on all processes. Means per batch, averaged, are another number.

    python train.py    one process: two batches of four samples, 36 tokens
    bash run.sh        two processes with two batches of four samples each, 136 tokens
"""

import os

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

from ms_gradaccum import Accumulator, TokenMeanLoss

ms.set_context(mode=ms.GRAPH_MODE)

ACCUMULATION_STEPS, BATCH_SIZE, PADDING = 2, 4, -100
INITIAL_WEIGHT = [[-0.00748682], [0.53644359]]
# By the number of processes: the tokens of one update, and the weight after it.
EXPECTED = {1: (36, [0.0953, 0.4337]), 2: (136, [0.2117, 0.3172])}
TOKENS_OF_RANK = {"batches": {1: [36], 2: [52, 84]}, "samples": {1: [36], 2: [64, 72]}}

rank, rank_size = 0, 1
if os.getenv("MS_ROLE"):  # started by msrun
    init()
    rank, rank_size = get_rank(), get_group_size()

samples = [np.arange(1, i + 2) for i in range(rank_size * ACCUMULATION_STEPS * BATCH_SIZE)]


def create_batch(rows):
    """Inputs (rows, longest, 1) and labels (rows, longest); what is missing to the longest row is no token."""
    longest = max(map(len, rows))
    inputs = np.zeros((len(rows), longest, 1), np.float32)
    labels = np.full((len(rows), longest), PADDING, np.int32)
    for i, row in enumerate(rows):
        inputs[i, : len(row), 0] = row
        labels[i, : len(row)] = row % 2
    return ms.Tensor(inputs), ms.Tensor(labels)


def batches_of(rows):
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


def deal(what):
    """This process's batches, when the processes take turns with whole batches or with single samples."""
    mine = batches_of(samples)[rank::rank_size] if what == "batches" else batches_of(samples[rank::rank_size])
    return [create_batch(rows) for rows in mine]


def create_network():
    net = nn.Dense(1, 2, has_bias=False, weight_init=ms.Tensor(INITIAL_WEIGHT, ms.float32))
    return net, nn.SGD(net.trainable_params(), 0.08)


def weight_of(net):
    return [round(weight, 4) for weight in net.weight.asnumpy().ravel().tolist()]


def train_with_accumulation(what):
    net, optimizer = create_network()
    # The network is a head without a body. Its logits are computed for 16 tokens at a time, and never for all.
    loss_cell = TokenMeanLoss(nn.Identity(), PADDING, head=net, block_tokens=16)
    accumulator = Accumulator(loss_cell, optimizer, ACCUMULATION_STEPS)
    tokens = 0
    for inputs, labels in accumulator.prepare(deal(what)):
        with accumulator.accumulate():
            accumulator.backward(inputs, labels)
            output = accumulator.step()
            accumulator.zero_grad()
        tokens += int((labels.asnumpy() != PADDING).sum())
    return weight_of(net), tokens, int(output.weight.asnumpy())


class WholeBatchLoss(nn.Cell):
    """MindSpore's own mean over the valid tokens of one batch."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, inputs, labels):
        return ops.cross_entropy(self.net(inputs).reshape(-1, 2), labels.reshape(-1), ignore_index=PADDING)


def train_without_accumulation():
    net, optimizer = create_network()
    nn.TrainOneStepCell(WholeBatchLoss(net), optimizer).set_train()(*create_batch(samples))
    return weight_of(net)


whole = train_without_accumulation()
print(f"initial weight: {weight_of(create_network()[0])}")
for what, tokens_of_rank in TOKENS_OF_RANK.items():
    accumulated, tokens, all_tokens = train_with_accumulation(what)
    print(f"rank {rank}, {what} dealt round-robin: {tokens} of {all_tokens} tokens, final weight {accumulated}")
    if rank_size in EXPECTED:
        assert tokens == tokens_of_rank[rank_size][rank]
        assert (all_tokens, accumulated) == EXPECTED[rank_size]
    assert accumulated == whole
print(f"without accumulation, the final weight is {whole}", flush=True)
