"""Training curves in float16 against those in float32: an MLP and a causal transformer."""

import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn, ops, set_seed

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, MixedPrecision, TokenMeanLoss, TrainOneStepCell

sys.path.insert(0, str(Path(__file__).parent))
from sample_process import SAMPLES, SUBSET, find_data  # noqa: E402

sys.path.append(str(SAMPLES / "transformer_lm"))
from transformer import Transformer  # noqa: E402

UPDATES = 30
# Of losses that fall from about 2.3 (10 classes) and 3.7 (40 letters): float16 has 11 bits.
TOLERANCE = 0.02
# A loss as small as this has gradients that are zeros in float16. A power of 2, which rounds nothing by itself.
SMALL = 2.0**-22


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Level O1 writes the network that it makes beside the program."""
    monkeypatch.chdir(tmp_path)


class SmallLoss(nn.Cell):
    """The mean cross-entropy, times a factor."""

    def __init__(self, network, factor):
        super().__init__(auto_prefix=False)
        self.network, self.factor = network, factor

    def construct(self, images, labels):
        return ops.cross_entropy(self.network(images), labels) * self.factor


def curve(loss_cell, optimizer, batches, mixed_precision, **settings):
    """The mean losses of the updates, which are of two micro batches each."""
    step = TrainOneStepCell(GradAccumulation(loss_cell, 2), optimizer, mixed_precision=mixed_precision, **settings)
    outputs = [step(*(Tensor(array) for array in batch)) for batch in batches]
    assert all(output.updated.asnumpy() for output in outputs)
    return np.array([output.loss.asnumpy() for output in outputs])


def mlp_curve(mixed_precision):
    """Fashion-MNIST, 32 images per update, with a loss whose gradients are small."""
    images = find_data.read_idx(SUBSET / "train" / find_data.IMAGES["train"])[: 32 * UPDATES]
    labels = find_data.read_idx(SUBSET / "train" / find_data.LABELS["train"])[: 32 * UPDATES]
    images = (images.reshape(UPDATES, 32, -1) / np.float32(255)).astype(np.float32)
    set_seed(1)
    network = nn.SequentialCell(nn.Dense(784, 32), nn.ReLU(), nn.Dense(32, 10))
    loss_cell = SmallLoss(network, SMALL)
    optimizer = nn.SGD(network.trainable_params(), 0.1 / SMALL)
    batches = zip(images, labels.reshape(UPDATES, 32).astype(np.int32))
    return curve(loss_cell, optimizer, batches, mixed_precision) / SMALL


def transformer_curve(mixed_precision):
    """Pieces of 24 letters of As You Like It, 16 per update."""
    text = (SAMPLES / "data" / "as_you_like_it" / "as_you_like_it.txt").read_bytes()[5000:]
    letters, text = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    tokens = text[: UPDATES * 16 * 25].reshape(UPDATES, 16, 25).astype(np.int32)
    np.random.seed(1)
    set_seed(1)
    network = Transformer(len(letters), length=24, width=32, layers=1)
    optimizer = nn.Adam(network.trainable_params(), 3e-3)
    batches = zip(tokens[:, :, :-1], tokens[:, :, 1:])
    return curve(TokenMeanLoss(network), optimizer, batches, mixed_precision, clip=ClipByGlobalNorm(1.0))


def check_close(half, full):
    """The curves lie on each other; they fall, or that would prove nothing."""
    assert full[-5:].mean() < full[:5].mean() - 0.3
    assert not np.array_equal(half, full), "computed in float32"
    np.testing.assert_allclose(half, full, atol=TOLERANCE, rtol=0)


def test_an_mlp_trains_in_float16_as_in_float32_and_not_without_the_loss_scale():
    full = mlp_curve(None)
    check_close(mlp_curve("fp16"), full)
    unscaled = mlp_curve(MixedPrecision(init_scale=1, growth_factor=1))
    # The gradients are zeros: what is left are the losses of a network that never learns.
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_close(unscaled, full)
    assert unscaled[-5:].mean() > full[-5:].mean() + 0.3


def test_a_causal_transformer_trains_in_float16_as_in_float32():
    check_close(transformer_curve("fp16"), transformer_curve(None))
