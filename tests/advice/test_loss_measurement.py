"""The measurement of a loss: it leaves no trace, comes when it should, and is not fooled."""

import collections
import itertools
import logging
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from unittest.mock import Mock

import mindspore as ms
import numpy as np
import pytest
from losses_as_written import MASK, WRONG, X, Y, build, net
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from open_window import compiled_micro_steps, window_of
from random_losses import KINDS, RandomLoss
from refusal import refuses
from step_probe import Around

from ms_gradaccum import Accumulator, GradAccumulation, GradAccumulationWarning, Model, TrainOneStepCell
from ms_gradaccum.advice.advisor import Advisor
from ms_gradaccum.advice.loss_measurement import LossMeasurement

BEGINS = (
    "the loss of",
    "the sums and weights",
    "the gradient of two",
    "the forward pass",
    "the batches",
    "a check that only warns",
)


def said_by(run):
    """Return the warnings of the measurement in a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(each.message) for each in caught if each.category is GradAccumulationWarning]
    return [text for text in texts if text.partition("', ")[2].startswith(BEGINS)]


def step_of(cell, micro_size=4, weighted=False, learning_rate=0.05, batch_axis=0, **settings):
    network = GradAccumulation(cell, micro_size, weighted=weighted, batch_axis=batch_axis)
    return TrainOneStepCell(network, nn.SGD(cell.trainable_params(), learning_rate), **settings).set_train()


def said_of(cell, *inputs, batches=4, **settings):
    step = step_of(cell, **settings)
    return said_by(lambda: [step(*inputs) for _ in range(batches)])


class Of(nn.Cell):
    """A loss cell that is a function of itself and its inputs."""

    def __init__(self, function, out=3, **held):
        super().__init__()
        self.net, self.function = net(out), function
        for name, value in held.items():
            setattr(self, name, value)

    def construct(self, *inputs):
        return self.function(self, *inputs)


def squares(cell, x, y):
    return (cell.net(x) - y).square().mean()


# ---- no trace

GENERATOR = np.random.default_rng(0)
CALLS = 0
OF_MODULE = types.ModuleType("users_state")
OF_THREAD = threading.local()


def noting():
    """A function that keeps a number as its attribute."""
    noting.calls += 1


class Everything(nn.Cell):
    """A network that changes all that a forward pass can change, in its cells and outside of them."""

    of_class = 0

    def __init__(self):
        super().__init__()
        type(self).of_class = noting.calls = OF_MODULE.calls = OF_THREAD.calls = 0
        self.by_key, self.waiting = weakref.WeakKeyDictionary({OF_THREAD: 0}), queue.Queue()
        self.net, self.norm, self.drop = net(), nn.BatchNorm1d(3), nn.Dropout(p=0.4)
        self.frozen = nn.Dense(3, 3, weight_init="ones").set_train(False)
        self.count = Parameter(Tensor(0.0), "count", requires_grad=False)
        self.register_buffer("queue", Tensor(np.zeros(4, np.float32)))
        self.calls, self.seen, self.array, self.best = 0, [], np.zeros(2), {"loss": None}
        self.own, self.hidden = random.Random(3), [nn.BatchNorm1d(3).set_train()]
        kept = 0

        def nonlocal_count():
            nonlocal kept
            kept += 1
            return kept

        self.counter = nonlocal_count

    def construct(self, x, y):
        global CALLS
        CALLS += 1
        self.calls += 1
        self.counter()
        noting()
        type(self).of_class += 1
        OF_MODULE.calls += 1
        OF_THREAD.calls += 1
        self.by_key[OF_THREAD] += 1
        self.waiting.put(self.calls)
        self.seen.append(tuple(x.shape))
        self.array += 1
        self.best["loss"] = self.calls
        ops.assign_add(self.count, Tensor(1.0))
        self.queue[0] = self.queue[0] + 1
        noise = random.random() * np.random.rand() * self.own.random() * GENERATOR.random()
        out = self.drop(self.norm(self.net(x) + ops.standard_normal((1, 3)) * noise))
        out = ops.dropout(self.hidden[0](out), 0.2, self.training)
        return (self.frozen(out) - y).square().mean()


def hook(log):
    return lambda cell, inputs, output: log.append(tuple(output.shape))


def everything_trained(check_loss, batches=5):
    global CALLS
    CALLS = 0
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
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
    plain += [Everything.of_class, noting.calls, OF_MODULE.calls, OF_THREAD.calls]
    plain += [cell.by_key[OF_THREAD], [cell.waiting.get() for _ in range(cell.waiting.qsize())]]
    chance = [random.random(), np.random.rand(), cell.own.random(), ops.standard_normal((2,)).asnumpy().tolist()]
    return [losses, [number.tobytes() for number in numbers], modes, plain, chance, CALLS, cell.counter()]


def measured(monkeypatch):
    """Return a list that gets the numbers of the batches that are measured."""
    found = []
    measure = LossMeasurement.after_batch
    monkeypatch.setattr(
        LossMeasurement,
        "after_batch",
        lambda self, *args: (found.append(self.schedule.batches), measure(self, *args))[1],
    )
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("small", [2**16, 0])
def test_a_training_is_the_same_with_it_to_the_bit(small, eager, monkeypatch):
    monkeypatch.setattr("ms_gradaccum.backend.snapshot.SMALL_SIZE", small)
    monkeypatch.setattr("ms_gradaccum.backend.held_values._LARGE_ARRAY", 4 * small)
    # It goes on after a finding here: everything is measured.
    monkeypatch.setattr(Advisor, "_end_measuring", lambda self, text: None)
    batches = measured(monkeypatch)
    with_it = everything_trained(True)
    assert {1, 2, 4} <= {*batches}
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
    batches = measured(monkeypatch)
    found = []
    for check_loss in (True, False):
        ms.set_seed(3)
        cell = Compilable().set_train()
        optimizer = nn.Adam(cell.trainable_params(), 0.05)
        step = TrainOneStepCell(GradAccumulation(cell, 4), optimizer, check_loss=check_loss)
        losses = [float(step(Tensor(X), Tensor(Y)).loss.asnumpy()) for _ in range(3)]
        numbers = [each.asnumpy().tobytes() for each in [*optimizer.get_parameters(), *cell.get_parameters()]]
        found.append((losses, numbers))
    assert batches
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 3


def test_parameters_that_are_initialized_late_get_the_same_values(network_mode):
    """A measurement reads them first: it must do so in their order."""

    def weights(check_loss):
        ms.set_seed(1)
        np.random.seed(1)
        with no_init_parameters():
            network = nn.SequentialCell(nn.Dense(6, 8), nn.Tanh(), nn.Dense(8, 3))
            optimizer = nn.SGD(network.trainable_params(), 0.05)
        cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
        TrainOneStepCell(cell, optimizer, check_loss=check_loss)(Tensor(X), Tensor(Y))
        return [parameter.asnumpy() for parameter in network.get_parameters()]

    for found, expected in zip(weights(True), weights(False)):
        np.testing.assert_array_equal(found, expected)


def test_an_iterator_is_not_used_up(eager):
    def scaled(cell, x, y):
        return squares(cell, x, y) * next(cell.factors)

    cell = Of(scaled, factors=itertools.count(1))
    (said,) = said_of(cell, Tensor(X), Tensor(Y), batches=3)
    assert "the network holds an iterator (count)" in said
    assert next(cell.factors) == 13


def test_an_iterator_that_the_forward_pass_leaves_alone_is_measured(eager, tmp_path):
    with open(tmp_path / "log", "w") as log:
        for held in (itertools.count(), iter([1, 2]), map(str, iter([1])), log):
            cell, inputs = build(WRONG["sum_of_squares"])
            cell.held = [held]
            (said,) = said_of(cell, *inputs, batches=1, learning_rate=1e-4)
            assert "the loss of two micro batches together" in said


def test_tensors_of_strings_are_joined(eager):
    def of_words(cell, x, y, words):
        return squares(cell, x, y) * len(str(words.asnumpy()[0]))

    words = Tensor(np.array(["a"] * len(X)))
    assert said_of(Of(of_words), Tensor(X), Tensor(Y), words) == []


# ---- when


def test_batches_1_2_4_8_are_measured_without_an_end(eager, monkeypatch):
    batches = measured(monkeypatch)
    assert said_of(Of(squares), Tensor(X), Tensor(Y), batches=130) == []
    assert batches == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_number_that_a_forward_pass_changes_makes_no_batch_due(eager, monkeypatch):
    def counted(cell, x, y):
        cell.calls += 1
        return squares(cell, x, y)

    batches = measured(monkeypatch)
    assert said_of(Of(counted, calls=0), Tensor(X), Tensor(Y), batches=9) == []
    assert batches == [1, 2, 4, 8]


def test_the_micro_batch_with_the_smallest_loss_is_joined_at_each_batch(eager):
    """The loss is the larger of two means, and right as long as all micro batches have the same of the two."""

    def larger(cell, x, y):
        return ops.maximum(cell.net(x).sum() * 0.0 + x.mean(), Tensor(0.0))

    rows = np.ones((8, 6), np.float32)
    later = rows * np.array([2, 2, -1, -1, 4, 4, 3, 3], np.float32)[:, None]
    step = step_of(Of(larger))
    assert said_by(lambda: step(Tensor(rows), Tensor(rows))) == []
    (said,) = said_by(lambda: step(Tensor(later), Tensor(rows)))
    assert "is not the mean of their losses (33.3 % apart)" in said


def test_a_wrong_loss_is_measured_once(eager, monkeypatch):
    cell, inputs = build(WRONG["sum_of_squares"])
    batches = measured(monkeypatch)
    assert len(said_of(cell, *inputs, batches=9, learning_rate=1e-4)) == 1
    assert batches == [1]


@pytest.mark.parametrize("settings", [{"check_loss": False}, {"micro_size": 1}])
def test_nothing_is_measured_where_there_is_nothing_to_tell(settings, eager, monkeypatch):
    cell, inputs = build(WRONG["sum_of_squares"])
    batches = measured(monkeypatch)
    assert said_of(cell, *inputs, learning_rate=1e-4, **settings) == []
    assert batches == []


def test_a_number_that_the_loop_changes_is_measured_at_once(eager):
    """A term that comes late, as the weight of a divergence that a loop raises."""

    def with_term(cell, x, y):
        return squares(cell, x, y) + cell.beta * cell.net(x).sum() ** 2

    for beta, raised in ((0.0, 1e-3), (Parameter(Tensor(0.0), "beta", requires_grad=False), Tensor(1e-3))):
        cell = Of(with_term, beta=beta)
        step = step_of(cell, learning_rate=1e-4)
        assert said_by(lambda step=step: [step(Tensor(X), Tensor(Y)) for _ in range(5)]) == []
        if isinstance(beta, Parameter):
            beta.set_data(raised)
        else:
            cell.beta = raised
        (said,) = said_by(lambda step=step: step(Tensor(X), Tensor(Y)))
        assert "the loss of two micro batches together" in said


@pytest.mark.parametrize("name", ["sum_of_squares", "masked_mean_eps", "in_batch_negatives"])
@pytest.mark.parametrize("micro_size", [16, 8])
def test_micro_batches_of_one_and_of_two_rows(name, micro_size, eager):
    cell, inputs = build(WRONG[name])
    assert len(said_of(cell, *inputs, micro_size=micro_size, learning_rate=1e-3)) == 1
    assert said_of(Of(squares), Tensor(X), Tensor(Y), micro_size=micro_size) == []


@pytest.mark.parametrize("lengths, count", [((5, 3, 4, 2), 1), ((5, 5, 5, 5), 0)])
def test_batches_of_other_lengths_are_said_once(lengths, count, network_mode):
    def tagged(cell, x, y):
        return ops.cross_entropy(cell.dense(x).reshape(-1, 3), y.reshape(-1))

    cell = Of(tagged, dense=nn.Dense(2, 3))
    step = step_of(cell, 1, accumulation_steps=4)
    rng = np.random.default_rng(0)

    def run():
        for length in lengths * 2:
            x = rng.normal(size=(1, length, 2)).astype(np.float32)
            step(Tensor(x), Tensor(np.zeros((1, length), np.int32)))

    said = said_by(run)
    assert ["have different lengths ((1, 5, 2) and (1, 3, 2))" in each for each in said] == [True] * count


def annealed(cell, x, y, weight):
    out = cell.net(x)
    return (out - y).square().mean() + weight * out.square().mean()


def annealed_largest(cell, x, y, weight):
    out = cell.net(x)
    return (out - y).square().mean() + weight * out.square().mean(1).max()


@pytest.mark.parametrize("as_input", [Tensor, float])
@pytest.mark.parametrize("function, count", [(annealed, 0), (annealed_largest, 1)])
def test_a_weight_that_is_another_in_each_batch_is_no_finding(function, count, as_input, network_mode):
    """Both micro batches were measured with the last batch's weight, and compared with losses of their own weights."""
    step = step_of(Of(function), 1, accumulation_steps=4)
    parts = np.split(np.arange(len(X)), 4)

    def train():
        for number in range(8):
            rows = parts[number % 4]
            step(Tensor(X[rows]), Tensor(Y[rows]), as_input(2.0 + number))

    assert len(said_by(train)) == count


