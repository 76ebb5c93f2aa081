"""TokenMeanLoss: the mean over the valid tokens of a window, however they were dealt."""

import functools

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_toy import sgd
from mindspore import Tensor, amp, nn, ops
from open_window import buffer_of
from refusal import refuses
from step_probe import Of, keeping_step, number, tensors
from tiers import share_of

from ms_gradaccum import Accumulator, GradAccumulation, TokenMeanLoss, TrainOneStepCell

# What the compiler makes of it is tested where a test asks for a mode.
pytestmark = pytest.mark.usefixtures("eager")

START = np.float32([[-0.00748682], [0.53644359]])
IGNORED = -100


# Eight samples: sample i has the tokens 1 to i + 1, labelled by their remainder mod 2; the rest is padding.
TOKENS = np.tril(np.tile(np.arange(1, 9), (8, 1)))
IDS = TOKENS[..., None].astype(np.float32)
LABELS = np.where(TOKENS > 0, TOKENS % 2, IGNORED).astype(np.int32)


def by_hand(ids, labels, weight=START, ignore_index=IGNORED):
    """Sum of the cross-entropy, number of valid tokens and gradient of the sum, in float64."""
    x, labels = ids.reshape(-1).astype(np.float64), labels.reshape(-1)
    x, labels = x[labels != ignore_index], labels[labels != ignore_index]
    logits = x[:, None] * weight.astype(np.float64).T
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(weight.shape[0])[labels]
    loss_sum = -np.log((probabilities * one_hot).sum(-1)).sum()
    return loss_sum, len(labels), (probabilities - one_hot).T @ x[:, None]


def head(start=START):
    return nn.Dense(1, len(start), Tensor(start), has_bias=False)


@functools.cache
def causal_loop():
    network = head()
    return network, Accumulator(TokenMeanLoss(network), sgd(network, 0.08))


def train_causal(parts):
    network, accumulator = causal_loop()
    network.weight.set_data(Tensor(START))
    for ids, labels in parts:
        with accumulator.no_sync(), accumulator.accumulate():
            loss = accumulator.backward(Tensor(ids), Tensor(labels))
            loss_sum, tokens, _ = by_hand(ids, labels)
            assert number(loss) == pytest.approx(loss_sum / max(tokens, 1), rel=1e-5)
    output = accumulator.flush()
    return network.weight.asnumpy().ravel(), output


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_the_causal_language_model_ends_where_the_whole_batch_does(mode, batches):
    weights, output = train_causal(zip(np.split(IDS, batches), np.split(LABELS, batches)))
    loss_sum, tokens, gradient = by_hand(IDS, LABELS)
    assert tokens == number(output.weight) == 36
    assert number(output.loss) == pytest.approx(loss_sum / 36, rel=1e-5)
    np.testing.assert_allclose(weights, (START - 0.08 * gradient / 36).ravel(), rtol=1e-5)
    np.testing.assert_allclose(weights, [0.0953, 0.4337], atol=5e-5)


@settings(max_examples=share_of(25), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=36, max_size=36), st.randoms(use_true_random=False))
def test_any_dealing_of_the_tokens_over_batches_is_the_whole_batch(places, random):
    # Each of the 36 tokens goes to one of four batches of 8 x 8 places; some may get none at all.
    ids, labels = np.zeros((4, 64, 1), np.float32), np.full((4, 64), IGNORED, np.int32)
    for place, token, label in zip(places, IDS[LABELS != IGNORED], LABELS[LABELS != IGNORED]):
        free = random.choice(np.flatnonzero(labels[place] == IGNORED).tolist())
        ids[place, free], labels[place, free] = token, label
    weights, output = train_causal(zip(ids.reshape(4, 8, 8, 1), labels.reshape(4, 8, 8)))
    np.testing.assert_allclose(weights, [0.0953, 0.4337], atol=5e-5)
    assert number(output.weight) == 36


def test_a_batch_without_a_valid_token_counts_nothing():
    nothing = (np.full_like(IDS, 1e3), np.full_like(LABELS, IGNORED))
    weights, output = train_causal([nothing, (IDS, LABELS), nothing])
    np.testing.assert_allclose(weights, [0.0953, 0.4337], atol=5e-5)
    assert number(output.weight) == 36 and np.isfinite(number(output.loss))


def test_a_window_without_a_valid_token_makes_no_update():
    weights, output = train_causal([(IDS, np.full_like(LABELS, IGNORED))] * 2)
    np.testing.assert_array_equal(weights, START.ravel())
    assert (output.is_updated, number(output.overflow), number(output.weight)) == (False, False, 0)
    assert (number(output.loss), number(output.grad_norm)) == (0, 0)
    np.testing.assert_allclose(train_causal([(IDS, LABELS)])[0], [0.0953, 0.4337], atol=5e-5)


def with_others(out, scale):
    """Logits before other outputs."""
    return out * scale, out


