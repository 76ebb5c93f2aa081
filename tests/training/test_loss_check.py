"""The measurement of a loss: it leaves no trace, comes when it should, and is not fooled."""

import random
import re
import sys
import uuid
import warnings

import mindspore as ms
import numpy as np
import pytest
from losses_as_written import LABELS, MASK, WRONG, X, Y, build, net
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.common.api import _JitExecutor
from random_losses import KINDS, RandomLoss
from step_probe import Around

from ms_gradaccum import Accumulator, GradAccumulation, Model, TokenMeanLoss, TrainOneStepCell
from ms_gradaccum.backend.kept_state import KeptTensors, kept
from ms_gradaccum.batch.loss_parts import Rows
from ms_gradaccum.batch.weighted_loss import RowWeight
from ms_gradaccum.training import loss_check
from ms_gradaccum.training.loss_check import LossCheck
from ms_gradaccum.training.settings import StepSettings

CHANCE = np.random.default_rng()
NAME = "For 'GradAccumulation', the loss should be a mean over rows, but "


def said_in(caught):
    parts = ("loss should be a mean", "should add up", "forward pass should leave", "should not depend")
    return [str(each.message) for each in caught if any(part in str(each.message) for part in parts)]


def said_by(run):
    """Return the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return said_in(caught)


def step_of(cell, micro_size=4, weighted=False, learning_rate=0.05, batch_axis=0, **settings):
    network = GradAccumulation(cell, micro_size, weighted=weighted, batch_axis=batch_axis)
    return TrainOneStepCell(network, nn.SGD(cell.trainable_params(), learning_rate), **settings).set_train()


class Of(nn.Cell):
    """A loss cell that is a function of itself and its inputs."""

    def __init__(self, function, out=3, **held):
        super().__init__()
        self.net, self.function = net(out), function
        for name, value in held.items():
            setattr(self, name, value)

    def construct(self, *inputs):
        return self.function(self, *inputs)


# ---- no trace


class Everything(nn.Cell):
    """A network that changes all that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.net, self.norm, self.drop = net(), nn.BatchNorm1d(3), nn.Dropout(p=0.4)
        self.frozen = nn.Dense(3, 3, weight_init="ones").set_train(False)
        self.count = Parameter(Tensor(0.0), "count", requires_grad=False)
        self.register_buffer("queue", Tensor(np.zeros(4, np.float32)))
        self.calls, self.seen, self.array, self.best = 0, [], np.zeros(2), {"loss": None}

    def construct(self, x, y):
        self.calls += 1
        self.seen.append(tuple(x.shape))
        self.array += 1
        self.best["loss"] = self.calls
        ops.assign_add(self.count, Tensor(1.0))
        self.queue[0] = self.queue[0] + 1
        out = self.drop(self.norm(self.net(x) + ops.standard_normal((1, 3)) * random.random() * np.random.rand()))
        out = ops.dropout(out, 0.2, self.training)
        return (self.frozen(out) - y).square().mean()


def hook(log):
    return lambda cell, inputs, output: log.append(tuple(output.shape))


def everything_trained(check_loss, batches=5):
    ms.set_seed(3)
    np.random.seed(3)
    random.seed(3)
    cell, log = Everything(), []
    for inner in (cell, cell.net):
        inner.register_forward_hook(hook(log))
    optimizer = nn.Adam(cell.trainable_params(), 0.05)
    step = TrainOneStepCell(GradAccumulation(cell, 4), optimizer, check_loss=check_loss)
    cell.set_train()
    cell.frozen.set_train(False)
    losses = [float(step(Tensor(X), Tensor(Y)).loss.asnumpy()) for _ in range(batches)]
    numbers = [parameter.asnumpy() for parameter in [*optimizer.get_parameters(), *cell.get_parameters()]]
    modes = [(inner.training, inner.phase.partition(" ")[0]) for _, inner in cell.cells_and_names()]
    plain = [cell.calls, cell.seen, cell.array.tolist(), cell.best, cell.queue.asnumpy().tolist(), log]
    chance = [random.random(), np.random.rand(), ops.standard_normal((2,)).asnumpy().tolist()]
    return [losses, [number.tobytes() for number in numbers], modes, plain, chance]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("small", [loss_check._SMALL, 0])
def test_a_training_is_the_same_with_it_to_the_bit(small, eager, monkeypatch):
    monkeypatch.setattr(loss_check, "_SMALL", small)
    runs = []
    measure = LossCheck.measure
    monkeypatch.setattr(LossCheck, "measure", lambda *args: (runs.append(1), measure(*args))[1])
    with_it = everything_trained(True)
    assert len(runs) == 3  # Those of batches 1, 2 and 4.
    assert with_it == everything_trained(False)


