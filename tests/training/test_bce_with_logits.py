"""The gradient of BCEWithLogitsLoss, which MindSpore divides by the rows of an earlier batch in PYNATIVE mode."""

import warnings

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line
from mindspore import Parameter, Tensor, nn, ops
from step_probe import KeepGradients, tensors

from ms_gradaccum import GradAccumulation, TrainOneStepCell, verify

pytestmark = pytest.mark.usefixtures("eager")


def bce_gradient(rows):
    """Return MindSpore's gradient of a mean over so many rows, and the right one."""
    x = np.linspace(-1, 2, rows, dtype=np.float32).reshape(rows, 1)
    weight = Parameter(Tensor([[1.0]], ms.float32), "weight")
    loss_fn = nn.BCEWithLogitsLoss()
    (gradient,) = ms.value_and_grad(lambda x, y: loss_fn(x * weight, y), None, [weight])(*tensors(x, x**0))[1:]
    return gradient[0].asnumpy().item(), np.mean(x * (1 / (1 + np.exp(-x)) - 1))


def test_mindspore_divides_by_the_rows_of_the_first_batch_of_the_process():
    """The reason for the next test; when this fails, MindSpore has mended it."""
    assert any(found != pytest.approx(right, rel=0.1) for found, right in map(bce_gradient, (2, 4)))


class CalledLoss(nn.Cell):
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
