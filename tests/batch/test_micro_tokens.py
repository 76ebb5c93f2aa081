"""Micro batches by tokens: each row once, within the limit, few shapes, and the gradient of the whole batch."""

import itertools
import operator

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_toy import sgd
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from refusal import refuses
from step_probe import Around
from strategies import examples

from ms_gradaccum import Accumulator, GradAccumulation, GradCacheLoss, Model, TokenMeanLoss, TrainOneStepCell, verify
from ms_gradaccum.batch.token_limit import group_rows

LONGEST, WIDTH, CLASSES, LIMIT = 40, 3, 5, 64
LENGTHS = [3, 40, 9, 1, 17, 24, 5, 33, 12, 2, 7, 30]
IGNORED = -100
START = np.random.default_rng(1).normal(size=(CLASSES, WIDTH)).astype(np.float32)
RATE = 0.3


def token_batch(lengths=LENGTHS, seed=0):
    """Inputs, labels and a mask; behind a row's length are numbers that must not count."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.2, size=(len(lengths), LONGEST, WIDTH)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=x.shape[:2]).astype(np.int32)
    mask = np.arange(LONGEST) < np.array(lengths)[:, None]
    labels[~mask] = IGNORED
    return x, labels, mask.astype(np.int32)


X, LABELS, MASK = token_batch()


class Causal(nn.Cell):
    def __init__(self):
        super().__init__()
        self.head = nn.Dense(WIDTH, CLASSES, Tensor(START), has_bias=False)

    def construct(self, x):
        return self.head(ops.tanh(ops.cumsum(x, 1)))


class RowMean(nn.Cell):
    """The mean over rows of the cross-entropy of the mean of a row's tokens, which needs the mask of the padding."""

    def __init__(self, uses_mask=True):
        super().__init__()
        self.head = nn.Dense(WIDTH, CLASSES, Tensor(START), has_bias=False)
        self.loss = nn.CrossEntropyLoss()
        self.uses_mask = uses_mask

    def construct(self, x, mask, labels):
        if not self.uses_mask:
            return self.loss(self.head(ops.tanh(x).mean(1)), labels)
        mask = ops.cast(mask, ms.float32)
        means = (ops.tanh(x) * mask.expand_dims(-1)).sum(1) / mask.sum(1, keepdims=True)
        return self.loss(self.head(means), labels)


class Masked(nn.Cell):
    def construct(self, x, mask):
        return (x.sum(-1) * mask).sum(1)


def token_gradient(x, labels):
    """The mean gradient over all valid tokens, and their mean loss, in float64."""
    hidden = np.tanh(np.cumsum(x.astype(np.float64), 1))
    counts = labels != IGNORED
    hidden = hidden[counts]
    logits = hidden @ START.T.astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    one_hot = np.eye(CLASSES)[labels[counts]]
    return (shares - one_hot).T @ hidden / len(hidden), -np.log((shares * one_hot).sum(1)).mean()


def assert_trained(network, gradient):
    np.testing.assert_allclose(network.head.weight.asnumpy(), START - RATE * gradient, rtol=0, atol=1e-6)


def by_tokens(network, **settings):
    settings = {"micro_tokens": LIMIT, "lengths": lambda x, labels: labels != IGNORED, **settings}
    return GradAccumulation(network, **settings)


def step_of(accumulation, network, **settings):
    return TrainOneStepCell(accumulation, sgd(network, RATE), **settings).set_train()


@examples(200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 40), st.integers(300, 4000))
def test_each_row_is_in_one_group_whose_tokens_fit(lengths, padding, limit):
    longest = max(lengths) + padding
    groups = group_rows(np.array(lengths), longest, limit)
    assert sorted(itertools.chain(*[group.places for group in groups])) == list(range(len(lengths)))
    for places, length in groups:
        assert max(lengths[i] for i in places) <= length <= longest
        assert len(places) * length <= limit
    order = [lengths[i] for group in groups for i in group.places]
    assert order == sorted(lengths, reverse=True)
    assert groups == group_rows(np.array(lengths), longest, limit)
    ends = np.cumsum([len(group.places) for group in groups])
    for group, end in zip(groups, ends):
        left = len(lengths) - (end - len(group.places))
        # A full group, or for few shapes at least half of the rows that are left.
        assert len(group.places) == limit // group.length or 2 * len(group.places) > left


