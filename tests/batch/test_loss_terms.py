"""Losses of several terms, each with a weight of its own: cross-entropy by tokens, an auxiliary loss by micro batch."""

import functools

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import sgd
from mindspore import Parameter, Tensor, nn, ops
from refusal import FOREIGN_TRAIN_CELL, raises, typed
from step_probe import KeepGradients, number

from ms_gradaccum import Accumulator, ClipByGlobalNorm, GradAccumulation, TrainOneStepCell


class TwoTerms(nn.Cell):
    """(sum of weight * token over the valid tokens, their number), and an auxiliary loss per micro batch.

    Tokens that are not above 0 are padding. The auxiliary loss, the square of weight * largest token, is that of
    a micro batch and no mean over its tokens.
    """

    def __init__(self, auxiliary_weight=1.0):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32([1.0, 2.0])), "weight")
        self.auxiliary_weight = auxiliary_weight

    def construct(self, tokens):
        valid = ops.cast(tokens > 0, ms.float32)
        linear = (self.weight[0] * tokens * valid).sum()
        auxiliary = ops.square(self.weight[1] * tokens.max())
        return (linear, valid.sum()), (auxiliary, self.auxiliary_weight)


# Four micro batches of 3 tokens, of which 1, 3, 2 and none count.
TOKENS = np.float32([[3, -1, 0], [1, 2, 5], [4, 4, -2], [-1, -1, -4]])


def by_hand(tokens, weight=(1.0, 2.0)):
    """Loss and gradient of micro batches of tokens in float64: two means, each over what it counts."""
    tokens = np.asarray(tokens, np.float64)
    valid, largest = tokens[tokens > 0], np.max(tokens, axis=-1)
    mean = valid.sum() / max(len(valid), 1)
    auxiliary = np.mean(largest**2)
    return weight[0] * mean + weight[1] ** 2 * auxiliary, [mean, 2 * weight[1] * auxiliary]


def with_one_denominator(tokens):
    """The gradient if the sums of both terms are divided by the number of tokens."""
    valid = tokens[tokens > 0]
    return [valid.sum() / len(valid), 4 * np.sum(np.max(tokens, axis=-1) ** 2) / len(valid)]


@functools.cache
def step_of_terms():
    return keeping_terms(TwoTerms())


def keeping_terms(loss_cell, micro_size=4):
    network = GradAccumulation(loss_cell, micro_size, weighted=True, terms=2)
    return TrainOneStepCell(network, KeepGradients(loss_cell.trainable_params()), compile=True)


def test_each_term_is_divided_by_its_own_weight():
    step = step_of_terms()
    output = step(Tensor(TOKENS))
    loss, gradient = by_hand(TOKENS)
    np.testing.assert_allclose(step.optimizer.gradients()[0], gradient, rtol=1e-6)
    assert number(output.loss) == pytest.approx(loss, rel=1e-6)
    assert number(output.grad_norm) == pytest.approx(np.hypot(*gradient), rel=1e-6)
    assert number(output.weight) == 6  # the tokens: what the first term counts
    # 4 micro batches count 6 tokens: a shared denominator would take the auxiliary loss for two thirds of it.
    wrong = with_one_denominator(TOKENS)
    assert wrong[0] == pytest.approx(gradient[0]) and wrong[1] == pytest.approx(gradient[1] * 4 / 6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 9), min_size=12, max_size=12))
def test_any_tokens_in_any_micro_batch(tokens):
    tokens = np.array(tokens, np.float32).reshape(4, 3)
    step = step_of_terms()
    output = step(Tensor(tokens))
    loss, gradient = by_hand(tokens)
    np.testing.assert_allclose(step.optimizer.gradients()[0], gradient, rtol=1e-5)
    assert number(output.loss) == pytest.approx(loss, rel=1e-5) and number(output.updated)


def test_a_term_that_weighs_nothing_leaves_the_other():
    step = step_of_terms()
    output = step(Tensor(-TOKENS.clip(1)))  # no valid token
    gradient = by_hand(-TOKENS.clip(1))[1]
    np.testing.assert_allclose(step.optimizer.gradients()[0], gradient, rtol=1e-6)
    assert gradient[0] == 0 and number(output.updated)
    step = keeping_terms(TwoTerms(auxiliary_weight=0.0))
    output = step(Tensor(TOKENS))
    np.testing.assert_allclose(step.optimizer.gradients()[0], [by_hand(TOKENS)[1][0], 0], rtol=1e-6)
    output = step(Tensor(-TOKENS.clip(1)))  # neither weighs anything
    assert not number(output.updated) and not number(output.overflow) and number(output.weight) == 0


@pytest.fixture(scope="module")
def loop():
    network = TwoTerms()
    loss_cell = GradAccumulation(network, 1, weighted=True, terms=2)
    return network, Accumulator(loss_cell, sgd(network, 1.0), 4, compile=True)


def run(loop, rows, clip=None):
    """The update of a window of these micro batches, the losses of its batches and its report."""
    network, accumulator = loop
    network.weight.set_data(Tensor(np.float32([1.0, 2.0])))
    losses = []
    for row in rows:
        with accumulator.accumulate():
            losses.append(number(accumulator.backward(Tensor(row[None]))))
            if clip is not None:
                accumulator.clip_grad_norm(clip)
            output = accumulator.step()
            accumulator.zero_grad()
    return np.float32([1.0, 2.0]) - network.weight.asnumpy(), losses, output