class Compilable(nn.Cell):
    """The same of what a graph can change."""

    def __init__(self):
        super().__init__()
        self.net, self.norm, self.drop = net(), nn.BatchNorm1d(3), nn.Dropout(p=0.4)
        self.count = Parameter(Tensor(0.0), "count", requires_grad=False)

    def construct(self, x, y):
        ops.assign_add(self.count, Tensor(1.0))
        out = self.drop(self.norm(self.net(x))) + ops.standard_normal((1, 3))
        return (ops.dropout(out, 0.2, self.training) - y).square().mean()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_is_the_same_with_it_to_the_bit(mode, monkeypatch):
    monkeypatch.setattr(loss_check, "_SMALL", 0)
    found = []
    for check_loss in (True, False):
        ms.set_seed(3)
        cell = Compilable().set_train()
        optimizer = nn.Adam(cell.trainable_params(), 0.05)
        step = TrainOneStepCell(GradAccumulation(cell, 4), optimizer, check_loss=check_loss)
        losses = [float(step(Tensor(X), Tensor(Y)).loss.asnumpy()) for _ in range(3)]
        numbers = [each.asnumpy().tobytes() for each in [*optimizer.get_parameters(), *cell.get_parameters()]]
        found.append((losses, numbers))
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 3


def test_what_fails_inside_is_put_back_too(eager):
    cell = Everything().set_train()
    cell.frozen.set_train(False)
    before = [(inner.training, inner.phase) for _, inner in cell.cells_and_names()]
    with pytest.raises(KeyboardInterrupt), kept(cell, lambda tensor: True) as state:
        state.evaluate()
        cell(Tensor(X), Tensor(Y))
        assert cell.calls == 1 and float(cell.count.asnumpy()) == 1
        raise KeyboardInterrupt
    assert cell.calls == 0 and cell.seen == [] and cell.best == {"loss": None}
    assert float(cell.count.asnumpy()) == 0 and float(cell.queue.asnumpy()[0]) == 0
    assert [(inner.training, inner.phase) for _, inner in cell.cells_and_names()] == before


def test_no_copy_is_kept_of_what_a_forward_pass_leaves_alone(eager, monkeypatch):
    monkeypatch.setattr(loss_check, "_SMALL", 0)
    copies = []
    original = KeptTensors.__init__

    def init(self, tensors, copied):
        original(self, tensors, copied)
        copies.append({self.tensors[i].name for i in self.values})

    monkeypatch.setattr(KeptTensors, "__init__", init)
    cell = nn.WithLossCell(nn.SequentialCell(net(), nn.BatchNorm1d(3)), nn.MSELoss())
    step_of(cell)(Tensor(X), Tensor(Y))
    # Nothing before the first micro batch, and the statistics of the batch for the measurement.
    assert [{name.rpartition(".")[2] for name in each} for each in copies] == [
        set(),
        {"moving_mean", "moving_variance"},
    ]


def test_a_state_that_changes_out_of_training_alone_is_named(eager, monkeypatch):
    def centred(self, x):
        if not self.drop.training:
            ops.assign(self.centre, self.centre + 1)
        return (self.net(x) - self.centre).square().mean()

    for small in (loss_check._SMALL, 0):
        monkeypatch.setattr(loss_check, "_SMALL", small)
        centre = Parameter(Tensor(np.zeros(3, np.float32)), "centre", requires_grad=False)
        step = step_of(Of(centred, centre=centre, drop=nn.Dropout(p=0.5)))
        said = said_by(lambda step=step: step(Tensor(X)))
        named = [each for each in said if "it changes 'centre' out of training alone, which stays changed" in each]
        # A copy of a small one is put back, so that there is nothing to name.
        assert len(named) == (small == 0) and (small == 0 or not centre.asnumpy().any())


# ---- op by op, then as the training runs


def compilations_of(cell, monkeypatch):
    """The graphs that the first batch of a training compiles, and what it says."""
    compiled = []
    original = nn.Cell.compile
    with monkeypatch.context() as patch:
        patch.setattr(nn.Cell, "compile", lambda self, *args: (compiled.append(type(self)), original(self, *args))[1])
        said = said_by(lambda: step_of(cell)(Tensor(X), Tensor(Y)))
    return RowWeight in compiled, said


def test_a_loss_that_is_right_op_by_op_is_not_compiled_to_be_measured(monkeypatch):
    ms.set_context(mode=ms.GRAPH_MODE)
    assert compilations_of(nn.WithLossCell(net(), nn.MSELoss()), monkeypatch) == (False, [])
    is_compiled, (said,) = compilations_of(nn.WithLossCell(net(), nn.MSELoss(reduction="sum")), monkeypatch)
    assert is_compiled and "it adds up its rows" in said


