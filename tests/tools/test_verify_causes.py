"""verify names each cause of a difference, and no other: one small network per cause."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from verify_probe import ROWS, SUM, TOKENS, assert_causes, batch, differing

from ms_gradaccum import verify

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(8, 2)).astype(np.float32)
Y = RANDOM.normal(size=8).astype(np.float32)
# Of the eight rows in three micro batches (3, 3 and 2) these count: 1, 3 and 1.
MASK = np.float32([1, 0, 0, 1, 1, 1, 0, 1])

PAIRS = "Sums and weights of a loss with weighted=True should add up, but"
CONSTANT_WEIGHT = f"{PAIRS} parts of a batch miss the weight"
MEAN_AS_SUM = f"{PAIRS} it returns a mean where its sum is expected"
OTHER_SUM = f"{PAIRS} parts of a batch miss the loss sum"
ORDER = "Rounding, or a loss that depends on the order"
GRADIENTS = "Gradients that do not add up, and losses that do"
FACTOR, OTHER_LOSS = "A factor: the whole batch in network has {:.6g} times", "Another loss"
NOT_FINITE = "An Inf or NaN"


class Loss(nn.Cell):
    """A line, and a form that its squared errors are reduced to."""

    def __init__(self, form, columns=2):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(1, -1, columns), ms.float32), "weight")
        self.form = form

    def construct(self, x, y):
        return self.form((x * self.weight).sum(-1), y)


def mean(output, y):
    return ops.square(output - y).mean()


def mean_over_marked(output, y):
    mask = (y > 0).astype(ms.float32)
    return (ops.square(output - y) * mask).sum() / mask.sum()


def mean_over_tokens_or_nothing(output, y):
    mask = (y > 0).astype(ms.float32)
    return (ops.square(output - y) * mask).sum() / ops.maximum(mask.sum(), 1)


def sum_over_marked(output, y):
    mask = (y > 0).astype(ms.float32)
    return (ops.square(output - y) * mask).sum(), mask.sum()


class Queue(nn.Cell):
    """Compares with rows of earlier batches, and leaves its own; after all of a batch it is the same either way."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, -1.0], ms.float32), "weight")
        self.queue = Parameter(Tensor(np.ones((8, 2), np.float32)), "queue", requires_grad=False)

    def construct(self, x, y):
        loss = ops.square(ops.matmul(x * self.weight, self.queue.T) - y.reshape(-1, 1)).mean()
        ops.assign(self.queue, ops.concat((self.queue[x.shape[0] :], x)))
        return loss


MARKED = np.where(MASK, np.abs(Y) + 0.1, -np.abs(Y) - 0.1).astype(np.float32)


def gradients_by_hand(x, y, mask):
    """The gradient of the mean over the marked rows, in float64."""
    x, y, mask = (value.astype(np.float64) for value in (x, y, mask))
    error = x @ np.array([1.0, -1.0]) - y
    return 2 * (error * mask) @ x / mask.sum()


def test_a_mean_over_tokens_and_its_numbers():
    report = verify(Loss(mean_over_marked), batch(X, MARKED), 3)
    assert_causes(report, TOKENS)
    whole = gradients_by_hand(X, MARKED, MASK)
    parts = [gradients_by_hand(X[rows], MARKED[rows], MASK[rows]) for rows in (slice(3), slice(3, 6), slice(6, 8))]
    window = np.average(parts, axis=0, weights=[3, 3, 2])
    (entry,) = report.parameters
    assert (entry.name, entry.kind, entry.differs) == ("weight", "gradient", True)
    assert entry.max_difference == pytest.approx(np.abs(window - whole).max(), rel=1e-4)
    assert entry.norm_ratio == pytest.approx(np.linalg.norm(window) / np.linalg.norm(whole), rel=1e-4)
    scale = max(np.linalg.norm(window), np.linalg.norm(whole))
    assert entry.relative_difference == pytest.approx(np.linalg.norm(window - whole) / scale, rel=1e-4)
    assert report.micro_batches == (3, 3, 2)


def test_a_mean_over_tokens_is_equal_if_each_micro_batch_has_as_many_per_row_or_returns_their_sum(eager):
    even = np.abs(Y) * np.float32([1, -1] * 4)
    assert verify(Loss(mean_over_marked), batch(X, even), 4).equal
    assert verify(Loss(sum_over_marked), batch(X, MARKED), 3, weighted=True).equal


