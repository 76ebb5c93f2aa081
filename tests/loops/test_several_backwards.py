"""Losses of tensors that have a `backward` of their own, and a second backward pass of a batch, which is refused."""

from contextlib import nullcontext
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from linear_toy import momentum, sgd
from mindspore import Tensor, _c_expression, nn, ops
from mindspore.amp import StaticLossScaler
from mindspore.common.api import _pynative_executor
from refusal import refuses, told
from step_probe import Learned, Of, number

from ms_gradaccum import Accumulator

pytestmark = pytest.mark.usefixtures("eager")
RANDOM = np.random.default_rng(7)
REAL, FAKE = (RANDOM.normal(size=(12, 3)).astype(np.float32) for _ in range(2))
# Two windows of two batches, uneven inside.
BATCHES = (slice(0, 5), slice(5, 6), slice(6, 8), slice(8, 12))
WINDOWS = (slice(0, 6), slice(6, 12))


class Critic(nn.Cell):
    """The loss of a critic that shall give its rows this label."""

    def __init__(self):
        super().__init__()
        values = np.random.default_rng(3).normal(size=(1, 3)).astype(np.float32)
        self.layer = nn.Dense(3, 1, weight_init=Tensor(values), bias_init="zeros")

    def construct(self, rows, label):
        return ops.softplus(self.layer(rows) * (1.0 - 2.0 * label)).mean()


def values_of(network):
    return [parameter.asnumpy() for parameter in network.trainable_params()]


@pytest.fixture
def backward_of_tensors(monkeypatch):
    """Give tensors the `backward` of MindSpore after 2.10, which runs the engine of 2.10. Yield what lets it record."""
    if not hasattr(_c_expression, "run_backward"):
        pytest.skip("this MindSpore has no run_backward")

    def backward(loss):
        settings = {"allow_unreachable": True, "accumulate_grad": True}
        _c_expression.run_backward((loss,), (ops.ones_like(loss),), False, False, (), **settings)

    grad = property(lambda tensor: tensor._grad, lambda tensor, value: setattr(tensor, "_grad", value))
    monkeypatch.setattr(_c_expression.TensorPy, "backward", backward, raising=False)
    monkeypatch.setattr(_c_expression.TensorPy, "grad", grad, raising=False)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield partial(_pynative_executor.set_grad_flag, True)
    _pynative_executor.set_grad_flag(False)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": StaticLossScaler(1024)}], ids=["", "scaled"])
def test_losses_that_have_a_backward_pass_of_their_own(backward_of_tensors, options):
    twin, critic = Critic(), Critic()
    both = Of(nn.Identity(), lambda real, fake: twin(real, 1.0) + twin(fake, 0.0))
    step = nn.TrainOneStepCell(both, momentum(twin, 0.5)).set_train()
    losses = [number(step(Tensor(REAL[rows]), Tensor(FAKE[rows]))) for rows in WINDOWS]
    backward_of_tensors()
    optimizer = momentum(critic, 0.5)
    accumulator = Accumulator(critic, optimizer, 2, **options)
    accumulator.prepare(optimizer)
    critic.layer.weight.grad = Tensor(np.ones((1, 3), np.float32))  # Left there by somebody else.
    reports = []
    for rows in BATCHES:
        count = len(REAL[rows])
        with accumulator.accumulate():
            loss = critic(Tensor(REAL[rows]), 1.0) + critic(Tensor(FAKE[rows]), 0.0)
            assert accumulator.backward(loss, weight=Tensor(count)) is loss
            assert (accumulator.clip_grad_norm(1e6) is not None) == accumulator.sync_gradients
            reports.append(optimizer.step())
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in critic.trainable_params())
    np.testing.assert_allclose([number(report.loss) for report in reports[1::2]], losses, rtol=2e-6)
    for value, exact in zip(values_of(critic), values_of(twin)):
        np.testing.assert_allclose(value, exact, rtol=2e-6, atol=2e-7)


def test_gradients_of_functions_and_of_losses_take_turns(backward_of_tensors):
    critic, twin = (Critic() for _ in range(2))
    step = nn.TrainOneStepCell(twin, momentum(twin, 0.5)).set_train()
    for rows in WINDOWS:
        step(Tensor(REAL[rows]), 1.0)
    backward_of_tensors()
    accumulator = Accumulator(critic, momentum(critic, 0.5), 2)
    for number_of_batch, rows in enumerate(BATCHES):
        with accumulator.accumulate():
            if number_of_batch % 2:
                accumulator.backward(critic(Tensor(REAL[rows]), 1.0), weight=len(REAL[rows]))
            else:  # MindSpore's gradient of a function ends its records, and so does the measurement of the loss.
                accumulator.backward(Tensor(REAL[rows]), 1.0)
            accumulator.step()
    for value, exact in zip(values_of(critic), values_of(twin)):
        np.testing.assert_allclose(value, exact, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("prepares", [False, True])
def test_a_loop_that_calls_loss_backward_alone_is_named(backward_of_tensors, prepares):
    backward_of_tensors()
    critic = Critic()
    optimizer = momentum(critic, 0.5)
    accumulator = Accumulator(critic, optimizer)
    stepper = accumulator.prepare(optimizer) if prepares else accumulator
    for count, steps in ((0, 3), (1, 1), (0, 2)):
        with told("step() must follow its") as said:
            for _ in range(steps):
                with nullcontext() if prepares else accumulator.accumulate():
                    critic(Tensor(REAL), 1.0).backward()
                    stepper.step()
                    stepper.zero_grad()
        assert len(said) == count


def test_an_update_does_not_move_the_loss_of_before(monkeypatch):
    monkeypatch.delenv("MS_JIT")  # The sums and the update are compiled.

    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Learned(3.0, lambda loss, x: loss)
    accumulator = Accumulator(network, sgd(network, 1.0), check_loss=False)
    with accumulator.accumulate():
        loss = accumulator.backward(Tensor(REAL))
        accumulator.step()
    assert number(network.weight) == 2.0 and number(loss) == 3.0


def test_a_tensor_without_a_backward_pass_is_refused():
    critic = Critic()
    with refuses(TypeError, "Call backward"):
        Accumulator(critic, momentum(critic, 0.5)).backward(critic(Tensor(REAL), 1.0))