def test_a_gradient_is_measured_op_by_op_as_well(monkeypatch):
    compiled = []
    compile_jit = _JitExecutor.compile
    monkeypatch.setattr(_JitExecutor, "compile", lambda *args, **kw: (compiled.append(1), compile_jit(*args, **kw))[1])
    gradients = []
    measured = LossCheck._gradient
    monkeypatch.setattr(LossCheck, "_gradient", lambda *args: (gradients.append(1), measured(*args))[1])
    ms.set_context(mode=ms.GRAPH_MODE)
    # The losses of rows that are all alike tell nothing.
    assert said_by(lambda: step_of(nn.WithLossCell(net(), nn.MSELoss()))(ops.ones((8, 6)), ops.ones((8, 3)))) == []
    assert len(gradients) == 2 * 3 and compiled == []


def test_what_only_op_by_op_is_random_is_measured_as_a_graph(monkeypatch):
    def scaled(self, x, y):
        return (self.net(x) - y).square().mean() * uuid.uuid4().fields[0]

    for mode, is_random in ((ms.GRAPH_MODE, False), (ms.PYNATIVE_MODE, True)):
        ms.set_context(mode=mode)
        is_compiled, said = compilations_of(Of(scaled), monkeypatch)
        assert is_compiled is not is_random and bool(said) is is_random


# ---- when


def measured_batches(step, batches, inputs):
    """The numbers of the batches that are measured, and what is said."""
    found = []
    check = step.body.window.micro_steps.loss_check
    measure = check.measure
    check.measure = lambda *args: (found.append(check.batches), measure(*args))[1]
    said = said_by(lambda: [step(*inputs) for _ in range(batches)])
    return found, said


def test_a_right_loss_is_measured_seldom_and_then_never(eager):
    step = step_of(nn.WithLossCell(net(), nn.MSELoss()))
    assert measured_batches(step, 130, (Tensor(X), Tensor(Y))) == ([1, 2, 4, 8, 16, 32, 64], [])


def test_batches_of_one_row_are_measured_with_the_next_one(eager):
    step = step_of(nn.WithLossCell(net(), nn.MSELoss()), 1, accumulation_steps=2)
    assert measured_batches(step, 70, (Tensor(X[:1]), Tensor(Y[:1]))) == ([2, 5, 9, 17, 33], [])


def test_a_wrong_one_once(eager):
    cell, inputs = build(WRONG["sum_of_squares"])
    found, said = measured_batches(step_of(cell, learning_rate=1e-4), 9, inputs)
    assert found == [1] and len(said) == 1


@pytest.mark.parametrize("settings", [{"check_loss": False}, {"micro_size": 1}])
def test_nothing_is_measured_where_there_is_nothing_to_tell(settings, eager):
    cell, inputs = build(WRONG["sum_of_squares"])
    assert measured_batches(step_of(cell, learning_rate=1e-4, **settings), 3, inputs) == ([], [])


def test_a_label_to_be_ignored_that_comes_later_is_found(eager):
    step = step_of(nn.WithLossCell(net(), nn.CrossEntropyLoss(ignore_index=-1)))
    later = np.where(MASK == 1, LABELS, -1).astype(np.int32)
    assert said_by(lambda: [step(Tensor(X), Tensor(LABELS)) for _ in range(7)]) == []
    (said,) = said_by(lambda: [step(Tensor(X), Tensor(later)) for _ in range(3)])
    assert "TokenMeanLoss" in said


@pytest.mark.parametrize("face", ["step", "Model", "Accumulator"])
def test_windows_of_several_batches_are_measured_by_all_faces(face, eager):
    cell, inputs = build(WRONG["sum_of_squares"])
    optimizer = nn.SGD(cell.trainable_params(), 1e-4)

    def run(**settings):
        if face == "step":
            TrainOneStepCell(cell, optimizer, accumulation_steps=2, **settings)(*inputs)
        elif face == "Model":
            data = ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(8)
            Model(cell, optimizer=optimizer, accumulation_steps=2, **settings).train(1, data)
        else:
            Accumulator(cell, optimizer, 2, **settings).backward(*inputs)

    (said,) = said_by(run)
    assert said.startswith(f"For '{'TrainOneStepCell' if face == 'step' else face}', ")
    assert "a window of 4 batches gives 0.25 of the gradient" in said
    optimizer = nn.SGD(cell.trainable_params(), 1e-4)
    assert said_by(lambda: run(check_loss=False)) == []


