"""The sentences of the troubleshooting page are those of ms_gradaccum: they are provoked, or stand in its sources."""

import inspect
import re
from collections import UserDict
from pathlib import Path

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import X, line, sgd
from messages import STRINGS
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset
from refusal import all_warnings, loss_cell
from step_probe import Around

from ms_gradaccum import (
    HSDP,
    Accumulator,
    GradAccumulation,
    Model,
    TokenMeanLoss,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum._checks import is_lost
from ms_gradaccum.parallel import factory, shards, world

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
# The first cells of those tables that quote what the program says.
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.M)
INPUT, LABEL = LINES = Tensor(X), Tensor(2 * X)
NAN = np.full((8, 1), np.nan, np.float32)
OWNER = "TrainOneStepCell"


def step_of(network, **settings):
    optimizer = settings.pop("optimizer", None)
    return TrainOneStepCell(network, sgd(network) if optimizer is None else optimizer, **settings)


def train(network, *batch, **settings):
    """Train a batch, the toy's if none is given."""
    step_of(network, **settings)(*(batch or LINES))


def train_parts(network, *batch, parts=2, **settings):
    """Train a batch in micro batches."""
    train(GradAccumulation(network, parts, **settings), *batch)


def with_loss(*cells):
    return nn.WithLossCell(nn.SequentialCell(*cells), nn.MSELoss())


def of(thing, use):
    """Use something several times in one expression."""
    use(thing)


def call_each(function, *arguments):
    """Call a function several times."""
    for each in arguments:
        function(*each)


def model_of(*data, **settings):
    """Train a Model for an epoch."""
    cell = loss_cell()
    Model(cell, optimizer=sgd(cell), **settings).train(1, *data)


def accumulator_of(steps=1):
    cell = loss_cell()
    return Accumulator(cell, sgd(cell), accumulation_steps=steps)


class Returning(nn.Cell):
    """A network that returns what a function makes of its mean loss."""

    def __init__(self, make=None):
        super().__init__()
        self.cell, self.make = loss_cell(), make

    def construct(self, x, y):
        return self.make(self.cell(x, y))


class Hidden(Returning):
    """A network with a term that does not show in its loss."""

    def construct(self, x, y):
        term = ops.square((self.trainable_params()[0] * x).mean())
        return self.cell(x, y) + term - ops.stop_gradient(term)


class Plain(Returning):
    """A network that may take more than it needs."""

    def construct(self, x, y, *others):
        return self.cell(x, y)


class Complex(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1j], ms.complex64), "weight")


class Recurrent(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 2)

    def construct(self, x):
        return self.layer(x)[0].mean()


class Counted(Returning):
    """A network whose loss grows with each call. The factor gives it more digits than a count."""

    count = 0

    def construct(self, x, y):
        self.count += 1
        return self.cell(x, y) * (0.37 * self.count)


class OfFour(Returning):
    """A network that takes four rows alone."""

    def construct(self, x, y):
        return self.cell(x, y) + 0 * x.reshape(4, 1).mean()


class Reading(Returning):
    """A network that reads an iterator."""

    def __init__(self):
        super().__init__()
        self.factors = iter(range(9))

    def construct(self, x, y):
        return self.cell(x, y) * next(self.factors)


class Sending(Returning):
    """A network that communicates, once it is said not to be alone."""

    def __init__(self):
        super().__init__()
        self.is_alone, self.send = True, ops.AllReduce()

    def construct(self, x, y):
        loss = self.cell(x, y)
        return loss if self.is_alone else self.send(loss)


class OfList(Returning):
    def construct(self, x, y):
        return self.cell(x, x * sum(y))


class DistributedDataParallel(nn.Cell):
    """Called as MindSpore's own, which needs several processes."""

    def __init__(self, network):
        super().__init__()
        self.network = network


def hooked(hook):
    cell = loss_cell()
    cell.register_forward_hook(hook)
    return cell


