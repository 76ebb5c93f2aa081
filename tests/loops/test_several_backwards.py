"""Losses of tensors that have a `backward` of their own, and a second backward pass of a batch, which is refused."""

from contextlib import nullcontext
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, _c_expression, nn, ops
from mindspore.amp import StaticLossScaler
from mindspore.common.api import _pynative_executor
from refusal import refuses, warns
from step_probe import number

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


class BothLosses(nn.Cell):
    def __init__(self, critic):
        super().__init__()
        self.critic = critic

    def construct(self, real, fake):
        return self.critic(real, 1.0) + self.critic(fake, 0.0)


def momentum(network):
    return nn.Momentum(network.trainable_params(), 0.5, 0.9)


def values_of(network):
    return [parameter.asnumpy() for parameter in network.trainable_params()]


def whole_windows():
    """MindSpore's own step on the sum of both losses over all rows of each window."""
    critic = Critic()
    step = nn.TrainOneStepCell(BothLosses(critic), momentum(critic)).set_train()
    losses = [number(step(Tensor(REAL[rows]), Tensor(FAKE[rows]))) for rows in WINDOWS]
    return losses, values_of(critic)


def test_a_second_backward_pass_of_a_batch_is_refused():
    critic = Critic()
    accumulator = Accumulator(critic, momentum(critic), 2)
    with refuses(RuntimeError, "pass in accumulate"), accumulator.accumulate():
        accumulator.backward(Tensor(REAL[:2]), 1.0)
        accumulator.backward(Tensor(FAKE[:2]), 0.0)


def test_an_argument_that_the_network_does_not_take_is_refused():
    critic = Critic()
    accumulator = Accumulator(critic, momentum(critic), 2)
    with pytest.raises(TypeError, match="same_batch"):
        accumulator.backward(Tensor(REAL[:2]), 1.0, same_batch=True)
    assert not accumulator.driver.is_open


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
    losses, expected = whole_windows()
    backward_of_tensors()
    critic = Critic()
    optimizer = momentum(critic)
    accumulator = Accumulator(critic, optimizer, 2, **options)
    accumulator.prepare(optimizer)
    critic.layer.weight.grad = Tensor(np.ones((1, 3), np.float32))  # Left there by somebody else.
    reports = []
    for rows in BATCHES:
        count = len(REAL[rows])
        with accumulator.accumulate():
            loss = critic(Tensor(REAL[rows]), 1.0) + critic(Tensor(FAKE[rows]), 0.0)
            assert accumulator.backward(loss, weight=count) is loss
            reports.append(optimizer.step())
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in critic.trainable_params())
    np.testing.assert_allclose([number(report.loss) for report in reports[1::2]], losses, rtol=2e-6)
    for value, exact in zip(values_of(critic), expected):
        np.testing.assert_allclose(value, exact, rtol=2e-6, atol=2e-7)


def test_gradients_of_functions_and_of_losses_take_turns(backward_of_tensors):
    critic, twin = (Critic() for _ in range(2))
    step = nn.TrainOneStepCell(twin, momentum(twin)).set_train()
    for rows in WINDOWS:
        step(Tensor(REAL[rows]), 1.0)
    backward_of_tensors()
    accumulator = Accumulator(critic, momentum(critic), 2)
    for number_of_batch, rows in enumerate(BATCHES):
        with accumulator.accumulate():
            if number_of_batch % 2:
                accumulator.backward(critic(Tensor(REAL[rows]), 1.0), weight=len(REAL[rows]))
            else:  # MindSpore's gradient of a function ends its records, and so does the measurement of the loss.
                accumulator.backward(Tensor(REAL[rows]), 1.0)
            accumulator.step()
    for value, exact in zip(values_of(critic), values_of(twin)):
        np.testing.assert_allclose(value, exact, rtol=2e-6, atol=2e-7)