@pytest.mark.parametrize("name", ["sum_of_squares", "masked_mean_eps", "in_batch_negatives"])
@pytest.mark.parametrize("micro_size", [16, 1])
def test_single_rows_are_measured_in_pairs(name, micro_size, eager):
    cell, inputs = build(WRONG[name])
    if micro_size == 16:
        said = said_by(lambda: step_of(cell, 16)(*inputs))
    else:  # One row a batch.
        step = step_of(cell, 1, accumulation_steps=8)
        said = said_by(lambda: [step(*(each[i : i + 1] for each in inputs)) for i in range(6)])
    assert len(said) == 1 and NAME in said[0]


def test_mindspore_has_twice_the_binary_cross_entropy_of_one_element():
    """The reason for the next test; when this fails, MindSpore has mended it."""
    losses = [ops.binary_cross_entropy(*[Tensor(np.full((rows, 1), 0.5, np.float32))] * 2) for rows in (1, 2)]
    assert [float(loss.asnumpy()) for loss in losses] == pytest.approx([2 * np.log(2), np.log(2)])


@pytest.mark.parametrize("face", ["micro batches", "batches"])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_binary_cross_entropy_of_a_few_rows_is_right(face, rows, network_mode):
    def judged(self, x):
        return self.loss_fn(ops.sigmoid(self.net(x)), ops.ones_like(x[:, :1]))

    cell = Of(judged, 1, loss_fn=nn.BCELoss(reduction="mean"))
    x = Tensor(X[: 2 * rows])
    if face == "micro batches":
        assert said_by(lambda: [step_of(cell, 2)(x) for _ in range(2)]) == []
    else:
        step = step_of(cell, 1, accumulation_steps=2)
        assert said_by(lambda: [step(part) for part in (x[:rows], x[rows:])]) == []


