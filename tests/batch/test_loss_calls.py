"""Calls of means over labels, wherever a program makes them."""

import functools
import types
import warnings

import mindspore as ms
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


class OfClass(Classifier):
    function = staticmethod(ops.cross_entropy)

    def construct(self, x, y):
        return self.function(self.dense(x), y)


REGISTRY = {"ce": functools.partial(ops.cross_entropy, ignore_index=2)}
UTIL = types.ModuleType("users_losses")
vars(UTIL).update(__file__="users_losses.py", REGISTERED={"ce": functools.partial(ops.cross_entropy, ignore_index=1)})


class InRegistry(Classifier):
    def construct(self, x, y):
        return REGISTRY["ce"](self.dense(x), y)


class InRegistryOfModule(Classifier):
    def construct(self, x, y):
        for function in UTIL.REGISTERED.values():
            return function(self.dense(x), y)


class Losses:
    """Has a method that a network holds under another name."""

    def by_class(self, logits, labels):
        return ops.cross_entropy(logits, labels, ignore_index=0)


class IsLoss:
    """Is called itself."""

    def __call__(self, logits, labels):
        return ops.cross_entropy(logits, labels, ignore_index=0)


class HoldsLoss(Classifier):
    def __init__(self):
        super().__init__()
        self.criterion = IsLoss()

    def construct(self, x, y):
        return self.criterion(self.dense(x), y)


class HoldsMethod(Classifier):
    def __init__(self):
        super().__init__()
        self.method = Losses().by_class

    def construct(self, x, y):
        return self.method(self.dense(x), y)


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
    **dict.fromkeys([Plain, Imported, InModule, ImportedInside, NllOfLogits, Held, OfClass, Summed, NoneOfTwo], -100),
    **dict.fromkeys([ByConstant, ByPosition, ByGlobal, HoldsMethod, HoldsLoss], 0),
    **dict.fromkeys([ByAttribute, ByPartial, InRegistryOfModule], 1),
    **dict.fromkeys([BySettings, InFunction, InRegistry], 2),
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


class OfCellInDict(Classifier):
    """Has its loss where MindSpore does not look for cells."""

    def __init__(self, loss_fn):
        super().__init__()
        self.losses = {"class": loss_fn}

    def construct(self, x, y):
        return self.losses["class"](self.dense(x), y)


def test_a_loss_cell_in_a_dict_is_found():
    assert "divides by the sum of the class weights" in LossKind(OfCellInDict(nn.CrossEntropyLoss(WEIGHTS))).reason
    assert "adds up its rows" in LossKind(OfCellInDict(nn.NLLLoss(reduction="sum"))).reason
    plain = OfCellInDict(nn.CrossEntropyLoss())
    assert said_of_labels(plain, 0, 1) == [] and len(said_of_labels(plain, 0, -100)) == 1


class OfSum(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, reduction="sum")


def test_a_sum_that_is_the_loss_is_warned_of():
    assert "cross_entropy adds up its rows with reduction='sum'" in LossKind(OfSum()).reason


class SumOfL1(Classifier):
    def construct(self, x, y):
        return ops.l1_loss(self.dense(x), y, reduction="sum")


class SumOfSquares(Classifier):
    def construct(self, x, y):
        return ops.mse_loss(self.dense(x), y, "sum")


class SumOfHuber(Classifier):
    def construct(self, x, y):
        return mint.nn.functional.smooth_l1_loss(self.dense(x), y, reduction="sum")


class SumOfDivergences(Classifier):
    def construct(self, x, y):
        return ops.kl_div(ops.log_softmax(self.dense(x)), y, reduction="sum")


class SumOfBinary(Classifier):
    def construct(self, x, y):
        return ops.binary_cross_entropy_with_logits(self.dense(x), y, y, y, reduction="sum")


@pytest.mark.parametrize("kind", [SumOfL1, SumOfSquares, SumOfHuber, SumOfDivergences, SumOfBinary])
def test_a_sum_of_any_loss_is_warned_of(kind):
    assert "adds up its rows with reduction='sum'" in LossKind(kind()).reason


class MeanOfL1(Classifier):
    def construct(self, x, y):
        return ops.l1_loss(self.dense(x), y)


class SumByRows(Classifier):
    def construct(self, x, y):
        return ops.mse_loss(self.dense(x), y, reduction="sum") / x.shape[0]


class OwnNamesake(Classifier):
    def construct(self, x, y):
        return self.mse_loss(self.dense(x), y, reduction="sum")

    def mse_loss(self, x, y, reduction):
        return ops.square(x - y).mean()


@pytest.mark.parametrize("kind", [MeanOfL1, SumByRows, OwnNamesake])
def test_what_is_no_sum_in_the_end_is_not(kind):
    assert LossKind(kind()).is_settled


class OfPair(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(*self.pair(x, y))

    def pair(self, x, y):
        return self.dense(x), y


class OfNewWeights(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, weight=Tensor([1.0, 2.0, 3.0]))


class OfWeightsOrNot(Classifier):
    """A default that may be replaced."""

    def construct(self, x, y):
        return self.loss(self.dense(x), y)

    def loss(self, logits, labels, weight=None):
        if weight is None:
            weight = self.class_weight
        return ops.cross_entropy(logits, labels, weight)


class OfGivenWeights(OfWeightsOrNot):
    """A default that is not used."""

    def construct(self, x, y):
        return self.loss(self.dense(x), y, self.class_weight)

    def loss(self, logits, labels, weight=None):
        return ops.cross_entropy(logits, labels, weight)


class OfProperty(Classifier):
    @property
    def current(self):
        raise RuntimeError("Only while it runs.")

    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, self.current)


