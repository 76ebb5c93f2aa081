"""The sentences of the troubleshooting page are those of ms_gradaccum: each is provoked by its cause there."""

import inspect
import re
import warnings
from collections import UserDict
from pathlib import Path

import mindspore as ms
import mindspore.experimental.optim as experimental
import numpy as np
import pytest
from linear_toy import X, batches, line, sgd
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import LossMonitor, RunContext
from refusal import loss_cell
from step_probe import Around

from ms_gradaccum import (
    HSDP,
    Accumulator,
    DataParallel,
    GradAccumulation,
    Model,
    TokenMeanLoss,
    TrainOneStepCell,
    load_state,
    save_state,
)
from ms_gradaccum._checks import is_lost
from ms_gradaccum.advice import advisor, first_batches, rank_inputs
from ms_gradaccum.checkpoint import files
from ms_gradaccum.gradients import mixed_precision
from ms_gradaccum.loops import data_position, epoch
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


class Plain(Returning):
    """A network that may take more than it needs."""

    def construct(self, x, y, *others):
        return self.cell(x, y)


class Complex(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1j], ms.complex64), "weight")


class Lookup(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingLookup(6, 2, "ones", target="CPU", sparse=True)

    def construct(self, x):
        return self.rows(x).mean()


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


class Hidden(Returning):
    """A network with a term that does not show in its loss."""

    def construct(self, x, y):
        term = ops.square((self.trainable_params()[0] * x).mean())
        return self.cell(x, y) + term - ops.stop_gradient(term)


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


class Times(Returning):
    def construct(self, x, y, factor):
        return self.cell(x, y) * factor


class Mean(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(1.0), "weight")

    def construct(self, x):
        return (self.weight * x).mean()


class DistributedDataParallel(nn.Cell):
    """Called as MindSpore's own, which needs several processes."""

    def __init__(self, network):
        super().__init__()
        self.network = network


class Own(TrainOneStepCell):
    """A step with a construct that is never called."""

    def construct(self, *inputs):
        return self.network(*inputs)


class LacksMemory:
    """A forward hook that lacks memory for more than four rows."""

    def __call__(self, cell, inputs, output):
        if inputs[0].shape[0] > 4:
            raise RuntimeError("Allocate output memory failed")


def hooked(hook):
    cell = loss_cell()
    cell.register_forward_hook(hook)
    return cell


WORDS = Tensor(np.ones((4, 9, 1), np.float32))
TOKENS = Tensor(np.zeros(8, np.int32))

# What provokes the sentence of the page that has these words.
PROVOKED = {
    "optimizer of the network's": lambda: TrainOneStepCell(loss_cell(), sgd(line())),
    "optimizer of mindspore.nn": lambda: TrainOneStepCell(loss_cell(), nn.SGD),
    "optimizer of real": lambda: step_of(Complex()),
    "must be a loss cell": lambda: of(loss_cell(), lambda cell: step_of(nn.TrainOneStepCell(cell, sgd(cell)))),
    "never be called": lambda: of(loss_cell(), lambda cell: Own(cell, sgd(cell))),
    "None or 1.0": lambda: of(loss_cell(), lambda cell: TrainOneStepCell(cell, sgd(cell), 4)),
    "'network' must not contain": lambda: GradAccumulation(GradAccumulation(loss_cell(), 2), 2),
    "unexpected argument": lambda: model_of(boost_config_dict={"boost": {"mode": "manual"}}),
    "need a name": lambda: GradAccumulation(loss_cell(), 2, True),
    "bfloat16 on CPU": lambda: step_of(loss_cell(), mixed_precision="bf16"),
    "return its mean": lambda: train_parts(line(), INPUT),
    "scalar losses": lambda: train_parts(Returning(lambda loss: (loss, 2 * loss))),
    "return its weight": lambda: train_parts(Returning(lambda loss: (loss, None)), parts=1, weighted=True),
    "rows on their": lambda: train_parts(loss_cell(), INPUT, LABEL[:4]),
    "inputs do not fit": lambda: train_parts(line()),
    "dataset has no batch()": lambda: model_of(NumpySlicesDataset((X, X[:, 0]), shuffle=False)),
    "backbone must take": lambda: train(TokenMeanLoss(loss_cell())),
    "'head' must be an nn.Dense": lambda: TokenMeanLoss(nn.Dense(4, 4), head=nn.Dense(4, 9, activation="relu")),
    "(classes, width)": lambda: TokenMeanLoss(nn.Dense(4, 4), head=nn.Conv1d(4, 9, 1).weight),
    "memory is not enough": lambda: train_parts(hooked(LacksMemory()), parts="auto"),
    "at least the length of each row": lambda: train(GradAccumulation(loss_cell(), micro_tokens=8), WORDS, WORDS),
    "network is in evaluation": lambda: train(with_loss(line(), nn.Dropout(p=0.5))),
    "takes the mean": lambda: train_parts(with_loss(line(), nn.BatchNorm1d(1)).set_train()),
    "exceeds the 8": lambda: train_parts(loss_cell(), parts=16),
    "1 for GRU": lambda: train_parts(Recurrent(), ops.ones((8, 8, 3))),
    "loss of two": lambda: train_parts(nn.WithLossCell(line(), nn.MSELoss(reduction="sum"))),
    "sums and weights": lambda: train_parts(Returning(lambda loss: (loss, Tensor(2.0))), weighted=True),
    "forward pass changes": lambda: train_parts(Counted()),
    "network takes 4": lambda: train_parts(OfFour()),
    "reads an iterator": lambda: train_parts(Reading()),
    "tensors, tuples, lists": lambda: train_parts(Plain(), INPUT, UserDict(y=LABEL)),
    "input 'y' seems": lambda: train_parts(OfList(), INPUT, [1.0] * 8),
    "cut into single": lambda: train_parts(Plain(), INPUT, ops.ones((8, 8)), parts=8),
    "TrainOneStepCell: PYNATIVE mode": lambda: train(loss_cell()),
    "of a window is above": lambda: train(loss_cell(), skip_above=1.0),
    "loss must be finite": lambda: model_of(batches(4, NAN), LossMonitor()),
    "complete before prepare()": lambda: accumulator_of().prepare(NumpySlicesDataset(X)).batch(2),
    "training cell TrainOneStepCell": lambda: of(
        loss_cell(), lambda cell: Model(nn.TrainOneStepCell(cell, sgd(cell)), accumulation_steps=4)
    ),
    "'optimizer' must be given": lambda: Model(loss_cell(), accumulation_steps=4).train(1, batches(2)),
    "'grads' must be a tuple": lambda: accumulator_of()((Tensor(1.0), (ops.ones((1, 1)),))),
    "'grads' must be gradients": lambda: accumulator_of()((ops.ones((1, 1)), ops.ones((1,)))),
    "gradient of a window": lambda: train(loss_cell(), Tensor(NAN), INPUT),
    "optimizer calls AllReduce": lambda: factory.warn_of_reductions(
        OWNER, "the optimizer", [ops.AllReduce()], GradAccumulation(loss_cell(), 2)
    ),
    "ranks must read": lambda: rank_inputs.warn_of_inputs(OWNER, 2 * [world.FirstInput("batch", "12345678")]),
    "reduce its gradients": lambda: step_of(DistributedDataParallel(loss_cell())),
    "argument 'shard_size'": lambda: factory.choose_kind(OWNER, HSDP(shard_size=3), 4),
    "optimizer that works": lambda: shards.check_shardable(nn.Lamb(line().trainable_params(), 0.01)),
    "StateCheckpoint for resume=True": lambda: of(
        loss_cell(), lambda cell: Model(cell, optimizer=sgd(cell)).train(1, batches(4), resume=True)
    ),
    "own random seed": lambda: data_position.Sources(data_position._UNSET, {}).check_known(
        NumpySlicesDataset(X, shuffle=True), 2
    ),
    "was also called directly": lambda: of(
        step_of(loss_cell()), lambda step: step.optimizer(tuple(each.value() for each in step.optimizer.parameters))
    ),
    "gradients in PYNATIVE": lambda: of(
        Lookup(), lambda cell: train(cell, Tensor([[1]], ms.int32), optimizer=nn.LazyAdam(cell.trainable_params()))
    ),
    "weight decay": lambda: of(
        Lookup(), lambda cell: step_of(cell, optimizer=nn.Adam(cell.trainable_params(), weight_decay=0.1))
    ),
    "train cell around": lambda: of(
        loss_cell(), lambda cell: nn.TrainOneStepCell(GradAccumulation(cell, 2), sgd(cell)).set_train()(*LINES)
    ),
    "Adam of mindspore.mint": lambda: of(
        loss_cell(), lambda cell: train(cell, optimizer=mint.optim.Adam(cell.trainable_params()))
    ),
    "list of learning": lambda: of(
        loss_cell(),
        lambda cell: Model(cell, optimizer=sgd(cell, [0.01] * 4), accumulation_steps=4).train(1, batches(2)),
    ),
    "gradient of two": lambda: call_each(step_of(GradAccumulation(Hidden(), 2)), LINES, LINES),
    "window have different": lambda: call_each(
        step_of(Mean(), accumulation_steps=2), (ops.ones((4, 3)),), (ops.ones((4, 5)),)
    ),
    "step() must follow": lambda: call_each(accumulator_of().step, (), (), (), ()),
}


def says(key):
    """Register what provokes a sentence in more than one statement."""

    def register(provoke):
        PROVOKED[key] = provoke
        return provoke

    return register


@says("argument 'optimizer' cannot")
def another_optimizer_for_a_built_step():
    cell = loss_cell()
    step = step_of(cell)
    step.optimizer = step.optimizer
    step.optimizer = sgd(cell)


@says("step now belongs")
def a_step_that_another_one_has_followed():
    cell = loss_cell()
    step = step_of(cell)
    follower = step_of(cell, optimizer=step.optimizer)
    step(*LINES)
    del follower


@says("'optimizer' must keep")
def a_group_that_is_added_to_a_built_step():
    network = nn.SequentialCell(line(), nn.Dense(1, 1))
    optimizer = experimental.SGD(network[0].trainable_params(), 0.1)
    step = step_of(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer)
    step(*LINES)
    optimizer.add_param_group({"params": network[1].trainable_params()})
    step(*LINES)


@says("hidden states of the width")
def a_network_with_its_head_inside():
    network = nn.SequentialCell(nn.Dense(1, 4), nn.Dense(4, 9))
    train(TokenMeanLoss(network, head=network[1]), INPUT, TOKENS)


@says("MindSpore cannot compile")
def what_no_graph_can_do(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    train(Returning(lambda loss: loss + undefined))  # noqa: F821


@says("network with hooks")
def a_hook(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    train(hooked(print), compile=True)


@says("sets all cells")
def a_frozen_cell_that_training_wakes():
    norm = nn.BatchNorm1d(1)
    cell = nn.WithLossCell(nn.SequentialCell(line(), norm), nn.MSELoss())
    norm.set_train(False)
    Model(cell, optimizer=sgd(cell)).train(1, batches(4))


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


@says("hook of the parameter")
def a_hook_of_a_parameter():
    cell = loss_cell()
    cell.trainable_params()[0].register_hook(lambda gradient: gradient.clip(-1.0, 1.0))
    train_parts(cell)


@says("what the network")
def a_hook_in_a_window_of_several_batches():
    cell = loss_cell()
    cell.register_backward_hook(lambda hooked, grad_input, grad_output: None)
    train(cell, accumulation_steps=2)


@says("check that only")
def a_check_that_fails(monkeypatch):
    def breaks(*_):
        raise OSError("broken")

    monkeypatch.setattr(first_batches.FirstBatches, "look", breaks)
    train(loss_cell())


@says("gradient was Inf")
def nothing_but_inf():
    step, inf = step_of(loss_cell()), Tensor(np.full((1, 1), np.inf, np.float32))
    step.windows[0].ends.overflows_in_a_row = 99
    step(inf, inf)


@says("window mixes two")
def another_step_of_a_part_of_the_network():
    first, second = (nn.Dense(1, 1) for _ in range(2))
    losses = [nn.WithLossCell(each, nn.MSELoss()) for each in (first, nn.SequentialCell(first, second))]
    settings = {"accumulation_steps": 2}
    steps = [step_of(loss, optimizer=sgd(each), **settings) for loss, each in zip(losses, (first, second))]
    for _ in range(2):
        for step in steps:
            step(*LINES)


@says("gradients of a batch")
def gradients_that_are_clipped_batch_by_batch():
    cell = nn.Dense(3, 3, has_bias=False)
    accumulator = Accumulator(cell, sgd(cell), 3)
    for power in (1, 2, 3):
        grad = np.arange(9, dtype=np.float32).reshape(3, 3) ** power
        accumulator((Tensor(grad / np.linalg.norm(grad)),))


@says("inputs must keep")
def a_python_value_that_changes(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    monkeypatch.setattr(advisor, "_MANY_STRUCTURES", 1)
    train(Times(), *LINES, 2.0, compile=True)


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


@says("batches of different")
def batches_of_other_rows_without_a_weight():
    accumulator = accumulator_of(4)
    for _ in batches(3):
        accumulator((ops.ones((1, 1)),))


@says("connected before they")
def no_init(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    step_of(loss_cell())


@says("ranks must agree")
def other_settings_on_another_rank(monkeypatch):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, {"micro_size": 2}])
    world.check_agreement(OWNER, {"micro_size": 4})


@says("started with different")
def other_parameters_on_another_rank(monkeypatch):
    monkeypatch.setattr(factory, "differing_ranks", lambda parameters: [1])
    monkeypatch.setattr(factory, "broadcast_parameters", lambda parameters: None)
    factory._start_alike(OWNER, DataParallel(), loss_cell(), sgd(line()))


@says("ranks have different")
def other_tensors_on_another_rank(monkeypatch):
    monkeypatch.setattr(factory, "differing_ranks", lambda tensors: [] if isinstance(tensors, list) else [1])
    factory._start_alike(OWNER, DataParallel(), loss_cell(), sgd(line()))


@says("loss scale skips")
def a_loss_scale_in_saturation_mode(monkeypatch):
    monkeypatch.setattr(mixed_precision, "clamps_overflow", lambda: True)
    step_of(loss_cell(), mixed_precision="fp16")


@says("network with the same")
def experts_of_one_rank(monkeypatch):
    network = line()
    network.weight.layerwise_parallel = True
    factory.check_parameters_sent(OWNER, network.trainable_params())


@says("same weights after")
def parameters_that_became_different(monkeypatch):
    monkeypatch.setattr(world, "gather_values", lambda doing, value: [value, "another"])
    world.check_equal([])


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


@says("only ranks")
def a_rank_that_stops_alone(monkeypatch):
    monkeypatch.setattr(epoch, "gather_counts", lambda doing, count: [0, 1])
    epoch.StopTogether().on_train_epoch_end(RunContext({}))


@says("discard this window")
def a_batch_that_has_failed_on_a_rank():
    window = step_of(loss_cell()).body.window
    window.reducers[0].is_distributed = True
    window.discard(for_all=True)
    window.close()


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


@says("folder with states")
def an_empty_folder(tmp_path):
    load_state(step_of(loss_cell()), tmp_path)


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


@says("cannot be written")
def a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    save_state(step_of(loss_cell()), tmp_path / "file" / "states")


@says("saves into")
def a_folder_of_another_job(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_lock", lambda file: False)
    monkeypatch.setattr(files, "LINGERS", 0.0)
    save_state(step_of(loss_cell()), tmp_path)


@says("hsdp() must come")
def a_network_that_reduces_its_gradients_later():
    cell = loss_cell()
    step = step_of(cell)
    cell.hsdp_scheduler = object()
    step(*LINES)


def quotes_with(key):
    return [quote for quote in QUOTES if key in quote]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("key", PROVOKED)
def test_a_quoted_sentence_is_what_is_said(key, monkeypatch, tmp_path, caplog):
    (quote,) = quotes_with(key)
    given = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PROVOKED[key](**{name: given[name] for name in inspect.signature(PROVOKED[key]).parameters})
            said = [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
        except Exception as error:
            said = [str(error)]
    pattern = ".*".join(re.escape(part) for part in quote.split("..."))
    assert any(re.search(pattern, sentence, re.S) for sentence in said), said


def test_each_sentence_of_the_page_is_provoked():
    assert sorted(quotes_with(key)[0] for key in PROVOKED) == sorted(QUOTES)