def test_a_filter_that_ignores_everything_leaves_the_logger(eager, caplog):
    def words(category):
        cell, inputs = build(WRONG["sum_of_squares"])
        caplog.clear()
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "ms_gradaccum"):
            warnings.simplefilter("ignore", category)
            step_of(cell, learning_rate=1e-4)(*inputs)
        return [each.message for each in caplog.records if "is not the mean" in each.message]

    assert len(words(Warning)) == 1
    assert words(GradAccumulationWarning) == []


# ---- what is found, and what is not


class Weighted(nn.Cell):
    """A loss that returns its sum and its weight, right or wrong."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = net(), kind

    def construct(self, x, y, mask):
        each = (self.net(x) - y).square().mean(-1) * mask
        if self.kind == "right":
            return each.sum(), mask.sum()
        if self.kind == "a mean":
            return each.sum() / (mask.sum() + 1e-6), mask.sum()
        if self.kind == "a constant":
            return each.sum(), Tensor(4.0)
        return each.sum(), ops.maximum(mask.sum(), Tensor(3.0))


@pytest.mark.parametrize("kind", ["right", "a mean", "a constant", "at least 3"])
def test_sums_and_weights_must_add_up(kind, network_mode):
    said = said_of(Weighted(kind), Tensor(X), Tensor(Y), Tensor(MASK), weighted=True)
    assert ["do not add up" in each for each in said] == [True] * (kind != "right")


@pytest.mark.parametrize("reduction, count", [("mean", 0), ("sum", 1)])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_loss_that_draws_much_is_measured_with_the_same_numbers(seed, reduction, count, eager, monkeypatch):
    """A flow or a diffusion model draws times and noise, each for itself, in its loss cell."""

    def flow(cell, x, y):
        noise, time = ops.randn(y.shape), ops.rand(y.shape[0], 1)
        error = (cell.net(x) + (1 - time) * noise + time * y).square()
        return error.mean() if reduction == "mean" else error.sum()

    monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", seed)
    assert len(said_of(Of(flow), Tensor(X), Tensor(Y), learning_rate=1e-3)) == count
    assert ms.get_seed() == seed


def test_a_term_that_all_rows_have_alike_is_found_beside_random_numbers(eager):
    def penalized(cell, x, y):
        penalty = x.shape[0] * cell.net[0].weight.square().sum()
        return (ops.dropout(cell.net(x), 0.1, True) - y).square().mean() + 0.1 * penalty

    assert len(said_of(Of(penalized), Tensor(X), Tensor(Y), learning_rate=1e-4)) == 1


@pytest.mark.parametrize("others, is_found", [((1.0, -1.0), False), ((2.0, 0.1), False), ((1.0, 1.2), True)])
def test_four_draws_that_lie_together_by_chance_are_no_finding(others, is_found):
    draws = iter([1.0, 1.1, 1.0, 1.1, *others * 6])
    measurement = Mock()
    LossMeasurement._by_chance(measurement, lambda: np.array([next(draws)]), 1e-6)
    assert measurement._of_losses.called == is_found and next(draws, None) is None


def test_dropout_of_any_kind_is_no_finding(eager):
    class DropPath(nn.Cell):
        def construct(self, x):
            return x * (ops.rand(x.shape[0], 1) > 0.5) if self.training else x

    def dropping(cell, x, y):
        return (ops.dropout(cell.drop(cell.net(x)), 0.5, cell.training) - y).square().mean()

    for seed in range(3):
        ms.set_seed(seed)
        cell = Of(dropping, drop=nn.SequentialCell(nn.Dropout(p=0.5), DropPath()))
        assert said_of(cell, Tensor(X), Tensor(Y)) == []


def test_a_class_named_after_dropout_hides_nothing(eager):
    class DropoutHead(nn.Cell):
        def construct(self, x):
            return x.sum() if self.training else x.mean()

    assert len(said_of(Of(lambda cell, x: cell.head(cell.net(x)), head=DropoutHead()), Tensor(X), batches=1)) == 1


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("keep", [0.8, 0.95])
def test_what_is_seldom_dropped_is_no_finding(keep, batch, eager):
    """Passes that draw the same numbers by chance do not make those that miss a finding."""

    def stochastic_depth(cell, x, y):
        rows = 1 if batch else x.shape[0]
        out = cell.net(x)
        return (out + ops.tanh(out) * (ops.rand(rows, 1) < keep) / keep - y).square().mean()

    for seed in range(6):
        ms.set_seed(seed)
        assert said_of(Of(stochastic_depth), Tensor(X), Tensor(Y)) == []


def of_groups(group):
    """Return a loss of advantages of the answers to a prompt, for micro batches of 4 answers."""

    def grpo(cell, x, y):
        rewards = y[:, 0].reshape(-1, min(group, x.shape[0]))
        advantages = (rewards - rewards.mean(1, keep_dims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        return -(cell.factor * cell.net(x)[:, 0] * advantages.reshape(-1)).mean()

    return Of(grpo, factor=1.0)


def said_of_groups(group):
    return said_of(of_groups(group), Tensor(X), Tensor(Y))


@pytest.mark.parametrize("group, count", [(2, 0), (4, 0), (8, 1)])
def test_groups_of_rows_that_stay_together_are_right(group, count, eager):
    """Those of 8 answers are cut."""
    assert len(said_of_groups(group)) == count


@pytest.mark.parametrize("rows", [7, 11])
def test_a_loop_gets_the_same_loss_from_a_batch_whose_gradient_was_measured(rows, eager):
    """The rows of a batch are a group, so that its gradient is compared with that of all rows of two batches."""

    def losses(check_loss):
        cell = Of(lambda cell, x, y: (cell.net(x) - y).square().reshape(-1, rows).mean())
        optimizer = nn.SGD(cell.trainable_params(), 0.05)
        accumulator = Accumulator(cell, optimizer, 2, check_loss=check_loss)
        found = []
        for _ in range(4):
            with accumulator.accumulate():
                found.append(accumulator.backward(Tensor(X[:rows]), Tensor(Y[:rows])).asnumpy().tobytes())
                accumulator.step()
        return found

    assert losses(True) == losses(False)


def test_groups_are_right_as_a_graph(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    assert said_of_groups(4) == []


def test_groups_are_right_as_a_graph_whose_number_has_changed(monkeypatch):
    """The training goes on with the number that was compiled; a graph for more rows would have the new one."""
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = of_groups(4)
    step = step_of(cell)
    assert said_by(lambda: step(Tensor(X), Tensor(Y))) == []
    cell.factor = 3.0
    assert said_by(lambda: step(Tensor(X), Tensor(Y))) == []


class Hidden(nn.Cell):
    """Losses that are means over rows in value, and not in their gradients."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = net(), kind

    def construct(self, x, y):
        out = self.net(x)
        each = (out - y).square().mean(-1)
        if self.kind == "right":
            return each.mean()
        aux = out.mean(0).square().sum()
        if self.kind == "subtracted again":
            return each.mean() + aux - ops.stop_gradient(aux)
        return aux / ops.stop_gradient(aux)


