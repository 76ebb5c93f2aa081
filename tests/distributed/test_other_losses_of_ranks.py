"""The further losses of several processes: means over the rows of all of them, with the messages that there are."""

import numpy as np
import pytest
from mindspore import Tensor
from scenarios import KINDS, ONE_SHAPE, batch, build_network, share

PART, SIZES = "other_losses_worker", (2,)
# The batch of rank 0 after rank 1 has run out of data.
LAST = [array[:9] for array in batch(1)]


def means(*parts):
    """The two losses over the rows of some batches, in float64."""
    x, y = (np.concatenate(arrays) for arrays in zip(*parts))
    error = build_network()(Tensor(x)).asnumpy().astype(np.float64) - y
    return [np.abs(error).mean(), np.square(y.astype(np.float64)).mean()]


@pytest.mark.parametrize("name", [*KINDS, "16-bit messages"])
def test_they_are_means_over_the_rows_of_all_ranks(name, two, eager):
    expected = means(batch(0), LAST)
    for rank, report in enumerate(two):
        np.testing.assert_allclose(report[name]["end"], expected, rtol=1e-5)
        # Inside the window each rank knows its own rows.
        np.testing.assert_allclose(report[name]["inside"], means(share(batch(0), rank, 2, ONE_SHAPE)), rtol=1e-5)
    # The known wrong answers: those of one rank, and the mean of those of the ranks.
    own = [share(batch(0), rank, 2, ONE_SHAPE) for rank in (0, 1)]
    ranks = [means(own[0], LAST), means(own[1])]
    assert not np.allclose(ranks[0], expected, rtol=1e-3) and not np.allclose(np.mean(ranks, 0), expected, rtol=1e-3)


def test_they_travel_with_the_loss_and_take_no_message_of_their_own(two):
    for report in two:
        # A sum and a weight for each of 64, or for each name.
        for name, numbers in (("first", 128), ("names", 4)):
            with_them, without = report[f"messages {name}"], report["messages none"]
            assert len(with_them) == len(without)
            assert np.subtract(with_them, without).tolist().count(numbers) == 1
            assert sum(with_them) - sum(without) == numbers