KINDS = [OfPair, OfNewWeights, OfWeightsOrNot, OfGivenWeights, OfProperty]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_class_weights_that_only_running_shows_are_named(kind):
    assert "may divide by class weights of its labels" in LossKind(kind()).reason


class ByAlias(Classifier):
    def construct(self, x, y):
        return self.apply(ops.cross_entropy, self.dense(x), y)

    def apply(self, function, *args):
        return function(*args)


class ByText(Classifier):
    def construct(self, x, y):
        name = "cross_entropy"
        return getattr(ops, name)(self.dense(x), y)


class ByCallOfOptions(Classifier):
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, ignore_index=self.option("ignore_index"))

    def option(self, name):
        return getattr(self.settings, name)


def of_text():
    exec("def construct(self, x, y):\n    return ops.cross_entropy(self.dense(x), y)", globals(), space := {})
    return type("OfText", (Classifier,), space)()


@pytest.mark.parametrize("make", [ByAlias, ByText, ByCallOfOptions, of_text], ids=lambda make: make.__name__)
def test_labels_below_0_are_warned_of_where_the_label_is_not_known(make):
    assert said_of_labels(make(), 0, 1, 2) == []
    assert "leaves labels below 0 out of its mean" in said_of_labels(make(), 0, -1)[0]


class Meta(type):
    def __getattribute__(cls, name):
        if name == "__module__":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Config(dict):
    """As programs have it: attributes are keys, and what it has not is a KeyError."""

    def __getattr__(self, name):
        return self[name]


class OfConfig(Classifier):
    config = Config(known=1)

    def construct(self, x, y):
        if "ignore_index" in self.config:
            return ops.cross_entropy(self.dense(x), y, ignore_index=self.config.ignore_index)
        return ops.cross_entropy(self.dense(x), y)


class Helper:
    """An object with a method of the name of the function, and one that calls it."""

    def __init__(self):
        self.weight = None

    def cross_entropy(self, logits, labels, axis):
        return ops.square(logits[:, 0] - labels).mean(axis)

    def own(self, *args):
        return self.cross_entropy(*args, axis=0)

    def loss(self, logits, labels):
        return ops.cross_entropy(logits, labels, self.weight)


class ByHelper(Classifier):
    def __init__(self, name):
        super().__init__()
        self.helper, self.name = Helper(), name

    def construct(self, x, y):
        return getattr(self.helper, self.name)(self.dense(x), y) + 0 * self.helper.own(self.dense(x), y)

    def loss(self):
        """It has the name of a method of the helper's."""


class Unused(Classifier):
    """Has methods of a base class that nothing calls."""

    def construct(self, x, y):
        return ops.square(self.dense(x)[:, 0] - y).mean()

    def evaluate(self, logits, labels):
        return ops.cross_entropy(logits, labels, self.class_weight)


class WithComment(Classifier):
    def construct(self, x, y):
        # A comment in the first column.
        return ops.cross_entropy(self.dense(x), y, self.no_weight)


class ByLocals(Classifier):
    def construct(self, x, y):
        nothing = None
        function = ops.cross_entropy
        return function(self.dense(x), y, nothing, **self.arguments)

    arguments = {"reduction": "mean"}


class Chosen(Classifier):
    weighs = False

    def construct(self, x, y):
        weight = self.class_weight if self.weighs else None
        return ops.cross_entropy(self.dense(x), y, weight, int(self.settings.__dict__.get("label", -100)))


class Compiled(Classifier):
    @ms.jit
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, self.no_weight, self.ignored)

    ignored = -100


def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(Classifier):
    @timed
    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y, self.no_weight)


class Inside(Classifier):
    def construct(self, x, y):
        def forward(weight):
            return ops.cross_entropy(self.dense(x), y, weight=self.no_weight) * weight

        return forward(1.0)


class OfNoModule(Classifier):
    """Has something of a class that does not say where it is from."""

    def __init__(self):
        super().__init__()
        self.odd = Meta("Odd", (), {})()

    def construct(self, x, y):
        return ops.cross_entropy(self.dense(x), y)


QUIET = [
    OfNoModule,
    OfConfig,
    lambda: ByHelper("loss"),
    Unused,
    WithComment,
    ByLocals,
    Chosen,
    Compiled,
    Decorated,
    Inside,
]


@pytest.mark.parametrize("make", QUIET, ids=lambda make: make.__name__)
def test_where_nothing_is_weighed_nothing_is_said(make):
    cell = make()
    assert LossKind(cell).reason == "" and said_of_labels(cell, 0, 1, 2) == []


def test_another_input_that_has_the_label_is_none():
    kind = LossKind(ByConstant())
    words, labels = Tensor(np.int32([0, 1])), Tensor(np.int32([1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind.look_at([(words, labels)])
    with pytest.warns(UserWarning, match="leaves labels of ignore_index=0 out of its mean"):
        kind.look_at([(labels, words)])
