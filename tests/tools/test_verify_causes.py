"""verify says what the measurement says of a loss, and names Inf, NaN and another reference."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import warns
from verify_probe import LOSS, PAIRS, assert_causes, batch, differing

from ms_gradaccum import verify

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(8, 2)).astype(np.float32)
Y = RANDOM.normal(size=8).astype(np.float32)
# Of the eight rows in three micro batches (3, 3 and 2) these count: 1, 3 and 1.
MASK = np.float32([1, 0, 0, 1, 1, 1, 0, 1])

OTHER_LOSS = "network differs from reference on the whole batch (losses {:.4g} and {:.4g})"
NOT_FINITE = "An Inf or NaN in {}: nothing can be compared."


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


def sum_over_marked(output, y):
    mask = (y > 0).astype(ms.float32)
    return (ops.square(output - y) * mask).sum(), mask.sum()


MARKED = np.where(MASK, np.abs(Y) + 0.1, -np.abs(Y) - 0.1).astype(np.float32)


def gradients_by_hand(x, y, mask):
    """The gradient of the mean over the marked rows, in float64."""
    x, y, mask = (value.astype(np.float64) for value in (x, y, mask))
    error = x @ np.array([1.0, -1.0]) - y
    return 2 * (error * mask) @ x / mask.sum()


def test_a_mean_over_tokens_and_its_numbers():
    report = verify(Loss(mean_over_marked), batch(X, MARKED), 3)
    assert_causes(report, LOSS)
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


def total(output, y):
    return ops.square(output - y).sum()


def mean_and_rows(output, y):
    return mean(output, y), y.shape[0]


class Penalized(Loss):
    def construct(self, x, y):
        return self.form((x * self.weight).sum(-1), y) + 0.1 * ops.square(self.weight).sum()


@pytest.mark.parametrize("form, weighted, cause", [(total, False, LOSS), (mean_and_rows, True, PAIRS)])
def test_a_loss_that_parts_train_otherwise_has_the_sentence_of_the_measurement(form, weighted, cause, eager):
    report = verify(Loss(form), batch(X, Y), 3, weighted=weighted)
    assert_causes(report, cause)
    assert differing(report) == {("weight", "gradient")}


def test_a_micro_batch_that_has_no_token_is_no_number(eager):
    y = MARKED * np.float32([-1, 1, 1, 1, 1, 1, 1, 1])
    assert_causes(verify(Loss(mean_over_marked), batch(X, y), 3), NOT_FINITE.format("the window"))
    report = verify(Loss(mean_over_marked), batch(X, -np.abs(Y)), 3)
    assert_causes(report, NOT_FINITE.format("the window and the whole batch"))


def test_a_penalty_on_the_weights_is_no_difference(eager):
    assert verify(Penalized(mean), batch(X, Y), 3).equal
    assert_causes(verify(Penalized(mean_over_marked), batch(X, MARKED), 3), LOSS)


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
    loss = np.mean(np.square(X.astype(np.float64) @ [1, -1] - Y))
    assert_causes(report, OTHER_LOSS.format(loss / 3, loss))
    assert [entry.norm_ratio for entry in report.parameters] == [pytest.approx(1 / 3)]
    assert (report.window_loss, report.whole_loss) == (pytest.approx(loss / 3, rel=1e-5), pytest.approx(loss, rel=1e-5))


def test_what_else_a_reference_shows(eager):
    loss_cell = Loss(mean)
    assert verify(loss_cell, batch(X, Y), 3, reference=loss_cell).equal
    other = OTHER_LOSS[: OTHER_LOSS.index("{")]
    assert_causes(verify(loss_cell, batch(X, Y), 3, reference=sharing(Penalized(mean), loss_cell)), other)
    summed = sharing(Loss(total), loss_cell)
    assert_causes(verify(summed, batch(X, Y), 3, reference=loss_cell), LOSS, other)
    # The logarithm of -1 is no number, in the reference alone.
    nothing = sharing(Loss(lambda output, y: mean(output, y) * ops.log(y * 0 - 1).sum()), loss_cell)
    assert_causes(verify(loss_cell, batch(X, Y), 3, reference=nothing), NOT_FINITE.format("the reference"))


def test_an_input_of_all_rows_by_all_rows_may_be_no_batch(eager):
    class Masked(Loss):
        def construct(self, x, y, mask):
            return (mask * ops.square((x * self.weight).sum(-1) - y)).mean()

    inputs = batch(X, Y, np.tri(8, dtype=np.float32))
    with warns("single rows"):
        report = verify(Masked(mean), inputs, 8)
    assert_causes(report, "The loss of micro batches could not be measured: the network takes 1 rows, but not 2")
    assert "check_loss" not in report.causes[0]
