"""The training curve of a causal transformer in float16 against that in float32."""

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, set_seed
from sample_process import SAMPLES

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TokenMeanLoss, TrainOneStepCell

sys.path.append(str(SAMPLES / "transformer_lm"))
from transformer import Transformer

UPDATES = 30
# Of losses that fall from 4.3: float16 has 11 bits. They differed by 3e-4 when written.
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def graph_mode(restored_mode):
    """Compile, as the sample does: op by op the transformer takes minutes."""
    ms.set_context(mode=ms.GRAPH_MODE)


def curve(step, batches):
    """The mean losses of the updates."""
    outputs = [step(*(Tensor(array) for array in batch)) for batch in batches]
    assert all(output.updated.asnumpy() for output in outputs)
    return np.array([output.loss.asnumpy() for output in outputs])


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


def test_a_causal_transformer_trains_in_float16_as_in_float32():
    check_close(transformer_curve("fp16"), transformer_curve(None))
