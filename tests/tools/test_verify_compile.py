"""verify(compile=True): what Python decides in construct is decided once in a graph, and is named."""

import collections
import random
import time
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import raises, typed

from ms_gradaccum import CompileReport, GradAccumulation, verify

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(6, 2)).astype(np.float32)
Y = RANDOM.normal(size=6).astype(np.float32)
STRENGTH = 1.0


def batch():
    return Tensor(X), Tensor(Y)


class Line(nn.Cell):
    """A line and its mean squared error, times what a subclass says."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, -1.0]), "weight")
        self.bias = Parameter(Tensor([0.5]), "bias")

    def output(self, x):
        return (x * self.weight).sum(-1) + self.bias

    def construct(self, x, y):
        return ops.square(self.output(x) - y).mean()


def compiled(network, inputs=None):
    """Verify in PYNATIVE mode and return what was said of compiling. Eagerly nothing may differ."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return verify(network, inputs or batch(), 2, compile=True).compiled


def assert_causes(report, *beginnings):
    found = [next((b for b in beginnings if cause.startswith(b)), cause) for cause in report.causes]
    assert sorted(found) == sorted(beginnings)
    assert report.equal == (not beginnings)


class Settings:
    def __init__(self):
        self.power = 1.0


def helper(value):
    return value * STRENGTH


class Reads(Line):
    """Reads in all the ways in which Python can."""

    rate = 1.0

    def __init__(self, outside):
        super().__init__()
        self.alpha, self.flag, self.stage, self.count = 1.0, True, "all", 1
        self.mask = Tensor([1.0, 1.0])
        self.table, self.steps = {"temperature": 1.0}, [1.0, 2.0]
        self.settings = Settings()
        self.never_read, self.of_no_effect, self.rows = 1.0, 1.0, 2
        self.factor = outside

    def construct(self, x, y):
        shape = x.reshape(-1, self.rows).shape  # With other rows it cannot be run at all.
        loss = super().construct(x * self.mask, y) * self.alpha * self.rate + 0 * self.of_no_effect * shape[1]
        loss = loss * self.table["temperature"] * self.steps[1] * self.settings.power
        if self.flag and self.stage == "all":
            loss = loss + self.count
        return helper(self.factor(loss))


def test_what_construct_reads_of_python_is_named_and_nothing_else():
    scale = 1.0

    def outside(value):
        return value * scale

    network = Reads(outside)
    names = [name for name in vars(network) if name not in vars(nn.Cell())]
    before = [repr(getattr(network, name)) for name in names]
    report = compiled(network)
    assert report.equal_if_unchanged
    attributes = ("alpha", "flag", "stage", "count", "mask", "table", "steps")
    assert_causes(
        report,
        *(f"The attribute {name} of the network: compiled, what it is at the first step" for name in attributes),
        "The attribute rate of the class Reads: ",
        "Settings.power of the network: ",
        f"The global STRENGTH of {__name__}: ",
        f"The variable scale around {test_what_construct_reads_of_python_is_named_and_nothing_else.__qualname__}",
    )
    assert "make it an input of the network, or a Parameter" in report.causes[0]
    assert [repr(getattr(network, name)) for name in names] == before
    assert (Reads.rate, STRENGTH, scale, network.settings.power) == (1.0, 1.0, 1.0, 1.0)


class Rebound(Line):
    """Has one cell under two names, and calls it by the second one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(2, 2)
        self.used = self.first

    def construct(self, x, y):
        return super().construct(self.used(x), y)


def test_a_cell_that_is_rebound_is_kept_by_any_graph():
    report = compiled(Rebound())
    assert_causes(report)
    assert "the cells inside, such as used" in report.kept


class Stock(nn.Cell):
    """Nothing but layers of MindSpore's."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 4, weight_init="normal")
        self.norm = nn.LayerNorm((4,))
        self.drop = nn.Dropout(p=0.5)
        self.head = nn.Dense(4, 1, weight_init="normal")

    def construct(self, x, y):
        return ops.square(self.head(self.drop(self.norm(self.dense(x)))).squeeze(-1) - y).mean()


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["GRAPH", "PYNATIVE"])
def test_what_is_equal_and_what_any_graph_keeps(mode, monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=mode)
    network = Stock()
    report = verify(GradAccumulation(network, 2), batch(), None, compile=True)
    assert_causes(report.compiled)
    assert report.compiled.speedup > 0
    kept = "requires_grad of parameters", "the mode (set_train) of drop", "the cells inside, such as norm"
    assert report.compiled.kept[:3] == kept
    # The masks differ between window and whole batch, whatever runs them.
    assert not report.equal and str(report).endswith(str(report.compiled))
    assert ms.get_context("mode") == mode
    assert all(parameter.requires_grad for parameter in network.get_parameters())
    assert not any(cell.training for _, cell in network.cells_and_names())
    assert type(network.dense) is nn.Dense