@pytest.mark.parametrize("kind, count", [("right", 0), ("subtracted again", 1), ("a share of itself", 1)])
def test_gradients_are_compared_by_the_training_program(kind, count, mode):
    said = said_of(Hidden(kind), Tensor(X), Tensor(Y), batches=3)
    assert ["the gradient of two micro batches" in each for each in said] == [True] * count


def test_a_sum_that_hides_from_the_loss_is_seen_op_by_op(eager):
    """An exchange keeps the number of rows; halves of the micro batches do not."""

    def with_sum(cell, x, y):
        aux = cell.net(x).square().sum()
        return squares(cell, x, y) + 0.1 * (aux - ops.stop_gradient(aux))

    (said,) = said_of(Of(with_sum), Tensor(X), Tensor(Y), batches=3, learning_rate=1e-3)
    assert "the gradient of two micro batches" in said


def test_a_term_of_the_gradient_alone_that_comes_late_is_seen(eager):
    def with_hidden_term(cell, x, y):
        aux = cell.net(x).mean(0).square().sum()
        return squares(cell, x, y) + cell.beta * (aux - ops.stop_gradient(aux))

    cell = Of(with_hidden_term, beta=0.0)
    step = step_of(cell)
    assert said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(5)]) == []
    cell.beta = 1.0
    (said,) = said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(3)])
    assert "the gradient of two micro batches" in said