@pytest.mark.parametrize("name", ["sum_of_squares", "masked_mean_eps", "in_batch_negatives"])
def test_a_wrong_loss_of_a_few_rows_is_none(name, eager):
    cell, inputs = build(WRONG[name])
    said = said_by(lambda: step_of(cell, len(inputs[0]) // 2)(*inputs))
    assert len(said) == 1 and NAME in said[0]


def test_rows_of_other_lengths_are_not_joined(eager):
    step = step_of(Of(lambda self, x: x.square().mean() + 0 * self.net[0].weight.sum()), 1, accumulation_steps=4)
    assert said_by(lambda: [step(Tensor(np.ones((1, length), np.float32))) for length in (3, 5, 4)]) == []


# ---- what is found


def test_rows_that_all_have_one_loss_are_told_by_their_gradient(network_mode):
    """At the start all logits are 0, and each label has the loss log(3)."""

    def masked(self, x, y, mask):
        each = ops.cross_entropy(self.dense(x), y, reduction="none")
        return (each * mask).sum() / mask.sum()

    def said_with(mask):
        step = step_of(Of(masked, dense=nn.Dense(6, 3, weight_init="zeros", bias_init="zeros")))
        return said_by(lambda: step(Tensor(X), Tensor(LABELS), Tensor(np.float32(mask * 4))))

    assert len(said_with([1, 2, 3, 1])) == 1
    assert said_with([1, 1, 1, 1]) == []


class Auxiliary(_Function):
    """Passes its input on and gives a second one the gradient of a loss, as mixtures of experts balance their load."""

    @staticmethod
    def forward(ctx, x, aux):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad, Tensor(0.1)


def balance(self, x, y):
    out = self.net(x)
    aux = ops.softmax(out, -1).mean(0).square().sum()
    return (Auxiliary.apply(out, aux) - y).square().mean()


def without_value(self, x, y):
    aux = self.net(x).mean(0).square().sum()
    return (self.net(x) - y).square().mean() + aux - ops.stop_gradient(aux)


def test_what_hides_from_the_loss_is_told_by_the_gradient_of_the_second_batch(network_mode):
    step = step_of(Of(without_value))
    said = [said_by(lambda: step(Tensor(X), Tensor(Y))) for _ in range(3)]
    assert [len(each) for each in said] == [0, 1, 0]
    assert re.search(r"the gradients of parts of a batch miss it by up to \d+ %, although their losses fit", said[1][0])


def test_it_is_told_of_a_few_rows_too(eager):
    step = step_of(Of(without_value), len(X) // 2)
    assert [len(said_by(lambda: step(Tensor(X), Tensor(Y)))) for _ in range(2)] == [0, 1]


def test_a_loss_that_is_added_in_the_backward_pass_is_told_as_well(eager):
    step = step_of(Of(balance))
    assert [len(said_by(lambda: step(Tensor(X), Tensor(Y)))) for _ in range(3)] == [0, 1, 0]


def test_a_gradient_that_draws_random_numbers_is_no_finding(eager):
    def noisy(self, x, y):
        out = self.net(x)
        noise = (out * ops.standard_normal(out.shape)).mean()
        return (out - y).square().mean() + noise - ops.stop_gradient(noise)

    step = step_of(Of(noisy))
    assert [said_by(lambda: step(Tensor(X), Tensor(Y))) for _ in range(2)] == [[], []]


@pytest.mark.parametrize("size", [1e6, 1e38])
def test_a_large_loss_leaves_no_warning_of_numpy(size, eager):
    step = step_of(Of(lambda self, x, y: size * self.net(x).square().mean()), learning_rate=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(Tensor(1e3 * X), Tensor(Y))
    assert [each for each in caught if each.category is RuntimeWarning] == [] == said_in(caught)


def test_no_hook_of_the_backward_pass_is_called(eager):
    seen = {True: 0, False: 0}
    for check_loss in seen:
        cell = Of(without_value)
        cell.net.register_backward_hook(
            lambda *_, check_loss=check_loss: seen.update({check_loss: seen[check_loss] + 1})
        )
        step = step_of(cell, check_loss=check_loss)
        for _ in range(2):
            step(Tensor(X), Tensor(Y))
    assert seen[True] == seen[False] > 0


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_a_loss_that_is_computed_in_16_bits_is_judged_so(dtype, eager):
    """The mean of three numbers near 1 misses that of their parts by a step of the format."""

    def loss(self, x, y):
        difference = (self.net(x) - y).astype(dtype)
        return (difference * difference).astype(ms.float32).mean().astype(dtype)

    step = step_of(Of(loss))
    assert [said_by(lambda: step(Tensor(X), Tensor(Y))) for _ in range(4)] == [[]] * 4


def test_each_measurement_takes_other_rows():
    rows = Rows.of((Tensor(np.arange(16, dtype=np.float32)),), 0)
    taken = [set(rows.cuts(4, number)[0][0].places) for number in range(4)]
    assert len(set.union(*taken)) == 16


class Weighted(nn.Cell):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = net(), kind

    def construct(self, x, y, mask):
        each = (self.net(x) - y).square().mean(-1)
        total = (each * mask).sum()
        if self.kind == "right":
            return total, mask.sum()
        if self.kind == "mean":
            return total / ops.maximum(mask.sum(), Tensor(1.0)), mask.sum()
        if self.kind == "constant":
            return total, Tensor(4.0)
        return total * mask.sum(), mask.sum()


@pytest.mark.parametrize(
    "kind, text",
    [
        ("right", None),
        ("mean", "it returns a mean where its sum is expected"),
        ("constant", "parts of a batch miss the weight by up to"),
        ("other", "parts of a batch miss the loss sum by up to"),
    ],
)
def test_sums_and_weights_must_add_up(kind, text, eager):
    said = said_by(lambda: step_of(Weighted(kind), weighted=True)(Tensor(X), Tensor(Y), Tensor(MASK)))
    assert [text in each for each in said] == [True] * (text is not None)


def test_a_weight_that_is_never_0_is_seen(network_mode):
    """Batches that end with padding show it in halves of unlike rows alone."""

    def padded(self, x, y, mask):
        each = (self.net(x) - y).square().mean(-1)
        return (each * mask).sum(), ops.maximum(mask.sum(), Tensor(1.0))

    step, mask = step_of(Of(padded), weighted=True), Tensor((np.arange(len(X)) < len(X) // 2).astype(np.float32))
    said = said_by(lambda: step(Tensor(X), Tensor(Y), mask))
    assert ["miss the weight by up to" in each for each in said] == [True]


def test_halves_that_fit_by_chance_are_not_believed(network_mode):
    """Rows below the mean of their losses are trained, here one of each half: three parts of the rows show it."""

    def easy_rows(self, rows):
        each = rows[:, 0] * (1 + self.net[2].bias.sum())
        return (each * (each < each.mean())).mean()

    rows = np.full((16, 3), [2, 5, -5], np.float32)
    rows[[0, 1, 14, 15], 0] = 1, 3, 3, 1
    (said,) = said_by(lambda: step_of(Of(easy_rows))(Tensor(rows)))
    assert "its rows meet" in said


def largest(self, rows):
    return (rows[:, 0] * (1 + self.net[2].bias.sum())).max()


def masked(self, rows):
    return (rows[:, 0] * (1 + self.net[2].bias.sum()) * rows[:, 1]).sum() / rows[:, 1].sum()


@pytest.mark.parametrize("function, reason", [(largest, "its rows meet"), (masked, "it is a mean over something else")])
def test_the_reason_is_known_where_halves_fit_by_chance(function, reason, network_mode):
    """Each half has the largest loss and as much of the mask, but not each quarter."""
    rows = np.full((8, 4), [0, 0, -9, 9], np.float32)
    rows[:, 0], rows[:, 1] = [3, 3, 3, 3, 3, 1, 3, 2], [3, 1, 3, 1, 1, 3, 1, 3]
    (said,) = said_by(lambda: step_of(Of(function), 1, accumulation_steps=2)(Tensor(rows)))
    assert reason in said


@pytest.mark.parametrize("learns", [True, False])
def test_a_weight_that_depends_on_parameters_is_told_by_the_gradient(learns, network_mode):
    """Micro batches train the sum, and a mean over what the network selects has the gradient of the weight, too."""

    def selective(self, x, y):
        out = self.net(x)
        chosen = ops.sigmoid(out.sum(-1))
        each = (out - y).square().mean(-1)
        chosen = chosen if learns else ops.stop_gradient(chosen)
        return (each * chosen).sum(), chosen.sum()

    step = step_of(Of(selective), weighted=True)
    said = [said_by(lambda: step(Tensor(X), Tensor(Y))) for _ in range(2)]
    assert [["the weight depends on parameters" in each for each in batch] for batch in said] == [[], [True] * learns]


def test_a_token_mean_is_right(eager):
    labels = np.where(MASK == 1, LABELS, -100).astype(np.int32)
    assert said_by(lambda: step_of(TokenMeanLoss(net()))(Tensor(X), Tensor(labels))) == []


@pytest.mark.parametrize("reduction, count", [("sum", 1), ("mean", 0)])
def test_random_numbers_do_not_hide_a_sum(reduction, count, network_mode):
    """A VAE draws out of training, too."""

    def vae(self, x, y):
        mean, log_var = ops.chunk(self.net(x), 2, -1)
        z = mean + ops.exp(0.5 * log_var) * 0.1 * ops.standard_normal(mean.shape)
        error, kl = (z - y).square(), mean.square() + log_var.exp() - log_var
        return error.sum() + kl.sum() if reduction == "sum" else error.mean() + kl.mean()

    ms.set_seed(3)
    step = step_of(Of(vae, out=6), learning_rate=1e-3)
    said = said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(2)])
    assert [NAME in each for each in said] == [True] * count


def test_dropout_of_any_kind_is_no_finding(eager):
    def dropping(self, x, y):
        return (ops.dropout(self.drop(self.net(x)), 0.5, self.training) - y).square().mean()

    class DropPath(nn.Cell):
        def construct(self, x):
            return x * (ops.rand(x.shape[0], 1) > 0.5) if self.training else x

    step = step_of(Of(dropping, drop=nn.SequentialCell(nn.Dropout(p=0.5), DropPath())))
    assert said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(4)]) == []


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("keep", [0.8, 0.95])
def test_what_is_seldom_dropped_is_no_finding(keep, batch, eager):
    """Passes that draw the same numbers by chance do not make those that miss a finding."""

    def stochastic_depth(self, x, y):
        rows = 1 if batch else x.shape[0]
        out = self.net(x)
        return (out + ops.tanh(out) * (ops.rand(rows, 1) < keep) / keep - y).square().mean()

    def trained(seed):
        ms.set_seed(seed)
        step = step_of(Of(stochastic_depth))
        return [step(Tensor(X), Tensor(Y)) for _ in range(4)]

    assert said_by(lambda: [trained(seed) for seed in range(6)]) == []


@pytest.mark.parametrize("reduction, count", [("mean", 0), ("sum", 1), ("mask", 1)])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_loss_that_draws_much_is_measured_with_the_same_numbers(seed, reduction, count, eager, monkeypatch):
    """A flow or a diffusion model draws times and noise, each for itself, in its loss cell."""

    def flow(self, x, y):
        noise, time = ops.randn(y.shape), ops.rand(y.shape[0], 1)
        error = (self.net(x) + (1 - time) * noise + time * y).square()
        mask = (ops.rand(y.shape) < 0.5).astype(ms.float32)
        return {"mean": error.mean, "sum": error.sum, "mask": lambda: (error * mask).sum() / mask.sum()}[reduction]()

    monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", seed)
    step = step_of(Of(flow), learning_rate=1e-3)
    assert len(said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(4)])) == count
    assert ms.get_seed() == seed