def test_one_parameter_is_enough_to_tell_tokens_from_rows_that_depend_on_each_other(eager):
    # Four gradients that are one number each: a mean of them with some weights is any number.
    x, micro_size = X[:, :1], 4

    def weighted_mean(output, y):
        return (ops.square(output - y) * ops.exp(y)).sum() / ops.exp(y).sum()

    assert_causes(verify(Loss(weighted_mean, 1), batch(x, Y), micro_size), TOKENS)
    assert_causes(verify(Loss(batch_statistics, 1), batch(x, Y), micro_size), ROWS)


def test_a_micro_batch_that_has_no_token_counts_for_nothing(eager):
    y = MARKED * np.float32([-1, 1, 1, 1, 1, 1, 1, 1])
    assert_causes(verify(Loss(mean_over_tokens_or_nothing), batch(X, y), 3), TOKENS)
    report = verify(Loss(mean_over_marked), batch(X, y), 3)
    assert_causes(report, NOT_FINITE)
    assert "the window, in micro batch 0 counted from 0" in report.causes[0]


def test_a_penalty_is_no_token(eager):
    class Pulled(Loss):
        def construct(self, x, y):
            output = (x * self.weight).sum(-1)
            return mean_over_tokens_or_nothing(output, y) + 10 * ops.square(self.weight - 2).sum()

    # The data pull the other way, so that the micro batch without a token has the largest gradient.
    x = np.float32([[-2, -1], [-3, -1], [-2, -2], [-3, -2], [-2, -1], [-4, -3], [-3, -1], [-4, -2]])
    y = np.abs(MARKED) * np.float32([-1, -1, -1, 1, 1, 1, -1, 1])
    assert_causes(verify(Pulled(None), batch(x, y), 3), TOKENS)


def in_batch_negatives(output, y):
    return ops.cross_entropy(ops.outer(output, y), ops.arange(y.shape[0]).astype(ms.int32))


def pairwise_ranking(output, y):
    return ops.relu(1 - (output.expand_dims(0) - output.expand_dims(1)) * (y.expand_dims(0) - y.expand_dims(1))).mean()


def batch_statistics(output, y):
    return ops.square((output - output.mean()) - y).mean()


def largest(output, y):
    return ops.square(output - y).max()


def root_of_mean(output, y):
    return ops.sqrt(ops.square(output - y).mean())


@pytest.mark.parametrize(
    ("form", "micro_size"), [(in_batch_negatives, 3), (pairwise_ranking, 2), (root_of_mean, 3), (largest, 2)]
)
def test_rows_that_depend_on_each_other(form, micro_size, eager):
    report = verify(Loss(form), batch(X, Y), micro_size)
    assert_causes(report, ROWS)
    assert differing(report) == {("weight", "gradient")}


def test_what_the_order_of_the_rows_decides_is_not_laid_to_their_dependence(eager):
    def by_place(output, y):
        return (ops.square(output - y) * ops.arange(y.shape[0])).mean()

    assert_causes(verify(Loss(by_place), batch(X, Y), 2), ORDER)


def total(output, y):
    return ops.square(output - y).sum()


class Penalized(Loss):
    def construct(self, x, y):
        return self.form((x * self.weight).sum(-1), y) + 0.1 * ops.square(self.weight).sum()


def test_a_sum_where_a_mean_is_expected(eager):
    report = verify(Loss(total), batch(X, Y), 4)
    assert_causes(report, SUM)
    assert [entry.norm_ratio for entry in report.parameters] == [pytest.approx(1 / 4)]
    assert report.whole_loss == pytest.approx(4 * report.window_loss)
    # A sum and a penalty: a part of the loss is a sum, and nothing has a constant ratio.
    report = verify(Penalized(total), batch(X, Y), 3)
    assert_causes(report, ROWS)
    assert "or some of it is a sum" in report.causes[0]


def test_a_penalty_on_the_weights_is_no_difference(eager):
    assert verify(Penalized(mean), batch(X, Y), 3).equal
    assert_causes(verify(Penalized(mean_over_marked), batch(X, MARKED), 3), TOKENS)