def test_many_batches_have_few_shapes():
    rng = np.random.default_rng(0)
    shapes = set()
    lengths_seen = set()
    for _ in range(300):
        lengths = np.clip(np.exp(rng.normal(5.2, 0.9, 64)).astype(int), 8, 2048)
        lengths_seen |= set(lengths.tolist())
        shapes |= {(len(places), length) for places, length in group_rows(lengths, 2048, 8192)}
    assert len(lengths_seen) > 1000
    assert {length for _, length in shapes} <= {8 << i for i in range(9)}
    assert len(shapes) <= 12


def test_the_window_is_that_of_the_whole_batch(mode):
    gradient, loss = token_gradient(X, LABELS)
    network = Causal()
    step = step_of(by_tokens(TokenMeanLoss(network)), network)
    for _ in range(2):
        network.head.weight.set_data(Tensor(START))
        output = step(Tensor(X), Tensor(LABELS))
        assert_trained(network, gradient)
    assert float(output.loss) == pytest.approx(loss)
    assert float(output.weight) == sum(LENGTHS)
    # The known wrong answer: the mean of the means of micro batches.
    split = step.network.split(Tensor(X), Tensor(LABELS))
    parts = [token_gradient(*[tensor.asnumpy() for tensor in part.tensors])[0] for part in split.micro_batches]
    assert len(parts) > 3
    assert np.abs(np.mean(parts, 0) - gradient).max() > 1e-2


def test_padding_is_cut_off_and_rows_are_sorted():
    split = by_tokens(TokenMeanLoss(Causal())).split(Tensor(X), Tensor(LABELS))
    order = np.argsort(-np.array(LENGTHS), kind="stable")
    assert np.concatenate(split.places).tolist() == order.tolist()
    tokens = 0
    for places, (rows, (x, labels)) in zip(split.places, split.micro_batches):
        assert rows == len(places)
        length = x.shape[1]
        np.testing.assert_array_equal(x.asnumpy(), X[places, :length])
        np.testing.assert_array_equal(labels.asnumpy(), LABELS[places, :length])
        assert rows * length <= LIMIT
        tokens += rows * length
    assert (tokens, LABELS.size) == (288, 480)


def test_a_batch_that_fits_is_passed_as_it_is():
    row = (Tensor(X[1:2]), Tensor(LABELS[1:2]))
    (micro_batch,) = by_tokens(TokenMeanLoss(Causal())).split(*row).micro_batches
    assert all(map(operator.is_, micro_batch.tensors, row))


def test_a_mean_over_rows_counts_by_rows(mode):
    classes = np.arange(len(LENGTHS), dtype=np.int32) % CLASSES
    batch = Tensor(X), Tensor(MASK), Tensor(classes)
    network = RowMean()
    whole = nn.TrainOneStepCell(network, sgd(network, RATE)).set_train()
    expected_loss = float(whole(*batch))
    expected = network.head.weight.asnumpy()
    network = RowMean()
    output = step_of(by_tokens(network, lengths="mask"), network)(*batch)
    np.testing.assert_allclose(network.head.weight.asnumpy(), expected, rtol=0, atol=1e-6)
    assert float(output.loss) == pytest.approx(expected_loss)
    assert float(output.weight) == len(LENGTHS)
    # The known wrong answer: each micro batch counts by its tokens.
    assert np.ptp([part.rows for part in by_tokens(network, lengths=1).split(*batch).micro_batches]) > 0


