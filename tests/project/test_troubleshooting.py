"""The sentences of the troubleshooting page are those of ms_gradaccum: they stand in its sources.

Those that no other test provokes are provoked here.
"""

import inspect
import re
from pathlib import Path

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from linear_toy import X, line, sgd
from messages import STRINGS
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset
from refusal import all_warnings, loss_cell

from ms_gradaccum import HSDP, Accumulator, GradAccumulation, Model, TrainOneStepCell
from ms_gradaccum._checks import is_lost
from ms_gradaccum.parallel import factory

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
# The first cells of those tables that quote what the program says.
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.M)
SAID = "\n".join(text for _, text in STRINGS)
LINES = Tensor(X), Tensor(2 * X)
OWNER = "TrainOneStepCell"


def step_of(network, optimizer=None):
    return TrainOneStepCell(network, optimizer or sgd(network))


class Complex(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1j], ms.complex64), "weight")


class Plain(nn.Cell):
    """A network that may take more than it needs."""

    def __init__(self):
        super().__init__()
        self.cell = loss_cell()

    def construct(self, x, y, *others):
        return self.cell(x, y)


class OfFour(Plain):
    """A network that takes four rows alone."""

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


class DistributedDataParallel(nn.Cell):
    """Called as MindSpore's own, which needs several processes."""

    def __init__(self, network):
        super().__init__()
        self.network = network


def complex_parameters():
    step_of(Complex())


def four_rows():
    step_of(GradAccumulation(OfFour(), 2))(*LINES)


def a_mask_as_long_as_the_batch():
    step_of(GradAccumulation(Plain(), 8))(LINES[0], ops.ones((8, 8)))


def a_dataset_that_is_batched_later():
    cell = loss_cell()
    Accumulator(cell, sgd(cell)).prepare(NumpySlicesDataset(X)).batch(2)


def mindspores_step_in_a_model():
    cell = loss_cell()
    Model(nn.TrainOneStepCell(cell, sgd(cell)), accumulation_steps=4)


def mindspores_data_parallel():
    step_of(DistributedDataParallel(loss_cell()))


def groups_of_three():
    factory.choose_kind(OWNER, HSDP(shard_size=3), 4)


def adam_of_mint():
    cell = loss_cell()
    step_of(cell, mint.optim.Adam(cell.trainable_params()))(*LINES)


def a_group_that_is_added_to_a_built_step():
    network = nn.SequentialCell(line(), nn.Dense(1, 1))
    optimizer = experimental.SGD(network[0].trainable_params(), 0.1)
    step = step_of(nn.WithLossCell(network, nn.MSELoss()), optimizer)
    step(*LINES)
    optimizer.add_param_group({"params": network[1].trainable_params()})
    step(*LINES)


def a_forward_pass_that_communicates():
    step = step_of(GradAccumulation(Sending(), 2))
    step.body.window.advisor.measurement.is_distributed = True
    step(*LINES)


def no_init(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    step_of(loss_cell())


def a_message_without_an_answer():
    error = RuntimeError("Launch kernel failed: Default/AllGather-op0")
    is_lost(OWNER, error)
    raise error


def a_network_of_distributed_tensors():
    network = line()
    network.weight.placements = ("Shard(0)",)
    Accumulator(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))


# What provokes the sentence of the page that has these words.
PROVOKED = {
    "optimizer of real": complex_parameters,
    "network takes 4": four_rows,
    "cut into single": a_mask_as_long_as_the_batch,
    "complete before prepare()": a_dataset_that_is_batched_later,
    "training cell TrainOneStepCell": mindspores_step_in_a_model,
    "reduce its gradients": mindspores_data_parallel,
    "argument 'shard_size'": groups_of_three,
    "Adam of mindspore.mint": adam_of_mint,
    "'optimizer' must keep": a_group_that_is_added_to_a_built_step,
    "measured: its forward": a_forward_pass_that_communicates,
    "connected before they": no_init,
    "failed: the ranks": a_message_without_an_answer,
    "networks with DTensors": a_network_of_distributed_tensors,
}


@pytest.mark.parametrize("key", PROVOKED)
def test_a_quoted_sentence_is_what_is_said(key, monkeypatch, eager):
    (quote,) = [quote for quote in QUOTES if key in quote]
    provoke = PROVOKED[key]
    with all_warnings() as caught:
        try:
            provoke(monkeypatch) if inspect.signature(provoke).parameters else provoke()
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