class SumAndTokens(nn.Cell):
    """A loss of MindSpore's operators, since the engine of `loss.backward()` runs no cell with a bprop."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, words, labels):
        logits = self.layer(words).reshape(-1, 3)
        total = ops.cross_entropy(logits, labels.reshape(-1), reduction="sum")
        return total, (labels != -100).sum().astype(ms.float32)


class TrainerOfMicroBatches:
    """The loop of mindformers 2.1's PYNATIVE trainer: the mean of the mean losses of the micro batches."""

    def __init__(self, model, micro_batches, max_norm):
        self.model, self.num_accumulation_steps, self.max_norm = model, micro_batches, max_norm
        self.optimizer = momentum(model)

    def compute_loss(self, words, labels):
        total, tokens = self.model(words, labels)
        return total / tokens

    def training_step(self, batches):
        loss = 0.0
        for batch in batches:
            part = self.compute_loss(*batch) / self.num_accumulation_steps
            part.backward()
            loss += part
        return loss, self._optimizer_update()

    def _optimizer_update(self):
        grads = [parameter.grad for parameter in self.optimizer.parameters]
        norm = np.sqrt(sum((grad.asnumpy() ** 2).sum() for grad in grads))
        self.optimizer(tuple(grad * Tensor(min(1.0, self.max_norm / norm), ms.float32) for grad in grads))
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        return Tensor(norm, ms.float32)


class TrainerOfTokens(TrainerOfMicroBatches):
    """The same trainer as docs/pynative.md changes it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.accumulator = Accumulator(self.model, self.optimizer, self.num_accumulation_steps)

    def training_step(self, batches):
        for words, labels in batches:
            with self.accumulator.accumulate():
                loss = self.compute_loss(words, labels)
                self.accumulator.backward(loss, weight=(labels != -100).sum())
                self.accumulator.clip_grad_norm(self.max_norm)
                output = self.accumulator.step()
        return output.loss, output.grad_norm


def test_the_trainer_of_mindformers_gets_the_mean_over_tokens(backward_of_tensors):
    random = np.random.default_rng(5)
    words = random.normal(size=(2, 6, 4, 3)).astype(np.float32)
    labels = random.integers(0, 3, (2, 6, 4)).astype(np.int32)
    labels[:, :2, 1:] = labels[:, 5, :3] = -100  # Micro batches of 2, 8 and 5 tokens.

    def trained(kind, parts):
        layer = nn.Dense(3, 3, weight_init=Tensor(np.eye(3, dtype=np.float32)), bias_init="zeros")
        trainer, reports = kind(SumAndTokens(layer), parts, 0.3), []
        for window in zip(words, labels):
            batches = zip(*(np.split(array, parts) for array in window))
            reports.append([number(each) for each in trainer.training_step([map(Tensor, batch) for batch in batches])])
        return np.concatenate([value.ravel() for value in values_of(layer)]), np.array(reports)

    # The whole window is one micro batch.
    backward_of_tensors()
    expected, whole = trained(TrainerOfMicroBatches, 1)
    start = np.append(np.eye(3), np.zeros(3))
    values, reports = trained(TrainerOfTokens, 3)
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(reports, whole, rtol=1e-5)
    values, reports = trained(TrainerOfMicroBatches, 3)
    assert np.linalg.norm(values - expected) > 0.05 * np.linalg.norm(expected - start)
    assert np.abs(reports / whole - 1).max() > 0.05


@pytest.mark.parametrize("prepares", [False, True])
def test_a_loop_that_calls_loss_backward_alone_is_named(backward_of_tensors, prepares):
    backward_of_tensors()
    critic = Critic()
    optimizer = momentum(critic)
    accumulator = Accumulator(critic, optimizer)
    stepper = accumulator.prepare(optimizer) if prepares else accumulator
    with warns("step() must follow") as told:
        for number_of_step in range(1, 7):
            with nullcontext() if prepares else accumulator.accumulate():
                critic(Tensor(REAL), 1.0).backward()
                stepper.step()
                stepper.zero_grad()
            assert len([each for each in told if "must follow its" in str(each.message)]) == (number_of_step >= 4)


def test_an_update_does_not_move_the_loss_of_before(monkeypatch):
    monkeypatch.delenv("MS_JIT")  # The sums and the update are compiled.

    class OnlyParameter(nn.Cell):
        def __init__(self):
            super().__init__()
            self.loss = ms.Parameter(Tensor(3.0, ms.float32), "loss")

        def construct(self, x):
            return self.loss

    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = OnlyParameter()
    accumulator = Accumulator(network, nn.SGD(network.trainable_params(), 1.0), check_loss=False)
    with accumulator.accumulate():
        loss = accumulator.backward(Tensor(REAL))
        accumulator.step()
    assert number(network.loss) == 2.0 and number(loss) == 3.0


def test_a_tensor_without_a_backward_pass_is_refused():
    critic = Critic()
    with refuses(TypeError, "Call backward"):
        Accumulator(critic, momentum(critic)).backward(critic(Tensor(REAL), 1.0))