class Draws(Line):
    def construct(self, x, y):
        return super().construct(x, y) * random.random() * float(np.random.rand())


def test_draws_of_python_and_numpy_are_made_once():
    states = repr(random.getstate()), repr(np.random.get_state())
    report = compiled(Draws())
    assert_causes(report, "Python's random draws once", "NumPy's random draws once")
    assert not report.equal_if_unchanged
    assert (repr(random.getstate()), repr(np.random.get_state())) == states


class Late(Line):
    def construct(self, x, y):
        return super().construct(x, y) * (1 + time.time() % 10)


def test_the_time_is_read_once():
    assert_causes(compiled(Late()), "Time, or whatever else Python reads")


class Noise(Line):
    def construct(self, x, y):
        return super().construct(x * ops.rand(x.shape), y)


def test_a_random_operator_is_no_draw_of_python():
    (cause,) = compiled(Noise()).causes
    assert cause.startswith("A random operator that is no Dropout layer")


class Reverses(Line):
    def __init__(self):
        super().__init__()
        self.reverse = ops.HookBackward(lambda grads: (-grads[0],))

    def construct(self, x, y):
        return super().construct(self.reverse(x * self.weight), y)


REVERSE = [ops.HookBackward(lambda grads: (-grads[0],))]


class ReversesByGlobal(Line):
    def construct(self, x, y):
        return super().construct(REVERSE[0](x * self.weight), y)


class Doubles(Line):
    def construct(self, x, y):
        output = self.output(x)
        other = output
        output *= 2
        return ops.square(other - y).mean()


def test_a_gradient_that_is_not_reversed_and_an_alias_that_is_not_doubled():
    for kind in (Reverses, ReversesByGlobal):
        report = compiled(kind())
        assert_causes(report, "Gradients (weight) differ from the first run on")
        assert "HookBackward" in report.causes[0] and "*=" not in report.causes[0]
    report = compiled(Doubles())
    assert_causes(report, "Gradients (weight, bias) differ from the first run on")
    assert "HookBackward" not in report.causes[0] and "*=" in report.causes[0]


COUNTS = []


class Remembers(Line):
    """Leaves things behind."""

    def __init__(self):
        super().__init__()
        self.last, self.losses, self.by_name, self.array = None, [], {"a": 1}, np.zeros(1)
        self.block = nn.Identity()

    def construct(self, x, y):
        loss = super().construct(self.block(x), y)
        self.last = loss
        self.losses.append(loss)
        self.by_name["b"] = loss
        COUNTS.append(1)
        return loss


def test_what_an_eager_run_leaves_behind_is_named_and_taken_back():
    network = Remembers()
    losses = network.losses
    report = compiled(network)
    # An assignment to an item of a dict is one that a graph makes, too.
    names = "attribute last", "attribute losses"
    of = " of the network: an eager run leaves it changed, and a compiled one leaves"
    assert_causes(report, *(f"The {name}{of}" for name in names), f"The global COUNTS of {__name__}: an eager run")
    assert (network.last, network.losses, network.by_name, COUNTS) == (None, [], {"a": 1}, [])
    assert network.losses is losses


def test_what_was_left_is_taken_back_without_compile_and_after_an_error(eager):
    class Fails(Remembers):
        def construct(self, x, y):
            self.array[0] = 1
            self.block = nn.Dense(2, 2)
            self.extra = 1
            super().construct(x, y)
            raise ValueError("too late")

    network = Fails()
    block = network.block
    with pytest.raises(ValueError, match="too late"):
        verify(network, batch(), 2)
    assert (network.last, network.losses, COUNTS, network.array[0]) == (None, [], [], 0)
    assert network.block is block and not hasattr(network, "extra")


def test_a_tensor_that_is_changed_in_place_is_given_back():
    class Writes(Line):
        def __init__(self):
            super().__init__()
            self.seen = Tensor([0.0, 0.0])

        def construct(self, x, y):
            self.seen[0] = self.seen[0] + 1
            return super().construct(x, y)

    network = Writes()
    seen = network.seen
    assert_causes(compiled(network), "The attribute seen of the network: an eager run leaves it changed")
    assert network.seen is seen and seen.asnumpy().tolist() == [0, 0]


