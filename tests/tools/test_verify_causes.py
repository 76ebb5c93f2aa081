"""verify says what the measurement says of a loss, and names Inf, NaN, another reference, layers and state."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from step_probe import tensors
from verify_probe import LOSS, PAIRS, UNKNOWN, Line, X, Y, assert_causes, differing, mean, total

from ms_gradaccum import GradCacheLoss, verify

# Of the eight rows in three micro batches (3, 3 and 2) these count: 1, 3 and 1.
MASK = np.float32([1, 0, 0, 1, 1, 1, 0, 1])

OTHER_LOSS = "network differs from reference on the whole batch (losses {:.4g} and {:.4g})"
NOT_FINITE = "An Inf or NaN in {}: nothing can be compared."


def of_weight(form):
    return Line(form, has_bias=False)


def sum_over_marked(output, y):
    mask = (y > 0).astype(ms.float32)
    return (ops.square(output - y) * mask).sum(), mask.sum()


def mean_over_marked(output, y):
    summed, count = sum_over_marked(output, y)
    return summed / count


MARKED = np.where(MASK, np.abs(Y) + 0.1, -np.abs(Y) - 0.1).astype(np.float32)


def gradients_by_hand(x, y, mask):
    """The gradient of the mean over the marked rows, in float64."""
    x, y, mask = (value.astype(np.float64) for value in (x, y, mask))
    error = x @ np.array([1.0, -1.0]) - y
    return 2 * (error * mask) @ x / mask.sum()


def test_a_mean_over_tokens_and_its_numbers():
    report = verify(of_weight(mean_over_marked), tensors(X, MARKED), 3)
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
    assert verify(of_weight(mean_over_marked), tensors(X, even), 4).equal
    assert verify(of_weight(sum_over_marked), tensors(X, MARKED), 3, weighted=True).equal


def mean_and_rows(output, y):
    return mean(output, y), y.shape[0]


@pytest.mark.parametrize("form, weighted, cause", [(total, False, LOSS), (mean_and_rows, True, PAIRS)])
def test_a_loss_that_parts_train_otherwise_has_the_sentence_of_the_measurement(form, weighted, cause, eager):
    report = verify(of_weight(form), tensors(X, Y), 3, weighted=weighted)
    assert_causes(report, cause)
    assert differing(report) == {("weight", "gradient")}


def test_a_micro_batch_that_has_no_token_is_no_number(eager):
    y = MARKED * np.float32([-1, 1, 1, 1, 1, 1, 1, 1])
    assert_causes(verify(of_weight(mean_over_marked), tensors(X, y), 3), NOT_FINITE.format("the window"))
    report = verify(of_weight(mean_over_marked), tensors(X, -np.abs(Y)), 3)
    assert_causes(report, NOT_FINITE.format("the window and the whole batch"))


def sharing(cell, other):
    """The cell with the parameter of another one."""
    cell.weight = other.weight
    return cell


def test_a_division_by_k_done_twice_is_seen_with_a_reference(eager):
    loss_cell = of_weight(mean)
    third = sharing(of_weight(lambda output, y: mean(output, y) / 3), loss_cell)
    report = verify(third, tensors(X, Y), 3, reference=loss_cell)
    loss = np.mean(np.square(X.astype(np.float64) @ [1, -1] - Y))
    assert_causes(report, OTHER_LOSS.format(loss / 3, loss))
    assert [entry.norm_ratio for entry in report.parameters] == [pytest.approx(1 / 3)]
    assert (report.window_loss, report.whole_loss) == (pytest.approx(loss / 3, rel=1e-5), pytest.approx(loss, rel=1e-5))


def test_what_else_a_reference_shows(eager):
    loss_cell = of_weight(mean)
    assert verify(loss_cell, tensors(X, Y), 3, reference=loss_cell).equal
    other = OTHER_LOSS[: OTHER_LOSS.index("{")]
    doubled = sharing(of_weight(lambda output, y: 2 * mean(output, y)), loss_cell)
    assert_causes(verify(loss_cell, tensors(X, Y), 3, reference=doubled), other)
    summed = sharing(of_weight(total), loss_cell)
    assert_causes(verify(summed, tensors(X, Y), 3, reference=loss_cell), LOSS, other)
    # The logarithm of -1 is no number, in the reference alone.
    nothing = sharing(of_weight(lambda output, y: mean(output, y) * ops.log(y * 0 - 1).sum()), loss_cell)
    assert_causes(verify(loss_cell, tensors(X, Y), 3, reference=nothing), NOT_FINITE.format("the reference"))
    # A sum with its weight is equal to the mean.
    pair = of_weight(sum_over_marked)
    reference = sharing(of_weight(mean_over_marked), pair)
    assert verify(pair, tensors(X, MARKED), 3, weighted=True, reference=reference).equal


def test_an_input_of_all_rows_by_all_rows_may_be_no_batch(eager):
    class Masked(Line):
        def construct(self, x, y, mask):
            return (mask * ops.square(self.output(x) - y)).mean()

    inputs = tensors(X, Y, np.tri(8, dtype=np.float32))
    report = verify(Masked(), inputs, 8)
    assert_causes(report, "The loss of micro batches could not be measured: the network takes 1 row, but not 2")
    assert "check_loss" not in report.causes[0]


COLUMN = Y.reshape(8, 1)


class Network(nn.Cell):
    def __init__(self, norm=None, drop=None):
        super().__init__()
        self.scale = Parameter(Tensor([1.0, -1.0]), "scale")
        self.norm = norm or nn.Identity()
        self.drop = drop or nn.Identity()

    def construct(self, x, y):
        return ops.square(self.drop(self.norm(x * self.scale)).sum(-1, keepdims=True) - y).mean()


GAMMA, SCALE = ("norm.gamma", "gradient"), ("scale", "gradient")
MEAN, VARIANCE = ("norm.moving_mean", "state"), ("norm.moving_variance", "state")


def test_batch_norm_and_its_moving_averages(mode):
    network = Network(nn.BatchNorm1d(2))
    report = verify(network, tensors(X, COLUMN), 2)
    assert_causes(report, "BatchNorm (norm)")
    assert "the moving averages move 2 times instead of once" in report.causes[0]
    # What is normalised has the mean 0 however it is split, so that beta has the gradient of the whole batch.
    assert {GAMMA, MEAN, VARIANCE} <= differing(report) <= {GAMMA, MEAN, VARIANCE, SCALE}
    # Its momentum is 0.9: the average moves by a tenth of the way, twice or once.
    outputs = (X * [1, -1]).astype(np.float64)
    twice = 0.09 * outputs[:4].mean(0) + 0.1 * outputs[4:].mean(0)
    (entry,) = (entry for entry in report.parameters if (entry.name, entry.kind) == MEAN)
    # All is as it was.
    assert not network.training and network.norm.moving_mean.asnumpy().tolist() == [0, 0]
    assert entry.max_difference == pytest.approx(np.abs(twice - 0.1 * outputs.mean(0)).max(), rel=1e-4)


def test_batch_norm_of_the_whole_batch_in_one_part_is_no_cause(eager):
    network = Network(nn.BatchNorm1d(2))
    reference = Network(network.norm, nn.ReLU())
    reference.scale = network.scale
    report = verify(network, tensors(X, COLUMN), 1, reference=reference)
    assert_causes(report, "network differs from reference")


class Pairs(nn.Cell):
    """The loss of each row and all others, which a GradCacheLoss has of the whole batch."""

    def construct(self, x):
        return ops.square(ops.matmul(x, x.T)).mean()


def test_a_grad_cache_loss_is_not_measured(eager):
    encoder = nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm1d(2))
    assert_causes(verify(GradCacheLoss(encoder, Pairs()), tensors(X), 2), "BatchNorm (")


def test_frozen_batch_norm_is_equal(monkeypatch):
    network = Network(nn.BatchNorm1d(2)).set_train()
    network.norm.set_train(False)
    assert verify(network, tensors(X, COLUMN), 2).equal
    monkeypatch.setenv("MS_JIT", "0")
    assert verify(Network(nn.BatchNorm1d(2, use_batch_statistics=False)), tensors(X, COLUMN), 2).equal
    # In evaluation mode as a whole it has not begun to train: nothing in it has been frozen.
    network.set_train(False)
    assert not verify(network, tensors(X, COLUMN), 2).equal


def test_dropout(mode):
    report = verify(Network(drop=nn.Dropout(p=0.5)), tensors(X, COLUMN), 2)
    assert_causes(report, "Dropout (drop)")
    assert differing(report) == {SCALE}


class Noise(nn.Cell):
    def construct(self, x):
        return x * ops.rand(x.shape)


def test_random_numbers_of_no_layer_are_no_fault_of_the_loss(eager):
    assert_causes(verify(Network(drop=Noise()), tensors(X, COLUMN), 2), UNKNOWN)


class Counter(nn.Cell):
    """Counts its calls and, if told so, scales by their number."""

    def __init__(self, scales):
        super().__init__()
        self.seen = Parameter(Tensor(1.0), "seen", requires_grad=False)
        self.scales = scales

    def construct(self, x):
        seen = ops.assign_add(self.seen, Tensor(1.0))
        return x * ops.stop_gradient(seen) if self.scales else ops.depend(x, seen)


def test_state_that_the_forward_pass_changes(eager):
    report = verify(Network(Counter(scales=False)), tensors(X, COLUMN), 4)
    assert_causes(report, "State of the network (norm.seen)")
    (entry,) = (entry for entry in report.parameters if entry.differs)
    # 5 after four micro batches, 2 after one batch.
    assert (entry.name, entry.kind, entry.max_difference, entry.norm_ratio) == ("norm.seen", "state", 3, 2.5)
    report = verify(Network(Counter(scales=True)), tensors(X, COLUMN), 4)
    depends = "The forward pass changes 'norm.seen', and the loss depends on it"
    assert_causes(report, "State of the network (norm.seen)", depends)
    assert differing(report) == {("norm.seen", "state"), SCALE}