def test_a_mean_returned_where_its_sum_is_expected(eager):
    def mean_and_rows(output, y):
        return mean(output, y), y.shape[0]

    def mean_and_tokens(output, y):
        return mean(output, y), (y > 0).astype(ms.float32).sum()

    report = verify(Loss(mean_and_rows), batch(X, Y), 4, weighted=True)
    assert_causes(report, MEAN_AS_SUM)
    # Four micro batches of equal size, each divided by its weight of 2 and not by 8.
    assert report.window_loss == pytest.approx(4 * report.whole_loss)
    assert_causes(verify(Loss(mean_and_rows), batch(X, Y), 3, weighted=True), MEAN_AS_SUM)
    assert_causes(verify(Loss(mean_and_tokens), batch(X, MARKED), 3, weighted=True), OTHER_SUM)


def test_a_weight_that_does_not_count_what_the_sum_is_over(eager):
    def total_and_one(output, y):
        return total(output, y), 1.0

    def mean_and_one(output, y):
        return mean_over_marked(output, y), 1.0

    assert_causes(verify(Loss(total_and_one), batch(X, Y), 3, weighted=True), CONSTANT_WEIGHT)
    assert_causes(verify(Loss(mean_and_one), batch(X, MARKED), 3, weighted=True), CONSTANT_WEIGHT)


class Scaled(nn.Cell):
    """The hand-written way: the loss of another cell, times a factor."""

    def __init__(self, loss_cell, factor):
        super().__init__(auto_prefix=False)
        self.loss_cell = loss_cell
        self.factor = factor

    def construct(self, x, y):
        return self.loss_cell(x, y) * self.factor


def sharing(cell, other):
    """The cell with the parameter of another one."""
    cell.weight = other.weight
    return cell


def test_a_division_by_k_done_twice_is_seen_with_a_reference(eager):
    loss_cell = Loss(mean)
    report = verify(Scaled(loss_cell, 1 / 3), batch(X, Y), 3, reference=loss_cell)
    assert_causes(report, FACTOR.format(1 / 3))
    assert [entry.norm_ratio for entry in report.parameters] == [pytest.approx(1 / 3)]
    assert (report.window_loss, report.whole_loss) == (
        pytest.approx(report.whole_loss / 3),
        pytest.approx(np.mean((X @ [1, -1] - Y) ** 2), rel=1e-5),
    )


def test_without_a_reference_a_factor_is_part_of_the_loss(eager):
    assert verify(Scaled(Loss(mean), 1 / 3), batch(X, Y), 3).equal


def test_what_else_a_reference_shows(eager):
    loss_cell = Loss(mean)
    assert verify(loss_cell, batch(X, Y), 3, reference=loss_cell).equal
    assert_causes(verify(Scaled(loss_cell, 0.5), batch(X, Y), 3, reference=loss_cell), FACTOR.format(0.5))
    penalized, summed = sharing(Penalized(mean), loss_cell), sharing(Loss(total), loss_cell)
    assert_causes(verify(loss_cell, batch(X, Y), 3, reference=penalized), OTHER_LOSS)
    # The sum of all rows is so many times their mean.
    assert_causes(verify(summed, batch(X, Y), 3, reference=loss_cell), SUM, FACTOR.format(len(X)))
    # Two at once: the mean over tokens, divided by K.
    tokens = Loss(mean_over_marked)
    report = verify(Scaled(tokens, 1 / 3), batch(X, MARKED), 3, reference=tokens)
    assert_causes(report, TOKENS, FACTOR.format(1 / 3))


def test_a_sum_with_its_weight_is_equal_to_a_reference_that_is_the_mean(eager):
    loss_cell = Loss(sum_over_marked)
    reference = sharing(Loss(mean_over_marked), loss_cell)
    assert verify(loss_cell, batch(X, MARKED), 3, weighted=True, reference=reference).equal


def test_a_bprop_that_clips_is_no_loss_that_cannot_be_trained_in_parts(eager):
    class Clipped(nn.Cell):
        def construct(self, x):
            return x * 1.0

        def bprop(self, x, out, dout):
            return (dout / ops.maximum(ops.norm(dout), Tensor(1e-3)),)

    class ClippedLoss(Loss):
        def __init__(self):
            super().__init__(mean)
            self.clipped = Clipped()

        def construct(self, x, y):
            return self.form(self.clipped((x * self.weight).sum(-1)), y)

    assert_causes(verify(ClippedLoss(), batch(X, Y), 3), GRADIENTS)


def test_what_a_micro_batch_leaves_to_the_next_is_named():
    assert_causes(verify(Queue(), batch(X, Y), 4), "State of the network: the micro batches, each from where")
