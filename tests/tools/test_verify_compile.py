"""verify(compile=True): one window op by op and compiled; the parameters that differ are named."""

import collections
import random
import time
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses
from step_probe import tensors
from verify_probe import Line, X, Y, differing

from ms_gradaccum import GradAccumulation, verify


def compiled(network, inputs=None):
    """Verify in PYNATIVE mode and return what was said of compiling."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return verify(network, inputs or tensors(X, Y), 2, compile=True).compiled


class Stock(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 4, weight_init="normal")
        self.norm = nn.LayerNorm((4,))
        self.drop = nn.Dropout(p=0.5)
        self.head = nn.Dense(4, 1, weight_init="normal")

    def construct(self, x, y):
        return ops.square(self.head(self.drop(self.norm(self.dense(x)))).squeeze(-1) - y).mean()


def test_layers_of_mindspore_are_equal_in_either_mode(mode):
    network = Stock()
    report = verify(GradAccumulation(network, 2), tensors(X, Y), None, compile=True)
    found = report.compiled
    assert found.equal and found.causes == () and differing(found) == set() and found.speedup > 0
    assert {entry.name for entry in found.parameters} == {each.name for each in network.trainable_params()}
    assert found.eager_loss == pytest.approx(found.compiled_loss, rel=1e-5)
    # The masks differ between window and whole batch, whatever runs them.
    assert not report.equal and str(report).endswith(str(found))
    assert ms.get_context("mode") == mode
    assert not any(cell.training for _, cell in network.cells_and_names())


class Draws(Line):
    def construct(self, x, y):
        return super().construct(x, y) * random.random() * float(np.random.rand())


class Late(Line):
    def construct(self, x, y):
        return super().construct(x, y) * (1 + time.time() % 10)


class Noise(Line):
    def construct(self, x, y):
        return super().construct(x * ops.rand(x.shape), y)


def test_what_differs_from_run_to_run_cannot_be_compared():
    for network in (Late(), Noise()):
        report = compiled(network)
        assert not report.equal and report.parameters == ()
        assert report.causes[0].startswith("A random operator that is no Dropout layer, or something else")


class Reverses(Line):
    def __init__(self):
        super().__init__()
        self.reverse = ops.HookBackward(lambda grads: (-grads[0],))

    def construct(self, x, y):
        return super().construct(self.reverse(x * self.weight), y)


class Doubles(Line):
    def construct(self, x, y):
        output = self.output(x)
        other = output
        output *= 2
        return ops.square(other - y).mean()


@pytest.mark.parametrize(
    "make, names, cause",
    [
        # In a graph the second micro batch has the draws of the first.
        (Draws, {"weight", "bias"}, "draws of random and NumPy"),
        (Reverses, {"weight"}, "HookBackward"),
        (Doubles, {"weight", "bias"}, ""),
    ],
)
def test_what_a_graph_computes_otherwise_is_named(make, names, cause):
    states = repr(random.getstate()), repr(np.random.get_state())
    report = compiled(make())
    assert not report.equal and {name for name, _ in differing(report)} == names and cause in "".join(report.causes)
    assert (report.eager_loss == report.compiled_loss) == (make is Reverses)
    assert (repr(random.getstate()), repr(np.random.get_state())) == states


class Moves(Line):
    """Changes a parameter itself, and no gradient."""

    def __init__(self):
        super().__init__()
        self.seen = Parameter(Tensor(0.0), "seen", requires_grad=False)
        self.counts = []

    def construct(self, x, y):
        self.counts.append(0)
        ops.assign_add(self.seen, Tensor(float(len(self.counts))))
        return super().construct(x, y)


def test_a_parameter_that_a_graph_changes_otherwise_is_named():
    network = Moves()
    report = compiled(network)
    # Op by op it adds 1 and 2. In the graph the list is what it was at first, empty.
    assert not report.equal and differing(report) == {("seen", "state")}
    assert report.parameters[0].max_difference == 3
    assert network.counts == [] and network.seen.asnumpy() == 0


class NotFinite(Line):
    def construct(self, x, y):
        return super().construct(x * float("nan"), y)


class Unknown(Line):
    def construct(self, x, y):
        return super().construct(x, Tensor(np.abs(y.asnumpy())))


class Takes(Line):
    def construct(self, pair):
        return super().construct(pair.x, pair.y)


Pair = collections.namedtuple("Pair", "x y")


def hooked():
    network = Line()
    network.register_forward_hook(lambda cell, inputs, output: output * 2)
    return network


def hooked_weight():
    network = Line()
    network.weight.register_hook(lambda grad: grad * 2)
    return network


@pytest.mark.parametrize(
    "make, inputs, why",
    [
        (NotFinite, None, "An Inf or NaN in the run op by op"),
        (hooked, None, "For 'verify', the argument 'compile' must be None"),
        (hooked_weight, None, "a hook of weight"),
        (Unknown, None, "but got a Python object"),
        (Takes, (Pair(*tensors(X, Y)),), "Pair, a NamedTuple"),
    ],
)
def test_what_cannot_be_compared_is_named_with_the_reason(make, inputs, why):
    report = compiled(make(), inputs)
    cause = report.causes[0]
    assert not report.equal and why in cause and cause in str(report)
    assert cause.startswith("The network cannot be compiled: ") == (make is not NotFinite)


def test_compile_is_true_or_none():
    for wrong, kind in ((1, TypeError), ("yes", TypeError), (False, ValueError)):
        with refuses(kind, "'compile'", "None follows MindSpore's"):
            verify(Line(), tensors(X, Y), 2, compile=wrong)
    with mock.patch.dict("os.environ", MS_JIT="0"):
        with refuses(ValueError, "'compile'", "None where MS_JIT=0"):
            verify(Line(), tensors(X, Y), 2, compile=True)
