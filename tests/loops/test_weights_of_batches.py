"""Gradients that a loop gives without their weight."""

import numpy as np
import pytest
from linear_toy import X, descend, line, sgd, weight_of
from mindspore import Tensor
from refusal import told

from ms_gradaccum import Accumulator, GradAccumulation

pytestmark = pytest.mark.usefixtures("eager")


def loop(sizes, steps, weight=None, prepares=True, passes=1, cut=lambda part: [part], axis=0, **settings):
    """Give the gradients of batches of so many rows to an accumulator; return the weight and how often it warns."""
    network = line()
    accumulator = Accumulator(GradAccumulation(network, 1, batch_axis=axis), sgd(network), steps)
    ends = np.cumsum(sizes)
    parts = [(X[end - size : end],) for end, size in zip(ends, sizes)]
    loader = accumulator.prepare(parts) if prepares else parts
    with told("a batch must have a weight") as said:
        for _ in range(passes):
            for (whole_part,) in loader:
                for part in cut(whole_part):
                    mean = np.sum if settings.get("reduction") == "sum" else np.mean
                    gradient = mean(2 * part * (part * network.weight.asnumpy() - 2 * part), keepdims=True)
                    own = len(part) if weight == "rows" else weight
                    accumulator((Tensor(gradient),), own, **settings)
    return weight_of(network), len(said)


PARTS = [(1, 2, 3), (4, 5, 6), (7,)]
ALL_ROWS = descend(range(1, 8))
ALIKE = np.mean([descend(rows) for rows in PARTS])
# Batches of 3, 3 and 1 rows: the batches of a window, settings, and the weight.
KNOWN = {
    "the rows of a prepared dataset": (3, {}, ALL_ROWS),
    "rows": (3, {"weight": "rows"}, ALL_ROWS),
    "a 1 on purpose": (3, {"weight": 1.0}, ALIKE),
    "one batch for each update": (1, {"prepares": False}, descend(*PARTS)),
    # Each row counts alike in a sum, which is divided by the number of batches.
    "sums": (3, {"prepares": False, "reduction": "sum"}, 7 / 3 * ALL_ROWS),
}


@pytest.mark.parametrize("steps, settings, expected", KNOWN.values(), ids=KNOWN)
def test_a_weight_that_is_known_needs_no_word(steps, settings, expected):
    assert loop([3, 3, 1], steps, **settings) == (pytest.approx(expected, rel=1e-5), 0)
    assert abs(ALIKE - ALL_ROWS) > 0.1


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
    assert loop([3, 3], 4 if "cut" in settings else 2, passes=2, **settings)[1] == 1
