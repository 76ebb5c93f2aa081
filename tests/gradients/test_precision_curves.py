"""Training curves in float16 against those in float32: an MLP and a causal transformer."""

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops, set_seed
from sample_process import SAMPLES, SUBSET, find_data

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TokenMeanLoss, TrainOneStepCell

sys.path.append(str(SAMPLES / "transformer_lm"))
from open_window import window_of
from transformer import Transformer

UPDATES = 30
# Of losses that fall from 2.3 and 4.3: float16 has 11 bits. They differed by 1e-4 and 3e-4 when written.
TOLERANCE = 2e-3
# A loss as small as this has gradients that are zeros in float16. A power of 2, which rounds nothing by itself.
SMALL = 2.0**-22


@pytest.fixture(autouse=True)
def graph_mode(restored_mode):
    """Compile, as the sample does: op by op the transformer takes minutes."""
    ms.set_context(mode=ms.GRAPH_MODE)


class SmallLoss(nn.Cell):
    """The mean cross-entropy, times a factor."""

    def __init__(self, network, factor):
        super().__init__(auto_prefix=False)
        self.network, self.factor = network, factor

    def construct(self, images, labels):
        return ops.cross_entropy(self.network(images), labels) * self.factor


def curve(step, batches):
    """The mean losses of the updates."""
    outputs = [step(*(Tensor(array) for array in batch)) for batch in batches]
    assert all(output.updated.asnumpy() for output in outputs)
    return np.array([output.loss.asnumpy() for output in outputs])


def mlp_step(mixed_precision):
    """A step that trains on a loss with small gradients, in two micro batches."""
    set_seed(1)
    network = nn.SequentialCell(nn.Dense(784, 32), nn.ReLU(), nn.Dense(32, 10))
    optimizer = nn.SGD(network.trainable_params(), 0.1 / SMALL)
    loss_cell = GradAccumulation(SmallLoss(network, SMALL), 2)
    return TrainOneStepCell(loss_cell, optimizer, mixed_precision=mixed_precision, check_loss=False)


def mlp_curve(step):
    """The losses on Fashion-MNIST, 32 images per update."""
    images = find_data.read_idx(SUBSET / "train" / find_data.IMAGES["train"])[: 32 * UPDATES]
    labels = find_data.read_idx(SUBSET / "train" / find_data.LABELS["train"])[: 32 * UPDATES]
    images = (images.reshape(UPDATES, 32, -1) / np.float32(255)).astype(np.float32)
    return curve(step, zip(images, labels.reshape(UPDATES, 32).astype(np.int32))) / SMALL


def transformer_curve(mixed_precision):
    """The losses on pieces of 24 letters of As You Like It, 16 per update, in two micro batches."""
    text = (SAMPLES / "data" / "as_you_like_it" / "as_you_like_it.txt").read_bytes()[5000:]
    letters, text = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    tokens = text[: UPDATES * 16 * 25].reshape(UPDATES, 16, 25).astype(np.int32)
    np.random.seed(1)
    set_seed(1)
    network = Transformer(len(letters), length=24, width=32, layers=1)
    loss_cell = GradAccumulation(TokenMeanLoss(network), 2)
    optimizer = nn.Adam(network.trainable_params(), 3e-3)
    settings = {"clip": ClipByGlobalNorm(1.0), "mixed_precision": mixed_precision, "check_loss": False}
    step = TrainOneStepCell(loss_cell, optimizer, **settings)
    return curve(step, zip(tokens[:, :, :-1], tokens[:, :, 1:]))


def check_close(half, full):
    """The curves lie on each other; they fall, or that would prove nothing."""
    assert full[-5:].mean() < full[:5].mean() - 0.3
    assert not np.array_equal(half, full), "computed in float32"
    np.testing.assert_allclose(half, full, atol=TOLERANCE, rtol=0)


def test_an_mlp_trains_in_float16_as_in_float32_and_not_without_the_loss_scale():
    full = mlp_curve(mlp_step(None))
    step = mlp_step("fp16")
    start = [weight.asnumpy().copy() for weight in step.weights]
    check_close(mlp_curve(step), full)

    # Again from the start, compiled as before.
    for weight, value in zip(step.weights, start):
        weight.set_data(Tensor(value))
    window_of(step).loss_scale.scale.set_data(Tensor(1.0, ms.float32))
    unscaled = mlp_curve(step)
    assert unscaled[0] == pytest.approx(full[0], abs=TOLERANCE)
    # The gradients are zeros: these are the losses of a network that never learns.
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_close(unscaled, full)
    for weight, value in zip(step.weights, start):
        np.testing.assert_array_equal(weight.asnumpy(), value)


def test_a_causal_transformer_trains_in_float16_as_in_float32():
    check_close(transformer_curve("fp16"), transformer_curve(None))