# What provokes the sentence of the page that has these words.
PROVOKED = {
    "optimizer of the network's": lambda: TrainOneStepCell(loss_cell(), sgd(line())),
    "optimizer of real": lambda: step_of(Complex()),
    "must be a loss cell": lambda: of(loss_cell(), lambda cell: step_of(nn.TrainOneStepCell(cell, sgd(cell)))),
    "'network' must not contain": lambda: GradAccumulation(GradAccumulation(loss_cell(), 2), 2),
    "unexpected argument": lambda: model_of(boost_config_dict={"boost": {"mode": "manual"}}),
    "bfloat16 on CPU": lambda: step_of(loss_cell(), mixed_precision="bf16"),
    "return its mean": lambda: train_parts(line(), INPUT),
    "backbone must take": lambda: train(TokenMeanLoss(loss_cell())),
    "(classes, width)": lambda: TokenMeanLoss(nn.Dense(4, 4), head=nn.Conv1d(4, 9, 1).weight),
    "network is in evaluation": lambda: train(with_loss(line(), nn.Dropout(p=0.5))),
    "takes the mean": lambda: train_parts(with_loss(line(), nn.BatchNorm1d(1)).set_train()),
    "exceeds the 8": lambda: train_parts(loss_cell(), parts=16),
    "1 for GRU": lambda: train_parts(Recurrent(), ops.ones((8, 8, 3))),
    "loss of two": lambda: train_parts(nn.WithLossCell(line(), nn.MSELoss(reduction="sum"))),
    "gradient of two": lambda: call_each(step_of(GradAccumulation(Hidden(), 2)), LINES, LINES),
    "sums and weights": lambda: train_parts(Returning(lambda loss: (loss, Tensor(2.0))), weighted=True),
    "forward pass changes": lambda: train_parts(Counted()),
    "network takes 4": lambda: train_parts(OfFour()),
    "reads an iterator": lambda: train_parts(Reading()),
    "tensors, tuples, lists": lambda: train_parts(Plain(), INPUT, UserDict(y=LABEL)),
    "input 'y' seems": lambda: train_parts(OfList(), INPUT, [1.0] * 8),
    "cut into single": lambda: train_parts(Plain(), INPUT, ops.ones((8, 8)), parts=8),
    "TrainOneStepCell: PYNATIVE mode": lambda: train(loss_cell()),
    "complete before prepare()": lambda: accumulator_of().prepare(NumpySlicesDataset(X)).batch(2),
    "training cell TrainOneStepCell": lambda: of(
        loss_cell(), lambda cell: Model(nn.TrainOneStepCell(cell, sgd(cell)), accumulation_steps=4)
    ),
    "'grads' must be gradients": lambda: accumulator_of()((ops.ones((1, 1)), ops.ones((1,)))),
    "gradient of a window": lambda: train(loss_cell(), Tensor(NAN), INPUT),
    "optimizer calls AllReduce": lambda: factory.warn_of_reductions(
        OWNER, "the optimizer", [ops.AllReduce()], GradAccumulation(loss_cell(), 2)
    ),
    "reduce its gradients": lambda: step_of(DistributedDataParallel(loss_cell())),
    "argument 'shard_size'": lambda: factory.choose_kind(OWNER, HSDP(shard_size=3), 4),
    "optimizer that works": lambda: shards.check_shardable(nn.Lamb(line().trainable_params(), 0.01)),
    "Adam of mindspore.mint": lambda: of(
        loss_cell(), lambda cell: train(cell, optimizer=mint.optim.Adam(cell.trainable_params()))
    ),
    "step() must follow": lambda: call_each(accumulator_of().step, (), (), (), ()),
}


def says(key):
    """Register what provokes a sentence in more than one statement."""

    def register(provoke):
        PROVOKED[key] = provoke
        return provoke

    return register


