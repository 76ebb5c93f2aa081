"""The Advisor: it changes no training, and its own errors end none."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Tensor, nn, value_and_grad
from open_window import silent_advisor
from refusal import no_warning, refuses, told, warns
from step_probe import Of, sgd_step
from test_loss_measurement import everything_trained

from ms_gradaccum import Accumulator, GradAccumulation, GradAccumulationWarning, TrainOneStepCell
from ms_gradaccum.advice.first_batches import FirstBatches
from ms_gradaccum.advice.gradient_watch import GradientWatch
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.advice.skipped_windows import SkippedWindows
from ms_gradaccum.advice.window_watch import WindowWatch
from ms_gradaccum.training import window

pytestmark = pytest.mark.usefixtures("eager")

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X[:, :1] * 2 - X[:, 1:2]
FAILED = "a check that only warns has failed with OSError: broken"


def dense():
    return nn.Dense(3, 1, weight_init="ones", bias_init="zeros")


def step_of(network, **settings):
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    return TrainOneStepCell(loss_cell, nn.Momentum(network.trainable_params(), 0.1, 0.9), **settings).set_train()


def trained(x=X, windows=3):
    """Return the loss of each batch and the weights after some windows of two batches, and the warnings."""
    network = dense()
    with told("For '") as said:
        step = step_of(network, accumulation_steps=2)
        losses = [step(Tensor(x), Tensor(Y)).loss.asnumpy().tobytes() for _ in range(2 * windows)]
    return losses, network.weight.asnumpy().tobytes(), said


def normalised():
    return nn.SequentialCell(nn.Dense(3, 3), nn.BatchNorm1d(3), nn.Dense(3, 1))


def breaks(*_):
    raise OSError("broken")


@pytest.fixture
def silent(monkeypatch):
    """Give windows that are built from now on an Advisor that says nothing."""
    monkeypatch.setattr(window, "Advisor", silent_advisor)


HOOKS = [
    (FirstBatches, "look"),
    (WindowWatch, "begin_batch"),
    (WindowWatch, "end_batch"),
    (WindowWatch, "end_window"),
    (LossMeasurement, "after_batch"),
]


@pytest.mark.parametrize("kind, name", HOOKS, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_inside_it_is_one_warning_and_the_training_is_the_same(kind, name, monkeypatch):
    losses, weights, said = trained()
    assert said == []
    monkeypatch.setattr(kind, name, breaks)
    *found, (said,) = trained()
    assert found == [losses, weights] and FAILED in said


def test_an_error_in_the_explanation_of_a_skipped_window_is_one_too(monkeypatch):
    monkeypatch.setattr(SkippedWindows, "note", breaks)
    (said,) = trained(X * np.inf, windows=1)[2]
    assert FAILED in said


def test_an_error_in_the_explanation_of_an_error_leaves_the_error_as_it_is(monkeypatch):
    monkeypatch.setattr("ms_gradaccum.advice.advisor.explain_split", breaks)
    with warns(FAILED):
        with pytest.raises(ValueError, match="(?s)^(?!.*broken)"):
            step_of(dense())(Tensor(X), Tensor(np.ones((8, 1, 3, 2), np.float32)))


def test_a_filter_that_makes_errors_of_warnings_stops_the_batch_and_not_the_training():
    network = normalised()
    step = step_of(network)
    with no_warning(), pytest.raises(GradAccumulationWarning, match="BatchNorm1d takes the mean"):
        step(Tensor(X), Tensor(Y))
    before = network[0].weight.asnumpy().copy()
    assert bool(step(Tensor(X), Tensor(Y)).updated)
    assert np.abs(network[0].weight.asnumpy() - before).max() > 0


def test_a_training_is_the_same_with_a_silent_one(request):
    seen = everything_trained(check_loss=True)
    request.getfixturevalue("silent")
    assert repr(everything_trained(check_loss=True)) == repr(seen)


def test_a_silent_one_says_nothing_but_explains_errors(silent):
    with no_warning():
        step_of(normalised())(Tensor(X), Tensor(Y))
    step = sgd_step(Of(dense(), lambda out, mask: ms.ops.matmul(mask, out).mean()))
    with refuses(Exception, "may be split"):
        step(Tensor(X), Tensor(np.eye(8, dtype=np.float32)))


def test_gradients_of_a_loop_are_seen_where_nothing_else_is_left_to_see(monkeypatch):
    network = dense()
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), sgd(network, 0.1), 2)
    grad_fn = value_and_grad(nn.WithLossCell(network, nn.MSELoss()), None, network.trainable_params())
    monkeypatch.setattr(GradientWatch, "note", breaks)
    with warns("check that only") as caught:
        for _ in range(4):
            loss, grads = grad_fn(Tensor(X), Tensor(Y))
            accumulator(grads, 8, loss)
    assert len(caught) == 1 and accumulator.updated