@pytest.mark.parametrize("ignore_index", [IGNORED, 1])
def test_the_sum_and_the_number_of_tokens(ignore_index, mode):
    loss_cell = TokenMeanLoss(Of(head(), with_others), ignore_index)
    labels = np.where(LABELS == IGNORED, ignore_index, LABELS)
    loss_sum, tokens = loss_cell(Tensor(IDS), Tensor(1.0), Tensor(labels))
    expected, valid, _ = by_hand(IDS, labels, ignore_index=ignore_index)
    assert (loss_sum.dtype, loss_sum.shape, tokens.dtype, tokens.shape) == (ms.float32, (), ms.float32, ())
    assert number(tokens) == valid == {IGNORED: 36, 1: 16}[ignore_index]
    assert number(loss_sum) == pytest.approx(expected, rel=1e-5)


def test_labels_of_64_bits_and_rows_without_time():
    loss_sum, tokens = TokenMeanLoss(head())(Tensor(IDS[:, 0]), Tensor(LABELS[:, 0].astype(np.int64)))
    expected, valid, _ = by_hand(IDS[:, 0], LABELS[:, 0])
    assert number(tokens) == valid == 8 and number(loss_sum) == pytest.approx(expected, rel=1e-5)


# 4000 tokens of size 100 at equal probabilities: the sum of their gradients is 200000, which no float16 holds.
MANY = np.full((4000, 1), 100, np.float32)
ZEROS = np.zeros(4000, np.int32)


def float16_weights(network):
    return network.to_float(ms.float16), network.weight.set_dtype(ms.float16)


def rewritten(network):
    return (amp.auto_mixed_precision(network, "O1"),)


@pytest.mark.parametrize("halve", [float16_weights, rewritten], ids=lambda halve: halve.__name__)
def test_the_gradient_of_many_tokens_does_not_overflow_in_float16(halve, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # O1 writes the networks that it rewrites
    network = halve(head(np.zeros((2, 1), np.float32)))[0]
    loss_cell = TokenMeanLoss(network)
    (gradient,) = ops.grad(lambda *batch: loss_cell(*batch)[0], None, network.trainable_params())(*tensors(MANY, ZEROS))
    assert np.isinf(gradient.asnumpy()).all()  # the plain sum
    step = keeping_step(loss_cell, 2, accumulation_steps=2)
    step(*tensors(MANY, ZEROS))
    output = step(*tensors(MANY[:500], ZEROS[:500]))
    np.testing.assert_allclose(step.optimizer.gradients()[0], [[-50], [50]], rtol=2e-3)
    assert number(output.weight) == 4500 and output.is_updated
    assert buffer_of(step).sums[0].dtype == ms.float32 and output.loss.dtype == ms.float32
    assert number(output.loss) == pytest.approx(np.log(2), rel=1e-3)


def test_labels_that_do_not_fit():
    with refuses(ValueError, "Give one label"):
        TokenMeanLoss(head())(Tensor(IDS), Tensor(LABELS[:, :7]))


def test_wrong_arguments():
    with refuses(TypeError, "network that returns logits"):
        TokenMeanLoss(3)
    for value in (True, None, -100.0):
        with refuses(TypeError, "label of padding"):
            TokenMeanLoss(head(), value)


class OwnLoss(nn.Cell):
    def __init__(self, weighted=False):
        super().__init__()
        self.head = nn.Dense(1, 2, weight_init=Tensor(START), has_bias=False)
        self.weighted = weighted

    def construct(self, ids, labels):
        logits, labels = self.head(ids).reshape(-1, 2), labels.reshape(-1)
        if self.weighted:
            tokens = ops.cast(labels != IGNORED, ms.float32).sum()
            return ops.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), tokens
        return ops.cross_entropy(logits, labels, ignore_index=IGNORED)


class OptionalLabels(OwnLoss):
    def construct(self, ids, labels=None):
        return ops.square(self.head(ids)).mean()


@pytest.mark.parametrize(
    ("kind", "error", "key"),
    [
        (OwnLoss, TypeError, "but got construct(ids, labels) for 1 inputs"),
        (OptionalLabels, ValueError, "an axis of classes, but got a scalar"),
    ],
)
def test_a_model_that_computes_its_loss_is_refused_with_the_way_out(mode, kind, error, key):
    network = kind()
    step = TrainOneStepCell(GradAccumulation(TokenMeanLoss(network), 4), sgd(network, 0.08))
    with refuses(error, key, "weighted=True"):
        step(*tensors(IDS, LABELS))
    assert np.array_equal(network.head.weight.asnumpy(), START)


def test_the_way_out_of_a_model_that_computes_its_loss_is_the_token_mean(network_mode):
    network = OwnLoss(weighted=True)
    step = TrainOneStepCell(GradAccumulation(network, 4, weighted=True), sgd(network, 0.08))
    assert number(step(*tensors(IDS, LABELS)).weight) == 36
    np.testing.assert_allclose(network.head.weight.asnumpy().ravel(), [0.0953, 0.4337], atol=5e-5)
