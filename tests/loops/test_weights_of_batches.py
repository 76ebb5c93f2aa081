"""Gradients that a loop gives without their weight."""

import warnings

import numpy as np
import pytest
from linear_toy import X, descend, line, sgd
from mindspore import Tensor
from refusal import refuses

from ms_gradaccum import Accumulator, GradAccumulation

pytestmark = pytest.mark.usefixtures("eager")


UNWEIGHTED = (
    "For 'Accumulator', batches of different sizes need a weight, but got none: all batches and ranks count alike. "
    "Call accumulator(grads, len(x), loss), or prepare the dataset."
)


def loop(sizes, steps, weight=None, prepares=True, passes=1, cut=lambda part: [part], axis=0, **settings):
    """Give the gradients of batches of so many rows to an accumulator; return the weight and what it warns of."""
    network = line()
    accumulator = Accumulator(GradAccumulation(network, 1, batch_axis=axis), sgd(network), steps)
    ends = np.cumsum(sizes)
    parts = [(X[end - size : end],) for end, size in zip(ends, sizes)]
    loader = accumulator.prepare(parts) if prepares else parts
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            for (whole_part,) in loader:
                for part in cut(whole_part):
                    mean = np.sum if settings.get("reduction") == "sum" else np.mean
                    gradient = mean(2 * part * (part * network.weight.asnumpy() - 2 * part), keepdims=True)
                    own = len(part) if weight == "rows" else weight
                    accumulator((Tensor(gradient),), own, **settings)
    return network.weight.asnumpy().item(), [str(each.message) for each in caught if UNWEIGHTED in str(each.message)]


def test_the_rows_of_a_prepared_dataset_are_the_weight():
    """Batches of 3, 3 and 1 rows; counted alike, the window would move the weight elsewhere."""
    weight, warned = loop([3, 3, 1], 3)
    assert weight == pytest.approx(descend(range(1, 8)), rel=1e-5) and warned == []
    means = [descend(rows) for rows in ((1, 2, 3), (4, 5, 6), (7,))]
    assert abs(np.mean(means) - weight) > 0.1


def test_a_given_weight_is_used_and_needs_no_word():
    assert loop([3, 3, 1], 3, weight="rows") == (pytest.approx(descend(range(1, 8)), rel=1e-5), [])
    # Also a 1 that the loop gives on purpose.
    alike, warned = loop([3, 3, 1], 3, weight=1.0)
    means = [descend(rows) for rows in ((1, 2, 3), (4, 5, 6), (7,))]
    assert alike == pytest.approx(np.mean(means), rel=1e-5) and warned == []


@pytest.mark.parametrize(
    "settings",
    [
        {"prepares": False},
        {"axis": 1},  # The first axis is not that of the rows.
        {"cut": lambda part: [part[:2], part[2:]][: len(part) // 2 + 1]},  # Pieces, which nobody has counted.
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_batches_whose_rows_nobody_knows_are_said_once(settings):
    _, warned = loop([3, 3], 4 if "cut" in settings else 2, passes=2, **settings)
    assert warned == [UNWEIGHTED]


def test_one_batch_for_each_update_needs_no_weight():
    assert loop([3, 3, 1], 1, prepares=False) == (pytest.approx(descend((1, 2, 3), (4, 5, 6), (7,)), rel=1e-5), [])


def test_sums_need_no_weight():
    """Each row counts alike in a sum, which is divided by the number of batches."""
    weight, warned = loop([3, 3, 1], 3, prepares=False, reduction="sum")
    assert weight == pytest.approx(7 / 3 * descend(range(1, 8)), rel=1e-5) and warned == []


def test_the_weight_is_checked_as_ever():
    network = line()
    with refuses(ValueError, "'weight'", "at least 0"):
        Accumulator(network, sgd(network))((Tensor(np.ones((1, 1), np.float32)),), -1.0)
