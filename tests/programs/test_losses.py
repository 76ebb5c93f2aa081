"""Losses as programs write them: means over rows, over something else, sums, several at once."""

import numpy as np
from harness import ROWS, MeanOfPair, Program, checks_of, regression
from mindspore import Tensor, nn, ops

from ms_gradaccum import TokenMeanLoss

CLASSES = 3


def labelled(ignored=()):
    """Batches (x, label) whose first rows have ignored labels."""
    numbers = np.random.default_rng(2)
    batches = []
    for x, _ in regression():
        labels = numbers.integers(0, CLASSES, ROWS).astype(np.int32)
        labels[list(ignored)] = -100
        batches.append((x, labels))
    return batches


def with_ignored():
    return labelled(ignored=(0, 2, 7))


def with_padding():
    """One of the micro batches has no label at all."""
    return labelled(ignored=(0, 1, 2, 5))


def classifier(**settings):
    return lambda: nn.WithLossCell(nn.Dense(4, CLASSES), nn.CrossEntropyLoss(**settings))


CLASS_WEIGHTS = Tensor(np.array([0.2, 1.0, 5.0], np.float32))


class HandWrittenSum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y):
        return ops.square(self.layer(x) - y).sum()


class Two(nn.Cell):
    """Two losses, as multi-task networks return them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y):
        out = self.layer(x)
        return ops.square(out - y).mean(), ops.abs(out).mean()


class WithOutputs(Two):
    """A loss and what else a loop wants to see."""

    def construct(self, x, y):
        out = self.layer(x)
        return ops.square(out - y).mean(), ops.stop_gradient(out)


class TwoTerms(nn.Cell):
    """Two losses over tokens, as one sum."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)

    def construct(self, x, y, tokens):
        out = self.layer(x)
        token_loss = (ops.square(out - y).squeeze(-1) * tokens).sum()
        return token_loss + 0.5 * (ops.square(out).squeeze(-1) * tokens).sum(), tokens.sum()


def counted():
    tokens = np.arange(1, ROWS + 1, dtype=np.float32)
    return [(x, y, tokens) for x, y in regression()]


def ignored_later():
    """Batches of which the first has no label that is ignored."""
    return [labelled()[0], *with_ignored()[1:]]


PROGRAMS = {
    "mean cross-entropy": Program(classifier(), batches=labelled),
    "ignore_index": Program(classifier(ignore_index=-100), batches=with_ignored, named="is not the (mean|sum)"),
    "ignore_index, rows of padding": Program(
        classifier(ignore_index=-100), batches=with_padding, named="is not the (mean|sum)"
    ),
    "ignore_index, from a later batch on": Program(
        classifier(ignore_index=-100), batches=ignored_later, named="is not the (mean|sum)"
    ),
    "class weights": Program(classifier(weight=CLASS_WEIGHTS), batches=labelled, named="is not the (mean|sum)"),
    "reduction='sum'": Program(classifier(reduction="sum"), batches=labelled, named="(?i)sum"),
    "sum by hand": Program(HandWrittenSum, named="is not the (mean|sum)"),
    "label smoothing": Program(classifier(label_smoothing=0.1), batches=labelled),
    "TokenMeanLoss": Program(lambda: TokenMeanLoss(nn.Dense(4, CLASSES)), batches=with_padding, whole=MeanOfPair),
    "several losses": Program(Two, named="scalar losses", names_whole=True),
    "a loss and outputs": Program(WithOutputs, whole=lambda cell: First(cell)),
    "two terms": Program(TwoTerms, batches=counted, whole=MeanOfPair, settings={"weighted": True}),
    "binary cross-entropy": Program(
        lambda: nn.WithLossCell(nn.Dense(4, 1), nn.BCEWithLogitsLoss()),
        batches=lambda: [(x, (y > 0).astype(np.float32)) for x, y in regression()],
        # In PYNATIVE mode MindSpore 2.10 divides its gradient by the rows of the first batch of the process.
        modes=("GRAPH",),
    ),
    "Huber": Program(lambda: nn.WithLossCell(nn.Dense(4, 1), nn.HuberLoss())),
}


class First(MeanOfPair):
    """The loss among several outputs, which is what `value_and_grad(..., has_aux=True)` differentiates."""

    def construct(self, *inputs):
        return self.cell(*inputs)[0]


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
