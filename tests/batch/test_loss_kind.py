"""Losses that are no means over rows, and batches without a weight: one warning with the way out."""

import inspect
import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, sgd, whole
from mindspore import Parameter, Tensor, mint, nn, ops
from step_probe import Around, KeepGradients, tensors

from ms_gradaccum import Accumulator, GradAccumulation, TokenMeanLoss, TrainOneStepCell, verify
from ms_gradaccum.batch.loss_kind import LossKind
from ms_gradaccum.parallel.semi_auto import SemiAuto

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = np.float32(np.arange(8).reshape(4, 2))
PADDED = np.int32([0, -100, 2, 1])
START = "For 'GradAccumulation', the loss should be a mean over rows, but "
BY_ROWS = "but a window counts its micro batches by their rows."
PAIR = "return (loss_sum, weight) with weighted=True."


def labels_loss(loss_fn, backbone=None):
    return nn.WithLossCell(backbone or nn.Dense(2, 3), loss_fn)


def said_of(loss_cell, *batch, micro_size=2, calls=1, **settings):
    """What a training on one batch warns of."""
    network = GradAccumulation(loss_cell, micro_size)
    step = TrainOneStepCell(network, KeepGradients(loss_cell.trainable_params()), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            step(*tensors(*batch))
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_labels_that_are_ignored_are_warned_of_once(kind):
    text = (
        f"{START}{kind.__name__} leaves labels of ignore_index=-100 out of its mean, {BY_ROWS} Use TokenMeanLoss, or "
        f"{PAIR}"
    )
    assert said_of(labels_loss(kind()), TOKENS, PADDED, calls=2) == [text]
    assert said_of(labels_loss(kind()), TOKENS, abs(PADDED) % 3) == []


@pytest.mark.filterwarnings("error:For 'GradAccumulation'")
@pytest.mark.parametrize("kind", [mint.nn.CrossEntropyLoss, mint.nn.NLLLoss])
def test_labels_of_losses_of_mint_are_looked_at(kind):
    """This device has no kernel for them."""
    LossKind(labels_loss(kind())).look_at([tensors(TOKENS, abs(PADDED) % 3)])
    with pytest.warns(UserWarning, match=f"{START}{kind.__name__} leaves labels of ignore_index=-100 out of its mean"):
        LossKind(labels_loss(kind())).look_at([tensors(TOKENS, PADDED)])


def test_labels_of_two_losses_of_one_kind_are_looked_at_once():
    cell = labels_loss(nn.CrossEntropyLoss())
    cell.also = nn.CrossEntropyLoss()
    assert LossKind(cell).ignoring == [("CrossEntropyLoss", -100)]


def test_the_warning_is_right(mode):
    """The same batch with an ignored label in one micro batch has another gradient than the whole batch has."""
    backbone = nn.Dense(2, 3, weight_init="ones", bias_init="zeros")
    loss_cell = labels_loss(nn.CrossEntropyLoss(), backbone)
    gradients = []
    for network in (loss_cell, GradAccumulation(loss_cell, 2), GradAccumulation(TokenMeanLoss(backbone), 2)):
        step = TrainOneStepCell(network, KeepGradients(backbone.trainable_params()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(*tensors(TOKENS, PADDED))
        gradients.append(step.optimizer.gradients()[0])
    assert np.abs(gradients[0] - gradients[1]).max() > 0.05
    np.testing.assert_allclose(gradients[0], gradients[2], rtol=1e-5, atol=1e-6)


def test_a_value_among_the_inputs_of_the_network_is_no_label():
    class Embedded(nn.Cell):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def construct(self, words):
            return self.table(words)

    words, labels = np.int32([0, 1, 2, 3]), np.int32([1, 1, 2, 2])
    assert said_of(labels_loss(nn.CrossEntropyLoss(ignore_index=0), Embedded()), words, labels) == []
    assert len(said_of(labels_loss(nn.CrossEntropyLoss(ignore_index=2), Embedded()), words, labels)) == 1


def test_class_weights_are_warned_of():
    loss_fn = nn.CrossEntropyLoss(weight=Tensor(np.float32([1, 2, 3])))
    expected = f"{START}CrossEntropyLoss divides by the sum of the class weights of its labels, {BY_ROWS} Rather {PAIR}"
    assert said_of(labels_loss(loss_fn), TOKENS, np.int32([0, 1, 2, 0])) == [expected]


ALL_LOSSES = [
    kind
    for module in (nn, mint.nn)
    for name, kind in sorted(vars(module).items())
    if name.endswith("Loss") and inspect.isclass(kind) and "reduction" in inspect.signature(kind.__init__).parameters
]
# Its constructor keeps nothing of the reduction but a function.
UNKNOWN = {mint.nn.BCELoss, mint.nn.BCEWithLogitsLoss, nn.SampledSoftmaxLoss}


@pytest.mark.parametrize("kind", [kind for kind in ALL_LOSSES if kind not in UNKNOWN])
def test_every_loss_of_mindspore_that_adds_up_is_known(kind):
    expected = (
        f"{START}{kind.__name__} adds up its rows with reduction='sum', {BY_ROWS} Give it reduction='mean', or {PAIR}"
    )
    assert LossKind(nn.WithLossCell(line(), kind(reduction="sum"))).reason == expected
    for reduction in ("mean", "none"):
        assert LossKind(nn.WithLossCell(line(), kind(reduction=reduction))).reason == ""


def test_a_function_of_the_whole_batch_is_warned_of():
    expected = (
        f"{START}RMSELoss is a function of the whole batch, which no sum over micro batches gives. "
        "Train it as a GradCacheLoss, or do not split a batch of it."
    )
    assert said_of(nn.WithLossCell(line(), nn.RMSELoss()), X, X) == [expected]


class OwnLoss(nn.Cell):
    """A loss cell of the user's own, with a weight and an ignore_index that mean something else."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 3)
        self.weight, self.ignore_index, self.reduction = 3.0, 1, "mean"

    def construct(self, x, labels):
        return ops.cross_entropy(self.dense(x), labels)


@pytest.mark.parametrize(
    "reduction,micro_size,steps,warns",
    [("sum", 1, 1, False), ("sum", 2, 1, True), ("sum", 1, 2, True), ("mean", 2, 2, False)],
)
def test_a_window_as_part_of_a_graph_warns_of_what_shows_without_labels(
    reduction, micro_size, steps, warns, monkeypatch
):
    """Labels that are ignored only a batch shows, which a graph does not see."""
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    adds_up = f"{START}MSELoss adds up its rows with reduction='sum', {BY_ROWS} Give it reduction='mean', or {PAIR}"
    loss_cell = nn.WithLossCell(line(), nn.MSELoss(reduction))
    optimizer = KeepGradients(loss_cell.trainable_params())
    step = TrainOneStepCell(GradAccumulation(loss_cell, micro_size), optimizer, accumulation_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Around(step)(*tensors(X, X))
    assert [str(each.message) for each in caught if START in str(each.message)] == [adds_up] * warns


def test_semi_auto_parallel_warns_of_what_shows_without_labels():
    """What a step that the compiler partitions is told while it is built."""
    loss_cell = GradAccumulation(labels_loss(nn.CrossEntropyLoss(weight=Tensor(np.float32([1, 2, 3])))), 2)
    with pytest.warns(UserWarning, match="divides by the sum of the class weights of its labels"):
        SemiAuto(loss_cell).check(loss_cell, sgd(loss_cell))


class Rounded(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = line()

    def construct(self, x, y):
        return ops.square(self.dense(x) - y).mean()

    def bprop(self, x, y, out, dout):
        return dout * x, dout * y


def test_semi_auto_parallel_warns_of_what_need_not_be_linear():
    loss_cell = GradAccumulation(Rounded(), 2)
    with pytest.warns(UserWarning, match="does in the backward pass .* must be linear in the gradient in semi-auto"):
        SemiAuto(loss_cell).check(loss_cell, sgd(loss_cell))


def bce_gradient(rows):
    """What MindSpore says that the gradient of a mean over so many rows is, and what it is."""
    x = np.linspace(-1, 2, rows, dtype=np.float32).reshape(rows, 1)
    weight = Parameter(Tensor([[1.0]], ms.float32), "weight")
    loss_fn = nn.BCEWithLogitsLoss()
    (gradient,) = ms.value_and_grad(lambda x, y: loss_fn(x * weight, y), None, [weight])(*tensors(x, x**0))[1:]
    return gradient[0].asnumpy().item(), np.mean(x * (1 / (1 + np.exp(-x)) - 1))


def test_mindspore_divides_by_the_rows_of_the_first_batch_of_the_process():
    """The reason for the next test; when this fails, MindSpore has mended it."""
    assert any(found != pytest.approx(right, rel=0.1) for found, right in map(bce_gradient, (2, 4)))


class CalledLoss(nn.Cell):
    """The function without its cell."""

    def construct(self, logits, y):
        return ops.binary_cross_entropy_with_logits(logits, y, ops.ones_like(y), ops.ones_like(y), "mean")


class ConstantLabels(nn.Cell):
    """The discriminator's loss of a GAN: its labels are no input."""

    def __init__(self):
        super().__init__()
        self.loss_fn = nn.BCEWithLogitsLoss()

    def construct(self, logits, y):
        real, generated = self.loss_fn(logits, ops.ones_like(logits)), self.loss_fn(logits, ops.zeros_like(logits))
        return real + 2 * generated + 0 * y.mean()


@pytest.mark.parametrize("before", [2, 3, 7], ids=lambda rows: f"{rows} rows before")
@pytest.mark.parametrize(
    "make", [nn.BCEWithLogitsLoss, CalledLoss, ConstantLabels], ids=["a cell", "a function", "constant labels"]
)
def test_its_gradient_is_right_whatever_batches_the_process_had(make, before, monkeypatch):
    monkeypatch.delenv("MS_JIT")
    bce_gradient(before)
    loss_cell = nn.WithLossCell(line(), make())
    optimizer = KeepGradients(loss_cell.trainable_params())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        TrainOneStepCell(GradAccumulation(loss_cell, 2), optimizer)(*tensors(X[:5], np.float32(X[:5] > 2)))
    # Of two losses, the second one twice: -0.5 and 2 * 0.5.
    slope = 0.5 if make is ConstantLabels else 0.5 - (X[:5] > 2).astype(np.float64)
    np.testing.assert_allclose(optimizer.gradients()[0], [[np.mean(X[:5] * slope)]], rtol=1e-5)


def test_verify_has_the_right_gradient_of_it():
    loss_cell = nn.WithLossCell(line(), nn.BCEWithLogitsLoss())
    assert verify(loss_cell, tuple(tensors(X[:5], np.float32(X[:5] > 2))), 2).equal


def test_cells_of_the_user_are_not_judged():
    assert said_of(OwnLoss(), TOKENS, np.int32([0, 1, 2, 0])) == []


def test_a_window_of_one_micro_batch_needs_no_warning():
    padded = (labels_loss(nn.CrossEntropyLoss()), TOKENS, PADDED)
    assert said_of(*padded, micro_size=1) == []
    assert len(said_of(*padded, micro_size=1, accumulation_steps=2)) == 1


def test_an_accumulator_warns_too():
    loss_cell = labels_loss(nn.CrossEntropyLoss())
    for steps, count in ((1, 0), (2, 1)):
        accumulator = Accumulator(loss_cell, KeepGradients(loss_cell.trainable_params()), steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accumulator.backward(*tensors(TOKENS, PADDED))
        assert len([each for each in caught if START in str(each.message)]) == count


def test_a_network_that_says_its_weight_needs_no_warning():
    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.loss_fn = nn.Dense(2, 3), nn.CrossEntropyLoss(reduction="sum")

        def construct(self, x, labels):
            return self.loss_fn(self.dense(x), labels), (labels >= 0).sum()

    network = Weighted()
    step = TrainOneStepCell(GradAccumulation(network, 2, weighted=True), KeepGradients(network.trainable_params()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*tensors(TOKENS, PADDED))


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