@pytest.mark.parametrize(
    "lengths",
    [-1, 1, "mask", lambda x, mask: np.array(LENGTHS), lambda x, mask: LENGTHS, lambda x, mask: mask],
    ids=["from the end", "place", "name", "numbers", "list", "mask"],
)
def test_lengths_come_from_a_mask_or_from_numbers(lengths):
    split = by_tokens(Masked(), lengths=lengths).split(Tensor(X), Tensor(MASK))
    assert [part.rows for part in split.micro_batches] == [1, 1, 2, 2, 4, 2]


@pytest.mark.parametrize("rows", [1, -1])
def test_rows_on_axis_1_and_inputs_without_rows(rows):
    class TimeMajor(nn.Cell):
        def construct(self, x, mask, positions, scale):
            return (x.sum(-1) * mask * positions).sum() * scale

    axes = {"batch_axis": (1, rows, None, None), "length_axis": (0, 0, 0, None)}
    accumulation = by_tokens(TimeMajor(), lengths="mask", **axes)
    positions = np.arange(LONGEST, dtype=np.float32)[:, None]
    split = accumulation.split(Tensor(X.swapaxes(0, 1)), Tensor(MASK.T), Tensor(positions), Tensor([1.0]))
    for places, (_, (x, mask, part_of_positions, scale)) in zip(split.places, split.micro_batches):
        length = x.shape[0]
        np.testing.assert_array_equal(x.asnumpy(), X[places, :length].swapaxes(0, 1))
        np.testing.assert_array_equal(mask.asnumpy(), MASK[places, :length].T)
        np.testing.assert_array_equal(part_of_positions.asnumpy(), positions[:length])
        assert scale.shape == (1,)


def test_without_lengths_rows_keep_their_padding_and_order():
    split = by_tokens(TokenMeanLoss(Causal()), lengths=None, micro_tokens=130).split(Tensor(X), Tensor(LABELS))
    assert [part.rows for part in split.micro_batches] == [3, 3, 3, 3]
    assert np.concatenate(split.places).tolist() == list(range(12))
    assert {part.tensors[0].shape[1] for part in split.micro_batches} == {LONGEST}


def test_a_loop_trains_the_same(eager):
    gradient, loss = token_gradient(X, LABELS)
    network = Causal()
    accumulator = Accumulator(by_tokens(TokenMeanLoss(network)), sgd(network, RATE), 2)
    for rows in (slice(0, 5), slice(5, 12)):
        assert np.array_equal(network.head.weight.asnumpy(), START)
        accumulator.backward(Tensor(X[rows]), Tensor(LABELS[rows]))
        output = accumulator.step()
    assert_trained(network, gradient)
    assert float(output.loss) == pytest.approx(loss)


def test_lengths_at_a_place_from_the_end_stay_there_when_a_model_adds_its_label():
    with_loss = by_tokens(Masked(), lengths=-1, batch_axis=(0, 0), length_axis=(1, 1)).with_loss(nn.MSELoss())
    assert with_loss.token_limit.lengths == -2


def test_a_model_with_a_loss_function_cuts_its_labels_too(eager):
    class Loss(nn.Cell):
        def construct(self, logits, labels):
            losses = ops.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), reduction="none")
            return losses.reshape(labels.shape).mean(1).mean()

    network = Causal()
    accumulation = GradAccumulation(network, micro_tokens=160, batch_axis=(0,), length_axis=(1,))
    model = Model(accumulation, Loss(), sgd(network, RATE))
    labels = np.maximum(LABELS, 0)
    data = NumpySlicesDataset((X, labels), ["x", "labels"], shuffle=False).batch(12)
    model.train(1, data, dataset_sink_mode=False)
    gradient, _ = token_gradient(X, labels)
    assert_trained(network, gradient)