def test_graph_mode_is_compared_with_pynative_mode(monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    report = verify(Annealed(), batch(), 2, compile=True)
    assert report.equal
    assert_causes(report.compiled, "The attribute alpha of the network: ")
    assert ms.get_context("mode") == ms.GRAPH_MODE


class Unknown(Line):
    def construct(self, x, y):
        return super().construct(x, Tensor(np.abs(y.asnumpy())))


def test_what_cannot_be_compiled_is_named_with_the_reason():
    hooked = Line()
    hooked.register_forward_hook(lambda cell, inputs, output: output * 2)
    report = compiled(hooked)
    assert_causes(report, "The network cannot be compiled: For 'verify', the argument 'compile' must be None")
    assert np.isnan(report.speedup) and str(report).startswith("Compiled: not equal.\n- The network cannot")
    hooked = Line()
    hooked.weight.register_hook(lambda grad: grad * 2)
    (cause,) = compiled(hooked).causes
    assert "weight has a hook" in cause
    assert_causes(compiled(Unknown()), "The network cannot be compiled: its loss is no tensor there")


def test_a_named_tuple_loses_its_gradient_in_a_graph():
    pair = collections.namedtuple("Pair", "x y")

    class Takes(Line):
        def construct(self, pair):
            return super().construct(pair.x, pair.y)

    report = compiled(Takes(), (pair(*batch()),))
    assert_causes(report, "The network cannot be compiled: its inputs hold Pair, a NamedTuple")


class Annealed(Line):
    def __init__(self):
        super().__init__()
        self.alpha = 1.0

    def construct(self, x, y):
        return super().construct(x, y) * self.alpha


def test_pynative_mode_obeys_an_annealed_attribute():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Annealed()
    first = verify(network, batch(), 2)
    network.alpha = 3.0
    second = verify(network, batch(), 2)
    assert first.equal and second.equal and first.compiled is None
    loss = np.mean((X.astype(np.float64) @ [1, -1] + 0.5 - Y) ** 2)
    assert (first.window_loss, second.window_loss) == (pytest.approx(loss, rel=1e-5), pytest.approx(3 * loss, rel=1e-5))
    assert first.whole_loss * 3 == pytest.approx(second.whole_loss, rel=1e-5)


def test_a_report_in_words():
    kept = ("requires_grad of parameters",)
    report = CompileReport(False, False, ("A cause.",), kept, 2.534)
    assert str(report).splitlines()[:2] == ["Compiled: not equal, 2.5 times as fast.", "- A cause."]
    report = CompileReport(False, True, ("A cause.",), (), 25.34)
    assert str(report).splitlines() == [
        "Compiled: equal, if nothing that is named here changes in training, 25 times as fast.",
        "- A cause.",
    ]
    assert str(CompileReport(True, True, (), (), float("nan"))) == "Compiled: equal."


def test_compile_is_true_or_none():
    remedy = "None follows MindSpore's mode: set_context(mode=PYNATIVE_MODE) runs the network op by op."
    rule = "For 'verify', the argument 'compile' must be True or None, but got {}. " + remedy
    for wrong, kind in ((1, TypeError), ("yes", TypeError), (False, ValueError)):
        with raises(kind, rule.format(typed(wrong))):
            verify(Line(), batch(), 2, compile=wrong)
    with mock.patch.dict("os.environ", MS_JIT="0"):
        sentence = (
            "For 'verify', the argument 'compile' must be None where MS_JIT=0 has nothing compiled, but got True. "
            "Unset MS_JIT, or leave compile out."
        )
        with raises(ValueError, sentence):
            verify(Line(), batch(), 2, compile=True)


def test_a_note_on_what_model_train_would_wake(eager):
    class Layers(Line):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.still = nn.BatchNorm1d(2, use_batch_statistics=False)
            self.drop = nn.Dropout(p=0.5)
            self.pass_on = nn.ReLU()

        def construct(self, x, y):
            return super().construct(self.pass_on(self.drop(self.still(self.norm(x)))), y)

    network = Layers().set_train()
    for cell in (network.norm, network.still, network.drop, network.pass_on):
        cell.set_train(False)
    report = verify(network, batch(), 2)
    assert report.equal and len(report.notes) == 1
    assert report.notes[0].startswith("Frozen by set_train(False) in a network that is in training mode: norm, drop.")
    assert "Note:\n- Frozen by set_train(False)" in str(report)
    # As a whole in evaluation mode it has not begun to train.
    assert verify(network.set_train(False), batch(), 2).notes == ()
    assert verify(network.set_train(), batch(), 2).notes == ()
