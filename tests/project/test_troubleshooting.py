"""The sentences of the troubleshooting page are those of ms_gradaccum: they stand in its sources.

Those that no other test provokes are provoked here.
"""

import os
import re
from pathlib import Path
from unittest import mock

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from linear_toy import X, line, mse, sgd
from messages import STRINGS
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset
from refusal import all_warnings, loss_cell

from ms_gradaccum import HSDP, Accumulator, GradAccumulation, Model, TrainOneStepCell
from ms_gradaccum._checks import is_lost
from ms_gradaccum.parallel import factory

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
# The first cells of those tables that quote what the program says.
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
SAID = "\n".join(text for _, text in STRINGS)
LINES = Tensor(X), Tensor(2 * X)


def built(network, optimizer=None, kind=TrainOneStepCell):
    return kind(network, optimizer or sgd(network))


class Plain(nn.Cell):
    """A network that may take more than it needs."""

    def __init__(self):
        super().__init__()
        self.cell = loss_cell()

    def construct(self, x, y, *others):
        return self.cell(x, y)


class OfFour(Plain):
    def construct(self, x, y):
        return self.cell(x, y) + 0 * x.reshape(4, 1).mean()


class Sending(Plain):
    """A network that communicates, once it is said not to be alone."""

    def __init__(self):
        super().__init__()
        self.is_alone, self.send = True, ops.AllReduce()

    def construct(self, x, y):
        loss = self.cell(x, y)
        return loss if self.is_alone else self.send(loss)


class DistributedDataParallel(Plain):
    """Called as MindSpore's own, which needs several processes."""


def complex_parameters():
    cell = loss_cell()
    cell.another = Parameter(Tensor([1j], ms.complex64), "another")
    built(cell)


def adam_of_mint():
    cell = loss_cell()
    built(cell, mint.optim.Adam(cell.trainable_params()))(*LINES)


def a_group_that_is_added_to_a_built_step():
    network = nn.SequentialCell(line(), nn.Dense(1, 1))
    optimizer = experimental.SGD(network[0].trainable_params(), 0.1)
    step = built(mse(network), optimizer)
    step(*LINES)
    optimizer.add_param_group({"params": network[1].trainable_params()})
    step(*LINES)


def a_forward_pass_that_communicates():
    step = built(GradAccumulation(Sending(), 2))
    step.body.window.advisor.measurement.is_distributed = True
    step(*LINES)


def no_init():
    with mock.patch.dict(os.environ, MS_ROLE="MS_WORKER", MS_WORKER_NUM="2"):
        built(loss_cell())


def a_message_without_an_answer():
    error = RuntimeError("Launch kernel failed: Default/AllGather-op0")
    is_lost("TrainOneStepCell", error)
    raise error


def a_network_of_distributed_tensors():
    network = line()
    network.weight.placements = ("Shard(0)",)
    built(mse(network), kind=Accumulator)


# What provokes the sentence of the page that has these words.
PROVOKED = {
    "optimizer of real": complex_parameters,
    "network takes 4": lambda: built(GradAccumulation(OfFour(), 2))(*LINES),
    "complete before prepare()": lambda: built(loss_cell(), kind=Accumulator).prepare(NumpySlicesDataset(X)).batch(2),
    "training cell TrainOneStepCell": lambda: Model(built(loss_cell(), kind=nn.TrainOneStepCell), accumulation_steps=4),
    "reduce its gradients": lambda: built(DistributedDataParallel()),
    "argument 'shard_size'": lambda: factory.choose_kind(HSDP(shard_size=3), 4),
    "Adam of mindspore.mint": adam_of_mint,
    "'optimizer' must keep": a_group_that_is_added_to_a_built_step,
    "measured: its forward": a_forward_pass_that_communicates,
    "connected before they": no_init,
    "failed: the ranks": a_message_without_an_answer,
    "networks with DTensors": a_network_of_distributed_tensors,
}


@pytest.mark.parametrize("key", PROVOKED)
def test_a_quoted_sentence_is_what_is_said(key, eager):
    (quote,) = [quote for quote in QUOTES if key in quote]
    with all_warnings() as caught:
        try:
            PROVOKED[key]()
            said = [str(warning.message) for warning in caught]
        except Exception as error:
            said = [str(error)]
    pattern = ".*".join(re.escape(part) for part in quote.split("..."))
    assert any(re.search(pattern, sentence, re.S) for sentence in said), said


def pieces_of(text):
    """Return the longest pieces of a text that stand in the sources, one after the other."""
    words, pieces = text.split(), []
    while words:
        known = [end for end in range(1, len(words) + 1) if " ".join(words[:end]) in SAID]
        end = max(known, default=1)
        pieces.append(" ".join(words[:end]))
        words = words[end:]
    return pieces


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_sentence_stands_in_the_sources(quote):
    """What the page leaves out may be anything, and so may names and numbers; few pieces make a sentence."""
    texts = re.split(r"^For '\w+', |\.\.\.|'\w+'|\b\d+\b", quote)
    pieces = [piece for text in texts for piece in pieces_of(text)]
    assert len(pieces) <= 3 + len(quote.split()) / 4, pieces
