"""The further losses of several processes: means over the rows of all of them, with the messages that there are."""

from contextlib import nullcontext

import numpy as np
from described_messages import sizes_sent
from linear_toy import sgd
from mindspore import Tensor, nn, ops
from open_window import reducer_of
from quick_mindspore import eagerly
from ranks import RANK, on_ranks, own_share
from scenarios import KINDS, ONE_SHAPE, batch, build_network, share

from ms_gradaccum import GradAccumulation, MixedPrecision, TrainOneStepCell

WAYS = {name: {"parallel": kind} for name, kind in KINDS.items()}
WAYS["16-bit messages"] = {"mixed_precision": MixedPrecision(level="O0", init_scale=1.0, reduce_dtype="fp16")}
# The batch of rank 0 after rank 1 has run out of data: as many rows as before, so that nothing is compiled anew.
LAST = [array[:9] for array in batch(1)]


class Losses(nn.Cell):
    """The squared error, its root's mean, and the mean of the labels' squares; or the first alone."""

    def __init__(self, is_one):
        super().__init__(auto_prefix=False)
        self.network, self.is_one = build_network(), is_one

    def construct(self, x, y):
        error = self.network(x) - y
        if self.is_one:
            return ops.square(error).mean()
        return ops.square(error).mean(), ops.abs(error).mean(), ops.square(y).mean()


def train(losses, counts=False, **settings):
    """A window of two batches. Return the further losses of both reports, and the messages."""
    network = Losses(is_one=losses is None)
    cell = GradAccumulation(network, 3, losses=losses)
    step = TrainOneStepCell(cell, sgd(network, 0.1), accumulation_steps=2, **settings)
    sent = sizes_sent(reducer_of(step)) if counts else []
    inside = step(*own_share(0, ONE_SHAPE))
    output = step.join() if RANK else step(*map(Tensor, LAST))
    found = [[float(loss.asnumpy()) for loss in each.other_losses] for each in (inside, output)]
    return *found, sent


def means(*parts):
    """The two losses over the rows of some batches, in float64."""
    x, y = (np.concatenate(arrays) for arrays in zip(*parts))
    error = build_network()(Tensor(x)).asnumpy().astype(np.float64) - y
    return [np.abs(error).mean(), np.square(y.astype(np.float64)).mean()]


@on_ranks(2, cases=[*WAYS, "compiled"], compiled=True)
def test_they_are_means_over_the_rows_of_all_ranks(name):
    with nullcontext() if name == "compiled" else eagerly():
        inside, end, _ = train("first", check_loss=False, **WAYS.get(name, WAYS["level2"]))
    expected = means(batch(0), LAST)
    np.testing.assert_allclose(end, expected, rtol=1e-5)
    # Inside the window each rank knows its own rows.
    own = [share(batch(0), rank, 2, ONE_SHAPE) for rank in (0, 1)]
    np.testing.assert_allclose(inside, means(own[RANK]), rtol=1e-5)
    # The known wrong answers: those of one rank, and the mean of those of the ranks.
    ranks = [means(own[0], LAST), means(own[1])]
    assert not np.allclose(ranks[0], expected, rtol=1e-3) and not np.allclose(np.mean(ranks, 0), expected, rtol=1e-3)


@on_ranks(2)
def test_they_travel_with_the_loss_and_take_no_message_of_their_own():
    *_, without = train(None, True)
    # A sum and a weight for each of 64, or for each name.
    for losses, numbers in (("first", 128), (("size", "label"), 4)):
        *_, with_them = train(losses, True)
        assert len(with_them) == len(without)
        assert np.subtract(with_them, without).tolist().count(numbers) == 1
        assert sum(with_them) - sum(without) == numbers