def test_verify_compares_it_with_the_padded_batch(eager):
    network = TokenMeanLoss(Causal())
    report = verify(by_tokens(network), (Tensor(X), Tensor(LABELS)), None)
    assert report.equal and sum(report.micro_batches) == 12 and len(report.micro_batches) > 3
    network = RowMean(uses_mask=False)
    classes = Tensor(np.arange(12, dtype=np.int32) % CLASSES)
    report = verify(by_tokens(network, lengths="mask"), (Tensor(X), Tensor(MASK), classes), None)
    assert not report.equal
    assert "padding that micro_tokens cuts off" in " ".join(report.causes)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"micro_size": 2}, "'micro_size' must be left out with micro_tokens, but got 2"),
        ({"micro_tokens": 0}, "'micro_tokens' must be a positive int, but got 0"),
        ({"lengths": "mask"}, "'lengths' must be the name of an input, one of inputs, but got 'mask'"),
        ({"micro_tokens": None, "micro_size": 2}, "'lengths' must be left out without micro_tokens"),
        ({"micro_tokens": None, "micro_size": 2, "lengths": None, "length_axis": 2}, "'length_axis' must be left out"),
        ({"micro_tokens": None, "lengths": None}, "'micro_size' must be a positive int"),
        ({"lengths": True}, "function or None"),
        ({"lengths": 1.5}, "function or None"),
        ({"lengths": [3, 4]}, "function or None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, sentence):
    with refuses((TypeError, ValueError), sentence):
        by_tokens(TokenMeanLoss(Causal()), **settings)


def test_a_loss_of_all_rows_is_refused():
    with refuses(ValueError, "'micro_tokens'", "left out"):
        by_tokens(GradCacheLoss(nn.Dense(2, 2), nn.MSELoss()))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"micro_tokens": 32}, "'micro_tokens' must be at least the length of each row, but got 32 for a row of 40"),
        ({"lengths": 2}, "'lengths' must be the place of one of the 2 inputs, but got 2"),
        ({"lengths": lambda x, labels: [41] * 12}, "'lengths' must give a mask of shape (12, 40) or one number"),
        ({"lengths": lambda x, labels: [1.5] * 12}, "but got float64 from 1.5 to 1.5"),
        ({"lengths": lambda x, labels: [1] * 11}, "but got int64 of shape (11,)"),
        ({"length_axis": None}, "at least one input must have an axis of tokens for micro_tokens"),
        ({"length_axis": 0}, "'length_axis' must be another axis than that of the rows, but got 0"),
        ({"length_axis": (2, 1)}, "the same length on their length axis, but got 3 in input[0] and 40 in input[1]"),
        ({"length_axis": (1, 1, 1)}, "each of the 2 inputs, but got 3 entries"),
    ],
)
def test_batches_that_do_not_fit_are_refused(settings, sentence):
    with refuses(ValueError, sentence):
        by_tokens(TokenMeanLoss(Causal()), **settings).split(Tensor(X), Tensor(LABELS))


def test_inside_a_larger_graph_it_is_refused():
    network = Causal()
    step = step_of(by_tokens(TokenMeanLoss(network)), network)
    ms.set_context(mode=ms.GRAPH_MODE)

    with refuses(Exception, "micro_tokens cannot be used"):
        Around(step)(Tensor(X), Tensor(LABELS))


def test_a_compiled_step_has_a_graph_per_shape_and_few_of_them(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    network = Causal()
    step = step_of(by_tokens(TokenMeanLoss(network)), network)
    rng = np.random.default_rng(3)
    shapes = set()
    for seed in range(12):
        lengths = rng.integers(1, LONGEST + 1, 12)
        x, labels, _ = token_batch(lengths, seed)
        split = step.network.split(Tensor(x), Tensor(labels))
        shapes |= {part.tensors[1].shape for part in split.micro_batches}
        network.head.weight.set_data(Tensor(START))
        step(Tensor(x), Tensor(labels))
        gradient, _ = token_gradient(x, labels)
        assert_trained(network, gradient)
    (compiled,) = step.windows[0].micro_steps.compiled.values()
    assert len(compiled.graphs) == len(shapes) <= 8
    assert compiled.general_cell is None