@says("'optimizer' must keep")
def a_group_that_is_added_to_a_built_step():
    network = nn.SequentialCell(line(), nn.Dense(1, 1))
    optimizer = experimental.SGD(network[0].trainable_params(), 0.1)
    step = step_of(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer)
    step(*LINES)
    optimizer.add_param_group({"params": network[1].trainable_params()})
    step(*LINES)


@says("MindSpore cannot compile")
def what_no_graph_can_do(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    train(Returning(lambda loss: loss + undefined))  # noqa: F821


@says("network with hooks")
def a_hook(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    train(hooked(print), compile=True)


@says("measured: its forward")
def a_forward_pass_that_communicates():
    step = step_of(GradAccumulation(Sending(), 2))
    step.body.window.advisor.measurement.is_distributed = True
    step(*LINES)


@says("measured: the step")
def a_step_in_a_larger_graph(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    Around(step_of(GradAccumulation(loss_cell(), 2)))(*LINES)


@says("followed by step()")
def no_step():
    accumulator = accumulator_of()
    for _ in range(2):
        with accumulator.accumulate():
            accumulator.backward(*LINES)


@says("pass in accumulate()")
def two_backward_passes():
    accumulator = accumulator_of()
    with accumulator.accumulate():
        accumulator.backward(*LINES)
        accumulator.backward(*LINES)


@says("connected before they")
def no_init(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    step_of(loss_cell())


@says("network with the same")
def experts_of_one_rank(monkeypatch):
    network = line()
    network.weight.layerwise_parallel = True
    factory.check_parameters_sent(OWNER, network.trainable_params())


@says("parameters in an update")
def parameters_that_one_rank_has_loaded(monkeypatch):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, [*value[:3], "another"]])
    world.check_states(OWNER, world.gather_states(world.NO_INPUT, [], [], []))


@says("the ranks made different calls:")
def a_rank_that_saves_alone(monkeypatch):
    monkeypatch.setattr(world, "_send", lambda words: np.zeros(8, np.int32))
    world.gather_counts("saves a state", 1)


@says("failed: the ranks")
def a_message_without_an_answer(monkeypatch):
    error = RuntimeError("Launch kernel failed: Default/AllGather-op0")
    is_lost(OWNER, error)
    raise error


@says("networks with DTensors")
def a_network_of_distributed_tensors():
    network = line()
    network.weight.placements = ("Shard(0)",)
    Accumulator(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))


@says("uses the mean")
def a_context_that_adds_gradients_up():
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        factory._warn_of_a_sum(OWNER, 2)
    finally:
        ms.reset_auto_parallel_context()


@says("used: the state")
def another_network(tmp_path):
    save_state(step_of(loss_cell()), tmp_path)
    load_state(step_of(nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss())), tmp_path)


@says("bytes that were written")
def a_file_that_was_cut(tmp_path):
    save_state(step_of(loss_cell()), tmp_path)
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    load_state(step_of(loss_cell()), tmp_path)


def quotes_with(key):
    return [quote for quote in QUOTES if key in quote]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("key", PROVOKED)
def test_a_quoted_sentence_is_what_is_said(key, monkeypatch, tmp_path, caplog):
    (quote,) = quotes_with(key)
    given = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    with all_warnings() as caught:
        try:
            PROVOKED[key](**{name: given[name] for name in inspect.signature(PROVOKED[key]).parameters})
            said = [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
        except Exception as error:
            said = [str(error)]
    pattern = ".*".join(re.escape(part) for part in quote.split("..."))
    assert any(re.search(pattern, sentence, re.S) for sentence in said), said


def pattern_of(quote):
    """A quote as a pattern: what the page leaves out may be anything, and so may names and numbers."""
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|'\w+'|\b\d+\b", quote))


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_sentence_stands_in_the_sources_or_is_provoked(quote):
    provoked = any(key in quote for key in PROVOKED)
    assert provoked or any(re.search(pattern_of(quote), text, re.S) for _, text in STRINGS)