def said_of_groups(group):
    """Return what is said of advantages of the answers to a prompt, in micro batches of 4 answers."""

    def grpo(self, x, y):
        rewards = y[:, 0].reshape(-1, min(group, x.shape[0]))
        advantages = (rewards - rewards.mean(1, keep_dims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        return -(self.net(x)[:, 0] * advantages.reshape(-1)).mean()

    assert len(X) == 16
    step = step_of(Of(grpo))
    return said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(4)])


@pytest.mark.parametrize("group, count", [(4, 0), (8, 1)])
def test_groups_of_rows_that_stay_together_are_right(group, count, network_mode):
    """Those of 8 answers are cut."""
    assert len(said_of_groups(group)) == count


def test_several_groups_in_a_micro_batch_are_right(eager):
    assert said_of_groups(2) == []


def test_a_token_mean_is_told_where_its_first_micro_batches_fit(eager):
    mask = np.repeat([1.0, 1.0, 1.0, 0.0], 4).astype(np.float32) * np.ones((3, 1), np.float32)

    def masked(self, x, y, mask):
        return ((self.net(x) - y).square() * mask).sum() / (mask.sum() + 1e-6)

    (said,) = said_by(lambda: step_of(Of(masked))(Tensor(X), Tensor(Y), Tensor(mask.T)))
    assert "a mean over something else" in said


