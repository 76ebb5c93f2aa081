"""Networks that return several losses: the user says what becomes of all but the first."""

import functools

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from quick_mindspore import eagerly
from refusal import refuses
from step_probe import KeepGradients, Learned, keeping_step, number, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell, verify

X = np.float32([[1, 2], [3, 1], [0, 2], [2, 2], [1, 1]])
Y = np.float32([[1], [0], [2], [1], [3]])


class Losses(nn.Cell):
    def __init__(self, form):
        super().__init__()
        self.first, self.second = (
            Parameter(Tensor(np.ones((2, 1), np.float32)), "first"),
            Parameter(Tensor([2.0]), "second"),
        )
        self.form = form

    def construct(self, x, y):
        out = ops.matmul(x, self.first)
        return self.form(ops.square(out - y).mean(), (out * self.second).mean(), ops.square(self.second).mean(), out)


def three(lm, mtp, aux, logits):
    return lm, mtp, aux


def logits_between(lm, mtp, aux, logits):
    return [lm, logits, mtp, 3, None, logits.argmax(), (logits, aux)]


def in_a_dict(lm, mtp, aux, logits):
    return lm, {"mtp": mtp, "logits": logits}, {"all": ([aux], 3), "none": ()}


def logits_alone(lm, mtp, aux, logits):
    return lm, logits, None, 0.5, logits.argmax()


def number_per_row(lm, mtp, aux, logits):
    return lm, logits.reshape(-1)


@functools.cache
def by_mindspore(count):
    """The sum of so many losses and its gradients, by MindSpore's own step on the whole batch."""
    network = Losses(lambda *losses: sum(losses[:count]))
    optimizer = KeepGradients(network.trainable_params())
    with eagerly():
        loss = nn.TrainOneStepCell(network, optimizer)(*tensors(X, Y))
    return number(loss), optimizer.gradients()


def check_trains(form, losses, expected, micro_size):
    loss_cell = Losses(form)
    step = TrainOneStepCell(
        GradAccumulation(loss_cell, micro_size, losses=losses), KeepGradients(loss_cell.trainable_params())
    )
    output = step(*tensors(X, Y))
    loss, gradients = expected
    assert number(output.loss) == pytest.approx(loss)
    for found, wanted in zip(step.optimizer.gradients(), gradients):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("form", [three, logits_between, in_a_dict])
def test_a_sum_trains_all_losses_and_first_the_first(form, network_mode):
    first, total = by_mindspore(1), by_mindspore(3)
    assert abs(first[0] - total[0]) > 1  # the first alone is another training
    check_trains(form, "sum", total, 2)
    check_trains(form, "first", first, 2)


@pytest.mark.parametrize("losses", [None, "sum", "first"])
def test_further_outputs_that_are_no_losses_need_no_word(losses, network_mode):
    # Micro batches of one row: what has a number per row has one element, and is no loss all the same.
    check_trains(logits_alone, losses, by_mindspore(1), 5)
    check_trains(number_per_row, losses, by_mindspore(1), 5)


@pytest.mark.parametrize("form", [three, logits_between, in_a_dict])
def test_several_losses_without_a_word_are_refused(form, network_mode):
    step = keeping_step(Losses(form), 2)
    before = [parameter.asnumpy().copy() for parameter in step.get_parameters()]
    with refuses(ValueError, "'losses'", "losses='sum' to train"):
        step(*tensors(X, Y))
    assert all(np.array_equal(a, b.asnumpy()) for a, b in zip(before, step.get_parameters()))


def pairs(form):
    return Learned([1.0], lambda weight, x: form((weight * x).sum(), ops.ones_like(x).sum(), (weight * x).sum() ** 2))


@pytest.mark.parametrize(
    ("form", "count"),
    [(lambda loss, weight, aux: (loss, weight, aux), 2), (lambda loss, weight, aux: (loss, weight, aux, (aux, 3)), 3)],
)
def test_losses_beside_the_pair_are_refused_and_left_out_on_demand(form, count, eager):
    def step(losses):
        network = pairs(form)
        loss_cell = GradAccumulation(network, 2, weighted=True, losses=losses)
        return TrainOneStepCell(loss_cell, KeepGradients(network.trainable_params()), compile=True)

    with refuses(ValueError, "'losses'", f"{count} scalar losses"):
        step(None)(Tensor(X))
    assert number(step("first")(Tensor(X)).weight) == X.size


@pytest.mark.parametrize(
    ("losses", "weighted", "error", "key"),
    [
        ("all", False, ValueError, "'all'"),
        (1, False, TypeError, "of type int"),
        ("sum", True, ValueError, "weighted=True"),
    ],
)
def test_what_is_no_word_is_refused(losses, weighted, error, key):
    with refuses(error, "'losses'", key):
        GradAccumulation(Losses(three), 2, weighted=weighted, losses=losses)


def test_the_word_goes_with_the_cell_into_half_precision_and_verify(eager):
    network = Losses(three)
    loss_cell = GradAccumulation(network, 2, losses="sum")
    assert verify(loss_cell, tensors(X, Y), None).equal
    assert verify(loss_cell, tensors(X, Y), None, reference=network).equal
    weighted = GradAccumulation(pairs(lambda *losses: losses), 2, losses="first", weighted=True)
    assert verify(weighted, tensors(X), None).equal
    step = TrainOneStepCell(loss_cell, KeepGradients(network.trainable_params()), mixed_precision="fp16")
    assert number(step(*tensors(X, Y)).loss) == pytest.approx(by_mindspore(3)[0], rel=2e-3)