def test_state_that_only_the_gradient_reads_is_seen(eager):
    """The value of the loss is always 1."""

    def hiding(cell, x, y):
        cell.weight = 0.8 * cell.weight + 0.6
        loss = squares(cell, x, y) + cell.weight * cell.net(x).abs().mean()
        return loss - ops.stop_gradient(loss) + 1.0

    (said,) = said_of(Of(hiding, weight=1.0), Tensor(X), Tensor(Y), batches=3)
    assert "the gradient of two micro batches" in said


class AddsAuxiliary(nn.Cell):
    """A loss gets the gradient of another one, whatever it is scaled by, as in mixtures of experts."""

    def construct(self, out, auxiliary):
        return out * 1.0

    def bprop(self, out, auxiliary, result, grad):
        return grad, ops.full_like(auxiliary, 0.1)


def test_a_gradient_with_a_scale_of_its_own_counts_once_for_each_batch(eager):
    """Micro batches of one batch add it several times; batches of a window have their mean, which is right."""

    def with_auxiliary(cell, x, y):
        out = cell.net(x)
        return (cell.adds(out, out.square().mean()) - y).square().mean()

    cell = Of(with_auxiliary, adds=AddsAuxiliary())
    (said,) = said_of(cell, Tensor(X), Tensor(Y), batches=3)
    assert "the gradient of two micro batches" in said
    step = step_of(Of(with_auxiliary, adds=AddsAuxiliary()), micro_size=1, accumulation_steps=2)
    half = len(X) // 2
    batches = [(Tensor(X[:half]), Tensor(Y[:half])), (Tensor(X[half:]), Tensor(Y[half:]))] * 3
    assert said_by(lambda: [step(*batch) for batch in batches]) == []


