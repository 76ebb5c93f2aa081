"""Train a small causal transformer on Shakespeare's As You Like It, letter by letter, 32 lines per update.

The 32 lines are the product of processes, accumulation steps and rows per batch. However they are cut, the updates
are the same, to the last one of an epoch, which has the lines that are left:

    python train.py --batch-size 32
    python train.py --batch-size 8 --accumulation-steps 4
    bash run.sh      several of them, two under msrun, and one plot of all
"""

import argparse
import json
import os
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset
from transformer import Transformer

from ms_gradaccum import Accumulator, TokenMeanLoss

TEXT = Path(__file__).resolve().parents[1] / "data" / "as_you_like_it" / "as_you_like_it.txt"
PADDING = -100

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch, on each process")
parser.add_argument("--accumulation-steps", type=int, default=4, help="batches of an update, on each process")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--lines", type=int, help="train on the first lines of the play alone")
parser.add_argument("--mean-of-means", action="store_true", help="the wrong loss: each batch counts by its rows")
parser.add_argument("--losses", type=Path, help="file for the loss of each update, one JSON object per line")
settings = parser.parse_args()

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device(os.getenv("DEVICE_TARGET", "CPU"))
ms.set_seed(settings.seed)

rank, rank_size = 0, 1
if os.getenv("MS_ROLE"):  # started by msrun
    init()
    rank, rank_size = get_rank(), get_group_size()


def read_rows():
    """Tokens and labels (lines, longest). A line starts and ends with token 0; a label is the token that follows."""
    play = TEXT.read_text().partition("\nACT I\n")[2]
    lines = [" ".join(line.split()) for line in play.splitlines() if line.strip()]
    letters = ["\n", *sorted(set("".join(lines)))]
    length = max(map(len, lines)) + 1
    tokens = np.zeros((len(lines), length), np.int32)
    labels = np.full((len(lines), length), PADDING, np.int32)
    for i, line in enumerate(lines):
        row = [letters.index(letter) for letter in line]
        tokens[i, 1 : len(row) + 1] = row
        labels[i, : len(row) + 1] = [*row, 0]
    return tokens[: settings.lines], labels[: settings.lines], len(letters)


class MeanLoss(nn.Cell):
    """The mean over the tokens of a batch, which forgets how many there are."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, tokens, labels):
        logits = self.net(tokens)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=PADDING)


def create_dataset(order):
    """This process's batches of one epoch.

    The processes take turns with the lines, so that together they see the same 32 per update, however many they are.
    (Sharding by mindspore.dataset would repeat lines where the processes do not divide them.)
    """
    mine = order[rank::rank_size]
    return NumpySlicesDataset((tokens[mine], labels[mine]), shuffle=False).batch(settings.batch_size)


tokens, labels, vocabulary = read_rows()
net = Transformer(vocabulary, length=tokens.shape[1], layers=settings.layers)
optimizer = nn.Adam(net.trainable_params(), 3e-3)
loss_cell = MeanLoss(net) if settings.mean_of_means else TokenMeanLoss(net, ignore_index=PADDING)
accumulator = Accumulator(loss_cell, optimizer, settings.accumulation_steps)

random = np.random.default_rng(settings.seed)  # the same lines in the same order on all processes
losses = []
for epoch in range(settings.epochs):
    for batch in accumulator.prepare(create_dataset(random.permutation(len(tokens)))):
        with accumulator.accumulate():
            accumulator.backward(*batch)
            accumulator.clip_grad_norm(1.0)
            output = accumulator.step()
            accumulator.zero_grad()
        if output is not None:
            losses.append({"update": len(losses) + 1, "loss": output.loss.item(), "weight": output.weight.item()})
    if rank == 0:
        print(f"epoch {epoch + 1}, update {len(losses)}: loss {losses[-1]['loss']:.4f}", flush=True)

if rank == 0 and settings.losses:
    settings.losses.parent.mkdir(parents=True, exist_ok=True)
    settings.losses.write_text("".join(json.dumps(update) + "\n" for update in losses))
