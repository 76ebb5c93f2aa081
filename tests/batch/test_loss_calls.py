"""Calls of means over labels, wherever a program makes them."""

import functools
import types
import warnings

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import cross_entropy

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.batch.loss_kind import LossKind

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = np.float32(np.arange(8).reshape(4, 2))
WEIGHTS = Tensor(np.float32([1, 2, 3]))
PAD = 0


class Classifier(nn.Cell):
    """The base of the programs, with what they keep."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 3)
        self.pad, self.class_weight, self.no_weight = 1, WEIGHTS, None
        self.settings = types.SimpleNamespace(ignore_index=2)
        self.loss_fn = functools.partial(ops.cross_entropy, ignore_index=1)
        self.function = ops.nll_loss
        # A cell of the name of the function, which is judged by itself.
        self.cross_entropy = nn.CrossEntropyLoss(reduction="none")


class Plain(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y)


class Imported(Classifier):
    def construct(self, x, y):
        return cross_entropy(self.dense(x), y)


class InModule(Classifier):
    def construct(self, x, y):
        return mint.nn.functional.cross_entropy(self.dense(x), y)


class ImportedInside(Classifier):
    def construct(self, x, y):
        from mindspore import ops as F

        return F.cross_entropy(self.dense(x), y)


class NllOfLogits(Classifier):
    def construct(self, x, y):
        return ops.nll_loss(ops.log_softmax(self.dense(x)), y)


class Held(Classifier):
    def construct(self, x, y):
        return self.function(ops.log_softmax(self.dense(x)), y)


class ByPartial(Classifier):
    def construct(self, x, y):
        return self.loss_fn(self.dense(x), y)


class ByConstant(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignore_index=0)


class ByPosition(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, None, 0)


class ByGlobal(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignore_index=PAD)


class ByAttribute(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignore_index=self.pad)


class BySettings(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignore_index=self.settings.ignore_index, weight=self.no_weight)


def shifted(logits, labels, ignore_index=2):
    return ops.cross_entropy(logits, labels, ignore_index=ignore_index, weight=None)


class InFunction(Classifier):
    def construct(self, x, y):
        return shifted(self.dense(x), y)


class Summed(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, self.class_weight, reduction="sum") / (y >= 0).sum()


class NoneOfTwo(Classifier):
    """One takes no mean, and the other one does."""

    def construct(self, x, y):
        first = ops.cross_entropy(self.dense(x), y, reduction="none").mean()
        return first + self.other(x, y)

    def other(self, x, y):
        return ops.cross_entropy(self.dense(x), y)


# What each leaves out of its mean.
IGNORING = {
    **dict.fromkeys([Plain, Imported, InModule, ImportedInside, NllOfLogits, Held, Summed, NoneOfTwo], -100),
    **dict.fromkeys([ByConstant, ByPosition, ByGlobal], 0),
    **dict.fromkeys([ByAttribute, ByPartial], 1),
    **dict.fromkeys([BySettings, InFunction], 2),
}


def said_of_labels(cell, *labels):
    kind = LossKind(cell)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind.look_at([(Tensor(np.int32(labels)),)])
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", IGNORING, ids=lambda kind: kind.__name__)
def test_the_label_that_it_leaves_out_is_known(kind):
    others = {-100, 0, 1, 2} - {IGNORING[kind]}
    assert said_of_labels(kind(), *others) == []
    (text,) = said_of_labels(kind(), *others, IGNORING[kind])
    assert (
        f"leaves labels of ignore_index={IGNORING[kind]} out of its mean, but a window counts its micro batches by"
        in text
    )


class OfRows(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, reduction="none").mean()


class OfCell(Classifier):
    def construct(self, x, y):
        return self.cross_entropy(self.dense(x), y).mean()


class ThatFails(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignored=1)


def nll_loss(logits, labels):
    return ops.square(logits[:, 0] - labels).mean()


class OfOwnFunction(Classifier):
    def construct(self, x, y):
        return nll_loss(self.dense(x), y)


class DiceLoss(nn.LossBase):
    """A loss of the user's that has a name of MindSpore's: here it is a mean over rows."""

    def construct(self, logits, labels):
        return self.get_loss(ops.square(logits[:, 0] - labels))


@pytest.mark.parametrize(
    "cell",
    [OfRows(), OfCell(), ThatFails(), OfOwnFunction(), nn.WithLossCell(nn.Dense(2, 3), DiceLoss())],
    ids=[
        "of rows",
        "a cell of that name",
        "arguments that fail",
        "an own function of that name",
        "an own loss of MindSpore's name",
    ],
)
def test_a_mean_over_rows_is_not_warned_of(cell):
    assert LossKind(cell).is_settled
    assert said_of_labels(cell, -100, 0, 1, 2) == []


class Weighted(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, self.class_weight)


class WeightedByName(Classifier):
    def construct(self, x, y):
        return ops.nll_loss(ops.log_softmax(self.dense(x)), y, weight=WEIGHTS)


class OwnLossBase(nn.LossBase):
    def __init__(self):
        super().__init__()
        self.weight = WEIGHTS

    def construct(self, logits, labels):
        return ops.cross_entropy(logits, labels, self.weight)


@pytest.mark.parametrize(
    "cell",
    [Weighted(), WeightedByName(), nn.WithLossCell(nn.Dense(2, 3), OwnLossBase())],
    ids=["an attribute", "by name", "a loss of LossBase"],
)
def test_class_weights_are_warned_of(cell):
    assert "divides by the sum of the class weights of its labels" in LossKind(cell).reason
    step = TrainOneStepCell(GradAccumulation(cell, 2), nn.SGD(cell.trainable_params(), 0.1))
    with pytest.warns(UserWarning, match="divides by the sum of the class weights"):
        step(Tensor(TOKENS), Tensor(np.int32([0, 1, 2, 0])))


class OfArguments(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, **self.arguments())

    def arguments(self):
        return {"ignore_index": 1}


class OfPair(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(*self.pair(x, y))

    def pair(self, x, y):
        return self.dense(x), y


class OfNewWeights(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, weight=Tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("kind", [OfArguments, OfPair, OfNewWeights], ids=lambda kind: kind.__name__)
def test_what_only_running_shows_is_named(kind):
    assert "may weigh its labels or leave some out of its mean" in LossKind(kind()).reason


def test_code_without_a_source_is_named():
    exec("def construct(self, x, y):\n    return ops.cross_entropy(self.dense(x), y)", globals(), space := {})
    assert (
        "may weigh its labels or leave some out of its mean" in LossKind(type("OfText", (Classifier,), space)()).reason
    )