def test_rows_in_groups_that_halves_break_are_right(eager):
    def of_pairs(cell, x, y):
        pairs = (cell.net(x) - y).square().mean(-1).reshape(-1, 2)
        return (pairs[:, 0] * pairs[:, 1]).mean()

    assert said_of(Of(of_pairs), Tensor(X), Tensor(Y), micro_size=len(X) // 2, batches=3) == []


def test_a_finding_in_gradients_runs_nothing_op_by_op_where_the_training_is_compiled(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    monkeypatch.setattr("ms_gradaccum.training.micro_step.EagerMicroStep.__call__", None)
    step = step_of(Hidden("a share of itself"))
    (said,) = said_by(lambda: [step(Tensor(X), Tensor(Y)) for _ in range(3)])
    assert "the gradient of two micro batches" in said
    # Rows of two micro batches were compiled apart: they count for nothing in the training.
    (compiled,) = compiled_micro_steps(step).values()
    assert len(compiled.fixed) == 1


def test_half_precision_has_a_tolerance_of_its_own(eager):
    for precision in ("fp16", "fp16_apex"):
        assert said_of(nn.WithLossCell(net(), nn.MSELoss()), Tensor(X), Tensor(Y), mixed_precision=precision) == []
        wrong = nn.WithLossCell(net(), nn.MSELoss(reduction="sum"))
        said = said_of(wrong, Tensor(X), Tensor(Y), mixed_precision=precision, learning_rate=1e-4)
        assert len(said) == 1


def near_teacher(cell, x, y):
    """A divergence of 1e-3, of a network from one that it hardly differs from."""
    p, q = ops.log_softmax(cell.net(x), -1), ops.log_softmax(cell.net(x) * (1 + 0.02 * y), -1)
    return (ops.exp(q) * (q - p)).sum(-1).mean()


def at_teacher(cell, x, y):
    """A divergence of 0, of a network from itself: nothing but rounding is in it."""
    student = cell.net(x)
    return ops.kl_div(ops.log_softmax(student, -1), ops.softmax(ops.stop_gradient(student), -1), "batchmean")


def close_to_teacher(cell, x, y):
    """A divergence of 1e-6, from a teacher whose logits differ by 0.1 %, with a temperature of 4."""
    student = cell.net(x) / 4
    teacher = ops.stop_gradient(student * 1.001)
    return 16 * ops.kl_div(ops.log_softmax(student, -1), ops.softmax(teacher, -1), "batchmean")


def like_teacher(cell, x, y):
    student = cell.net(x)
    return 1 - ops.cosine_similarity(student, ops.stop_gradient(student), -1).mean()


def without_gradient(cell, x, y):
    """A loss whose gradient is nothing but rounding, since the length of a vector has no part in its direction."""
    direction = cell.net(x) / ops.norm(cell.net(x), dim=-1, keepdim=True)
    return 1 - (direction * ops.stop_gradient(y[:, :1] * direction)).sum(-1).mean()


def rounded(cell, x, y):
    return (squares(cell, x, y) + 1e6) - 1e6


def in_half(cell, x, y):
    """A mean in 16 bits, beside a part that hides the numbers to which it was rounded."""
    part = (cell.net(x) - y).astype(ms.float16).square().mean()
    return 0.37 * part.astype(ms.float32) + cell.net(x).abs().mean()


def sum_in_half(cell, x, y):
    part = (cell.net(x) - y).astype(ms.float16).square().sum()
    return part.astype(ms.float32) + cell.net(x).abs().mean()


@pytest.mark.parametrize(
    "function", [near_teacher, close_to_teacher, at_teacher, like_teacher, without_gradient, rounded, in_half]
)
def test_rounding_is_no_finding(function, network_mode):
    assert said_of(Of(function), Tensor(X), Tensor(Y), batches=8) == []


def test_a_sum_in_half_precision_is_no_rounding(network_mode):
    assert len(said_of(Of(sum_in_half), Tensor(X), Tensor(Y), batches=1, learning_rate=1e-3)) == 1


def test_a_sum_of_whole_numbers_is_no_rounding(eager):
    # The losses of the first batch are multiples of 4, for which 16 quanta would be more than a half of them.
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    network = nn.WithLossCell(nn.Dense(2, 1, weight_init="ones", bias_init="ones"), nn.MSELoss(reduction="sum"))
    (said,) = said_of(network, Tensor(x), Tensor(x[:, :1]), batches=1)
    assert "is not the mean of their losses (50 % apart)" in said


@pytest.mark.parametrize("rows", [16, 4])
def test_an_error_says_that_the_network_takes_the_whole_batch_alone(rows, mode):
    def fixed(cell, x, y):
        return (cell.net(x).reshape(rows, 3) - y.reshape(rows, 3)).square().mean()

    step = step_of(Of(fixed), 8)
    with pytest.raises(Exception) as caught:
        step(Tensor(X), Tensor(Y))
    first = str(caught.value).splitlines()[0]
    is_of_rows = "takes only the 16 rows of the batch" in first
    assert is_of_rows == (rows == 16)


class BoxLoss(nn.Cell):
    """Boxes that carry the number of their image in the batch, as detectors collate them."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, 4)

    def construct(self, images, boxes):
        numbers = boxes[..., 0].reshape(-1).astype(ms.int32)
        chosen = ops.gather_nd(self.dense(images), numbers.reshape(-1, 1))
        return ops.abs(chosen - boxes[..., 1:].reshape(-1, 4)).mean()


def test_numbers_of_images_in_labels_are_asked_for(eager):
    boxes = np.random.default_rng(0).random((4, 3, 5)).astype(np.float32)
    boxes[..., 0] = np.arange(4)[:, None]
    boxes[2, 1:] = 0  # Padding.
    with refuses(RuntimeError, "column 0 of 'boxes'"):
        step_of(BoxLoss(), 2)(Tensor(X[:4]), Tensor(boxes))


def test_all_rows_that_are_nan_are_no_finding(eager):
    assert said_of(Of(squares), Tensor(X * np.nan), Tensor(Y), batches=1) == []


def test_a_micro_batch_without_a_valid_row_is_said(network_mode):
    def masked_mean(cell, x, mask):
        return (cell.net(x).square().mean(-1) * mask).sum() / mask.sum()

    valid = np.arange(16) < 12
    (said,) = said_of(Of(masked_mean), Tensor(X), Tensor(valid.astype(np.float32)), batches=1)
    assert "is not the mean of their losses (one of them is not finite)" in said


def noted_by_hook(cell, x, y):
    """The loss of the outputs that a hook keeps."""
    out = cell.net(x)
    return (out - y).square().mean() + cell.kept[-1].abs().mean()


@pytest.mark.parametrize("name, count", [("abs", 0), ("sum", 1)])
def test_forward_hooks_are_measured(name, count, eager):
    kept = []
    cell = Of(noted_by_hook, kept=kept)
    cell.net[0].register_forward_hook(lambda inner, inputs, output: kept.append(getattr(output, name)()))
    assert len(said_of(cell, Tensor(X), Tensor(Y), batches=3, learning_rate=1e-3)) == count
    assert len(kept) == 12


# ---- state that micro batches see of each other


def over_first(cell, x, y):
    """GradNorm's weights are over the losses of the first batch."""
    loss = squares(cell, x, y)
    cell.first = ops.stop_gradient(loss) if cell.first is None else cell.first
    return loss / cell.first


def annealed(cell, x, y):
    """A term that grows with each call, of which a batch has four."""
    cell.calls += 1
    return squares(cell, x, y) + cell.calls / 100 * cell.net(x).square().mean()


def noted(cell, x, y):
    """Attributes that nothing reads, or that are the same for all rows."""
    cell.calls += 1
    cell.output = cell.net(x)
    cell.ones = ops.ones((3,), ms.float32) if cell.ones is None else cell.ones
    return (cell.output * cell.ones - y).square().mean()


SHARED = {"first": None, "queue": collections.deque(maxlen=4)}


def over_first_in_a_dict(cell, x, y):
    loss = squares(cell, x, y)
    SHARED["first"] = ops.stop_gradient(loss) if SHARED["first"] is None else SHARED["first"]
    return loss / SHARED["first"]


def queued(cell, x, y):
    """Outputs of earlier calls, as negatives."""
    out = cell.net(x)
    loss = squares(cell, x, y) + sum([(out.mean(0) - each).square().mean() for each in SHARED["queue"]])
    SHARED["queue"].append(ops.stop_gradient(out.mean(0)))
    return loss


STATES = [(over_first, "'Of.first'"), (annealed, "'Of.calls'"), (noted, None)]
STATES += [(over_first_in_a_dict, "an object"), (queued, "")]


@pytest.mark.parametrize("micro_size, accumulation_steps", [(4, 1), (1, 4)])
@pytest.mark.parametrize("function, names", STATES)
def test_state_is_said_if_the_loss_reads_it(function, names, micro_size, accumulation_steps, eager):
    SHARED.update(first=None, queue=collections.deque(maxlen=4))
    step = step_of(Of(function, first=None, calls=0, ones=None), micro_size, accumulation_steps=accumulation_steps)

    def run():
        for _ in range(3):
            for rows in np.split(np.arange(len(X)), accumulation_steps):
                step(Tensor(X[rows]), Tensor(Y[rows]))

    said = said_by(run)
    assert len(said) == (names is not None)
    assert not said or (names in said[0] and "micro batches see each other's state" in said[0])


def moving(cell, x, y):
    """A centre that moves with each micro batch, and with the loss that it is far from."""
    out = cell.net(x)
    ops.assign(cell.centre, 0.9 * cell.centre + 0.1 * ops.stop_gradient(out.mean(0)))
    return (out - cell.centre).square().mean()


def kept_for_a_callback(cell, x, y):
    loss = squares(cell, x, y)
    ops.assign(cell.centre, ops.stop_gradient(loss) * ops.ones((3,), ms.float32))
    return loss


@pytest.mark.parametrize("function, count", [(moving, 1), (kept_for_a_callback, 0)])
def test_parameters_that_the_forward_pass_changes(function, count, network_mode):
    centre = Parameter(Tensor(np.zeros(3, np.float32)), "centre", requires_grad=False)
    said = said_of(Of(function, centre=centre), Tensor(X), Tensor(Y), batches=3)
    assert ["see each other's state" in each for each in said] == [True] * count


# ---- graphs around a step


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
    monkeypatch.setattr("ms_gradaccum.loops.model.has_data_sink", lambda: True)
    monkeypatch.setattr(ms.Model, "_train", lambda *args, **kwargs: None)
    cell, _ = build(WRONG["sum_of_squares"])
    model = Model(GradAccumulation(cell, 4), optimizer=nn.SGD(cell.trainable_params(), 1e-4))
    data = ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(8)
    (said,) = said_by(lambda: model.train(1, data, dataset_sink_mode=True))
    assert "the loss of two micro batches together" in said and not window_of(model.train_network).advisor.is_unmeasured


# ---- no false alarm


def alarm(seed, batches=2):
    """Return the findings of a training with a random loss that is right."""
    loss = RandomLoss(seed)
    numbers = np.random.default_rng(seed)
    parts = int(numbers.integers(2, 9))
    precision = "fp16_naive" if seed % 5 == 4 and loss.kind != "log of a sum" else None
    step = step_of(loss, parts, weighted=loss.weighted, learning_rate=0.0, mixed_precision=precision)
    rows = [int(numbers.integers(parts + 1, 40)) for _ in range(batches)]
    return said_by(lambda: [step(*loss.batch(each)) for each in rows])


def test_right_losses_are_not_reported(eager):
    # All kinds in float32 and in 16 bits; in the second window gradients are compared, too.
    assert {seed: said for seed in range(5 * len(KINDS)) if (said := alarm(seed))} == {}


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    print({seed: said for seed in range(200) if (said := alarm(seed))})