def test_what_cannot_be_measured_is_said(eager):
    def of_two_rows(self, x):
        return self.net(x).reshape(2, 3).square().mean()

    (said,) = said_by(lambda: step_of(Of(of_two_rows), 8)(Tensor(X)))
    assert f"{NAME}that could not be measured: a part of a batch raises" in said and "verify(" in said

    def noise(self, x):
        return self.net(x).square().mean() + CHANCE.random()

    (said,) = said_by(lambda: step_of(Of(noise))(Tensor(X)))
    assert "the same rows give another loss in each pass" in said

    def of_training(self, x):
        return self.net(x).square().mean() if self.training else self.net(x)

    assert said_by(lambda: step_of(Of(of_training))(Tensor(X))) == []


def test_a_batch_norm_by_function_is_found(eager):
    def normalised(self, x, y):
        out = ops.batch_norm(self.net(x), self.mean, self.var, self.gamma, self.beta, self.training)
        return (out - y).square().mean()

    ones, zeros = Tensor(np.ones(3, np.float32)), Tensor(np.zeros(3, np.float32))
    held = {"mean": zeros, "var": ones, "gamma": Parameter(ones, "gamma"), "beta": Parameter(zeros, "beta")}
    (said,) = said_by(lambda: step_of(Of(normalised, **held))(Tensor(X), Tensor(Y)))
    assert "statistics of the batch" in said


def test_all_rows_that_are_nan_are_no_finding(eager):
    step = step_of(nn.WithLossCell(net(), nn.MSELoss()))
    assert said_by(lambda: step(Tensor(X * np.nan), Tensor(Y))) == []


@pytest.mark.parametrize("training", [True, False])
def test_state_that_the_forward_pass_changes_is_named_once(training, network_mode):
    def centred(self, x):
        out = self.net(x)
        ops.assign(self.centre, 0.9 * self.centre + 0.1 * ops.stop_gradient(out.mean(0)))
        return (out - self.centre).square().mean()

    cell = Of(centred, centre=Parameter(Tensor(np.zeros(3, np.float32)), "centre", requires_grad=False))
    step = step_of(cell)
    said = said_by(lambda: [step(Tensor(X)) for _ in range(2)])
    assert len([each for each in said if "but it changes 'centre'" in each]) == 1


def test_a_batch_norm_is_no_such_state(eager):
    step = step_of(nn.WithLossCell(nn.SequentialCell(net(), nn.BatchNorm1d(3)), nn.MSELoss()))
    assert not [each for each in said_by(lambda: step(Tensor(X), Tensor(Y))) if "it changes" in each]


def over_first(cell, x, y):
    """GradNorm's weights are over the losses of the first batch."""
    loss = (cell.net(x) - y).square().mean()
    cell.first = ops.stop_gradient(loss) if cell.first is None else cell.first
    return loss / cell.first


def annealed(cell, x, y):
    """A term that grows with each call, of which a batch has four."""
    cell.calls += 1
    return (cell.net(x) - y).square().mean() + cell.calls / 100 * cell.net(x).square().mean()


def noted(cell, x, y):
    """Attributes that nothing reads, or that are the same for all rows."""
    cell.calls += 1
    cell.output = cell.net(x)
    cell.ones = ops.ones((3,), ms.float32) if cell.ones is None else cell.ones
    return (cell.output * cell.ones - y).square().mean()


