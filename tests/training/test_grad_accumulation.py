"""GradAccumulation next to the whole batch: the same loss, weight and gradient however it is split."""

import functools

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from open_window import buffer_of
from refusal import warns
from step_probe import Learned, keeping_step, number, tensors
from tiers import share_of

from ms_gradaccum import GradAccumulation

# What the compiler makes of it is tested where a test asks for a mode.
pytestmark = pytest.mark.usefixtures("eager")


class Regression(nn.Cell):
    def __init__(self, columns):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(-1, 1, columns), ms.float32), "weight")
        self.bias = Parameter(Tensor([0.5], ms.float32), "bias")

    def construct(self, x, y):
        return ops.square((x * self.weight).sum(-1) + self.bias - y).mean()


def regression_by_hand(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = x @ np.linspace(-1, 1, x.shape[1]).astype(np.float32) + 0.5 - y
    return np.mean(error**2), [2 * error @ x / len(x), np.array([2 * np.mean(error)])]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5) | st.lists(st.integers(1, 20), min_size=1, max_size=1)


@functools.cache
def windows_of_many(columns):
    return keeping_step(Regression(columns), accumulation_steps=100)


@settings(max_examples=share_of(60), deadline=None)
@given(sizes=SIZES, micro_size=st.integers(1, 25), columns=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_any_split_of_batches_of_any_sizes_has_the_gradient_of_all_rows(sizes, micro_size, columns, seed):
    step = windows_of_many(columns)
    step.network.micro_size = micro_size  # the split alone knows it: the graphs are the same
    # The errors of all rows are near -10, so that no gradient is a difference of large numbers.
    random = np.random.default_rng(seed)
    x = random.uniform(0.5, 1.5, (sum(sizes), columns)).astype(np.float32)
    y = random.uniform(8, 12, sum(sizes)).astype(np.float32)
    for end, size in zip(np.cumsum(sizes), sizes):
        assert not number(step(*tensors(x[end - size : end], y[end - size : end])).updated)
    output = step.flush()
    loss, gradients = regression_by_hand(x, y)
    assert number(output.weight) == sum(sizes) and output.is_updated
    assert number(output.loss) == pytest.approx(loss, rel=1e-5)
    for found, expected in zip(step.optimizer.gradients(), gradients):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
    assert number(output.grad_norm) == pytest.approx(norm, rel=1e-5)


class Loss(nn.Cell):
    def __init__(self, form):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")
        self.form = form

    def construct(self, x, y):
        return self.form(ops.square(x * self.weight - y))


def scalar(errors):
    return errors.mean()


def pair(errors):
    return errors.sum(), errors.shape[0]


# What the compiler need not read.
MEANS = {
    "scalar": scalar,
    "one element": lambda errors: errors.mean().reshape(1),
    "float64": lambda errors: errors.mean().astype(ms.float64),
    "float16": lambda errors: errors.mean().astype(ms.float16),
    "with other outputs": lambda errors: (errors.mean(), errors, 3),
    "a list": lambda errors: [errors.mean(), errors],
}
PAIRS = {
    "pair": pair,
    "pair of elements": lambda errors: (errors.sum().reshape(1), ops.ones_like(errors).sum().reshape(1)),
    "pair with bool count": lambda errors: (errors.sum(), (errors >= 0).sum(), errors),
    "pair of floats": lambda errors: [errors.sum().astype(ms.float16), 1.0 * errors.shape[0]],
}
FORMS = MEANS | PAIRS


@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_which_a_network_may_return_its_loss(name):
    # Seven rows in three micro batches, y = 2x: the loss is mean(x^2) = 20, its gradient -2 mean(x^2).
    x = np.arange(1, 8, dtype=np.float32)
    step = keeping_step(Loss(FORMS[name]), 3, weighted=name in PAIRS, accumulation_steps=2)
    output = step(*tensors(x, 2 * x))
    assert (number(output.loss), number(output.weight)) == (pytest.approx(20, rel=1e-4), 7)
    assert output.loss.dtype == output.weight.dtype == ms.float32
    # A share of 3 of 7 rows is rounded where it reaches a loss in 16 bits.
    assert number(buffer_of(step).sums[0]) == pytest.approx(7 * -40, rel=1e-3 if name == "float16" else 1e-4)


def test_a_weight_has_no_gradient_of_its_own():
    own_weight = Learned([2.0], lambda weight, x: ((weight * x).sum(), weight.sum() * x.shape[0]))
    # 6 / (2 * 3): the weight counts and is not trained, by a step nor as a cell.
    step = keeping_step(own_weight, 2, weighted=True)
    step(Tensor(np.float32([1, 2, 3])))
    assert step.optimizer.gradients() == [1]
    step.set_train()  # As a cell it splits its batch in training alone.
    with warns("train cell around"):
        gradients = ops.grad(step.network, None, step.weights)(Tensor(np.float32([1, 2, 3])))
    assert [number(gradient) for gradient in gradients] == [1]


@pytest.mark.parametrize("weighted", [False, True])
def test_as_a_cell_it_returns_the_weighted_mean_loss_and_differentiates_as_the_whole_batch(weighted, mode):
    x = np.arange(1, 8, dtype=np.float32)
    loss_cell = Loss(pair if weighted else scalar)
    cell = GradAccumulation(loss_cell, 3, weighted=weighted).set_train()
    with warns("train cell around"):
        loss, (gradient,) = ops.value_and_grad(cell, None, loss_cell.trainable_params())(*tensors(x, 2 * x))
    assert (loss.shape, loss.dtype, number(loss), number(gradient)) == ((), ms.float32, 20, -40)
