"""Gradients that a loop gives without their weight."""

import warnings

import numpy as np
import pytest
from linear_toy import X, line, sgd, whole
from mindspore import Tensor

from ms_gradaccum import Accumulator

pytestmark = pytest.mark.usefixtures("eager")


ROWS = "For 'Accumulator', the argument 'weight' must be the rows of each batch where those of a window differ"


def loop(sizes, steps, weights=None, passes=1):
    """Give the gradients of batches of so many rows to an accumulator; return what it warns of."""
    network = line()
    accumulator = Accumulator(network, sgd(network), steps)
    ends = np.cumsum(sizes)
    parts = [(X[end - size : end],) for end, size in zip(ends, sizes)]
    loader = accumulator.prepare(parts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            for (part,) in loader:
                grads = (Tensor(np.mean(2 * part * (part * network.weight.asnumpy() - 2 * part), keepdims=True)),)
                accumulator(grads, *([] if weights is None else [len(part)]))
    return [str(each.message) for each in caught if ROWS in str(each.message)]


def test_batches_of_other_sizes_without_a_weight_are_warned_of_once():
    expected = f"{ROWS}, but got 1.0 for one of 1 after one of 3, which count alike now. "
    expected += "Call accumulator(grads, len(x), loss)."
    assert loop([3, 3, 1], 3, passes=2) == [expected]


def test_batches_that_weigh_what_they_are_need_no_warning():
    assert loop([3, 3, 1], 3, weights="rows") == []
    assert loop([3, 3, 3][:2], 2) == []
    # The short batch is a window of its own.
    assert loop([3, 3, 1], 2) == loop([3, 2, 1], 1) == []


def test_the_weight_is_checked_as_ever():
    network = line()
    with pytest.raises(
        ValueError, match=whole("For 'Accumulator', the argument 'weight' must be a number of at least 0")[:-1]
    ):
        Accumulator(network, sgd(network))((Tensor(np.ones((1, 1), np.float32)),), -1.0)