def weights_and_words(function, micro_size, accumulation_steps=1, batches=8):
    """Train a loss that sets attributes with as many rows per update, as one batch of MindSpore's step if 0."""
    cell = Of(function, first=None, calls=0, ones=None)
    optimizer = nn.SGD(cell.trainable_params(), 0.05)
    step = nn.TrainOneStepCell(cell, optimizer)
    if micro_size:
        step = TrainOneStepCell(GradAccumulation(cell, micro_size), optimizer, accumulation_steps=accumulation_steps)
    step.set_train()

    def run():
        for _ in range(batches):
            for rows in np.split(np.arange(len(X)), accumulation_steps):
                step(Tensor(X[rows]), Tensor(Y[rows]))

    said = said_by(run)
    return np.concatenate([each.asnumpy().ravel() for each in cell.trainable_params()]), said


@pytest.mark.parametrize("micro_size, accumulation_steps", [(4, 1), (1, 4)])
@pytest.mark.parametrize("function, names", [(over_first, "'Of.first'"), (annealed, "'Of.calls'"), (noted, None)])
def test_an_attribute_of_the_first_micro_batch_is_named_if_the_loss_reads_it(
    function, names, micro_size, accumulation_steps, eager
):
    expected, _ = weights_and_words(function, 0)
    weights, said = weights_and_words(function, micro_size, accumulation_steps)
    assert np.allclose(weights, expected, rtol=1e-5, atol=1e-6) == (names is None)
    begin = "For 'GradAccumulation', the loss of a micro batch should not depend on those before it, but the first one "
    assert [each.startswith(f"{begin}sets {names}, with which ") for each in said] == [True] * (names is not None)


class MaskedMean(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = net()

    def construct(self, x, y, mask):
        return ((self.net(x) - y).square().mean(-1) * mask).sum() / (mask.sum() + 1e-3)


@pytest.mark.parametrize("precision", ["fp16", "fp16_apex"])
def test_half_precision_has_a_tolerance_of_its_own(precision, eager):
    step = step_of(nn.WithLossCell(net(), nn.MSELoss()), mixed_precision=precision)
    assert said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(4)]) == []
    step = step_of(MaskedMean(), mixed_precision=precision)
    assert len(said_by(lambda: step(Tensor(X), Tensor(Y), Tensor(MASK)))) == 1


def test_a_larger_graph_says_that_it_does_not_measure(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    inputs = (Tensor(X), Tensor(Y))
    step, called = (step_of(nn.WithLossCell(net(), nn.MSELoss()), 2) for _ in range(2))
    called(*inputs)
    (said,) = said_by(lambda: Around(step)(*inputs))
    assert "the step is part of a larger graph" in said
    assert said_by(lambda: Around(called)(*inputs)) == []


def test_a_sink_is_measured_before_its_graph(eager, monkeypatch):
    monkeypatch.setattr("ms_gradaccum.loops.model.device_target", lambda: "Ascend")
    monkeypatch.setattr(ms.Model, "_train", lambda *args, **kwargs: None)
    cell, _ = build(WRONG["sum_of_squares"])
    model = Model(GradAccumulation(cell, 4), optimizer=nn.SGD(cell.trainable_params(), 1e-4))
    data = ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(8)
    (said,) = said_by(lambda: model.train(1, data, dataset_sink_mode=True))
    assert NAME in said and not model.train_network.body.is_unmeasured


# ---- no false alarm


def alarm(seed, batches=4):
    """Return the findings of measurements of a random loss that is right. Nothing is trained."""
    loss = RandomLoss(seed).set_train()
    numbers = np.random.default_rng(seed)
    parts = int(numbers.integers(2, 9))
    precision = "fp16_naive" if seed % 5 == 4 and loss.kind != "log of a sum" else None
    settings = StepSettings.checked("Model", mixed_precision=precision)
    network = GradAccumulation(loss, parts, weighted=loss.weighted).in_precision("Model", settings.precision)
    check = LossCheck(network, loss.trainable_params(), settings, half=precision is not None, several=False)
    rows = [int(numbers.integers(parts + 1, 40)) for _ in range(batches)]
    return said_by(lambda: [check.after_batch(parts, loss.batch(each)) for each in rows])


def test_right_losses_are_not_named(eager):
    # All kinds in float32 and in 16 bits; from the second batch on gradients are compared, too.
    assert {seed: said for seed in range(5 * len(KINDS)) if (said := alarm(seed, batches=2))} == {}


def test_compiled_right_losses_are_not_named(monkeypatch):
    """One of each kind; ``python tests/training/test_loss_check.py`` compiles 200."""
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    assert {seed: said for seed in range(len(KINDS)) if (said := alarm(seed, batches=1))} == {}


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    print({seed: said for seed in range(200) if (said := alarm(seed))})