def test_a_hand_written_loop_has_the_same_terms(loop):
    update, losses, output = run(loop, TOKENS)
    loss, gradient = by_hand(TOKENS)
    np.testing.assert_allclose(update, gradient, rtol=1e-5)
    assert losses == pytest.approx([by_hand(row[None])[0] for row in TOKENS], rel=1e-6)
    assert number(output.loss) == pytest.approx(loss, rel=1e-6)


def test_clipping_sees_the_sum_of_the_terms(loop):
    _, gradient = by_hand(TOKENS)
    update, _, output = run(loop, TOKENS, clip=1.0)
    np.testing.assert_allclose(update, np.array(gradient) / np.hypot(*gradient), rtol=1e-5)
    assert number(output.grad_norm) == pytest.approx(np.hypot(*gradient), rel=1e-6)
    assert number(output.clipped_grad_norm) == pytest.approx(1)


def test_a_window_of_terms_that_is_skipped_or_flushed_leaves_nothing(loop):
    network, accumulator = loop
    bad = TOKENS.copy()
    bad[2] = np.inf
    update, _, output = run(loop, bad)
    assert number(output.overflow) and not update.any()
    accumulator.backward(Tensor(TOKENS[:1]))
    assert accumulator.drop() == 1
    update, _, _ = run(loop, TOKENS[:2])
    assert not update.any()
    output = accumulator.flush()
    update = np.float32([1.0, 2.0]) - network.weight.asnumpy()
    np.testing.assert_allclose(update, by_hand(TOKENS[:2])[1], rtol=1e-5)
    np.testing.assert_allclose(run(loop, TOKENS)[0], by_hand(TOKENS)[1], rtol=1e-5)


def test_terms_that_compute_in_half_precision_do_not_overflow():
    class HalfTerms(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(np.float16([1, 1])), "weight")

        def construct(self, x):
            first = ops.cast(x * self.weight[0], ms.float32).sum()
            second = ops.cast(x * self.weight[1], ms.float32).sum()
            return (first, x.shape[0]), (second, 2 * x.shape[0])

    x = Tensor(np.full(4000, 100, np.float16))
    network = HalfTerms()
    (plain,) = ops.grad(lambda x: network(x)[0][0], None, network.trainable_params())(x)
    assert np.isinf(plain.asnumpy()[0])
    step = keeping_terms(network, 2)
    assert number(step(x).updated)
    np.testing.assert_allclose(step.optimizer.gradients()[0], [100, 50], rtol=1e-3)


def test_as_a_cell_it_returns_the_sum_of_the_terms_means(mode):
    network = TwoTerms()
    cell = GradAccumulation(network, 4, weighted=True, terms=2).set_train()
    with pytest.warns(UserWarning, match=FOREIGN_TRAIN_CELL):
        loss, (gradient,) = ops.value_and_grad(cell, None, network.trainable_params())(Tensor(TOKENS))
    expected, gradients = by_hand(TOKENS)
    assert number(loss) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient.asnumpy(), gradients, rtol=1e-6)


def test_the_terms_of_several_batches_and_a_clip_of_the_step(eager):
    network = TwoTerms()
    loss_cell = GradAccumulation(network, 2, weighted=True, terms=2)
    step = TrainOneStepCell(
        loss_cell, sgd(network, 1.0), accumulation_steps=2, clip=ClipByGlobalNorm(1.0), compile=True
    )
    outputs = [step(Tensor(TOKENS[:2])), step(Tensor(TOKENS[2:]))]
    _, gradient = by_hand(TOKENS)
    update = np.float32([1, 2]) - network.weight.asnumpy()
    np.testing.assert_allclose(update, np.array(gradient) / np.hypot(*gradient), rtol=1e-5)
    assert number(outputs[0].loss) == pytest.approx(by_hand(TOKENS[:2])[0], rel=1e-6)


class Returns(nn.Cell):
    """A loss cell that returns what it is told."""

    def __init__(self, form):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), "weight")
        self.form = form

    def construct(self, x):
        return self.form((self.weight * x).sum())


PAIRS = "must return 2 pairs (loss_sum, weight), one per term, but got"
TERMS = "With terms=2, for example, it returns ((sum_1, weight_1), (sum_2, weight_2))."
FORMS = {
    "one pair": (lambda loss: ((loss, 1.0),), f"{PAIRS} 1. {TERMS}"),
    "a tensor": (lambda loss: loss, f"{PAIRS} 1. {TERMS}"),
    "sums": (
        lambda loss: (loss, loss),
        "must return its weight, a scalar, after the loss sum, but got no number. Return (loss_sum, weight), two "
        "scalars, or use weighted=False for a mean loss.",
    ),
}


@pytest.mark.parametrize("form, rest", FORMS.values(), ids=FORMS)
def test_networks_that_return_something_else(form, rest, eager):
    step = keeping_terms(Returns(form))
    with raises(ValueError, f"For 'GradAccumulation', the argument 'network' {rest}"):
        step(Tensor(TOKENS))


def test_wrong_terms():
    rule = "For 'GradAccumulation', the argument 'terms' must be a positive int"
    for value, error, got in ((0, ValueError, "0"), (True, TypeError, typed(True)), (2.0, TypeError, typed(2.0))):
        with raises(error, f"{rule}, but got {got}. It counts the pairs (loss_sum, weight)."):
            GradAccumulation(TwoTerms(), 2, weighted=True, terms=value)
    sentence = (
        "For 'GradAccumulation', the argument 'weighted' must be True with 2 terms, but got False. Return "
        "((sum_1, weight_1), (sum_2, weight_2), ...) and set weighted=True."
    )
    with raises(ValueError, sentence):
        GradAccumulation(TwoTerms(), 2, terms=2)
