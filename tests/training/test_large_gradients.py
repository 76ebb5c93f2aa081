"""A float32 gradient whose squares are no float32: its norm is computed another way, and it trains."""

import numpy as np
import pytest
from mindspore import Tensor, nn
from step_probe import Weights, keeping_step, number

from ms_gradaccum import Accumulator, ClipByGlobalNorm, ClipByValue, TrainOneStepCell

# The gradient is the mean of the rows.
X = np.array([[1e20, 3e20], [5e20, -1e20], [0.0, 1e20], [2e20, 1e20]], np.float32)
MEAN = X.astype(np.float64).mean(0)
NORM = np.linalg.norm(MEAN)


@pytest.mark.parametrize(
    ("clip", "expected", "norm"),
    [(None, MEAN, NORM), (ClipByGlobalNorm(2.0), MEAN * 2.0 / NORM, 2.0), (ClipByValue(1.0), [1.0, 1.0], 2.0**0.5)],
    ids=["no clip", "norm", "value"],
)
def test_a_large_gradient_is_clipped_and_trained(clip, expected, norm, mode):
    step = keeping_step(Weights(2), 2, clip=clip, check_loss=False)
    output = step(Tensor(X))
    assert output.updated and not output.overflow
    assert number(output.grad_norm) == pytest.approx(NORM, rel=1e-6)
    assert number(output.clipped_grad_norm) == pytest.approx(norm, rel=1e-6)
    np.testing.assert_allclose(step.optimizer.gradients()[0], expected, rtol=1e-6)


def test_it_trains_as_in_the_stock_step(mode):
    ours, stock = Weights(2), Weights(2)
    TrainOneStepCell(ours, nn.SGD(ours.trainable_params(), 1e-20), check_loss=False)(Tensor(X))
    nn.TrainOneStepCell(stock, nn.SGD(stock.trainable_params(), 1e-20))(Tensor(X))
    np.testing.assert_allclose(ours.weight.asnumpy(), stock.weight.asnumpy(), rtol=1e-6)
    assert (ours.weight.asnumpy() != 0).all()


def test_a_loop_sees_its_norm(mode):
    cell = Weights(2)
    accumulator = Accumulator(cell, nn.SGD(cell.trainable_params(), 1.0), check_loss=False)
    accumulator.backward(Tensor(X))
    assert number(accumulator.clip_grad_norm(2.0)) == pytest.approx(NORM, rel=1e-6)
    accumulator.step()
    np.testing.assert_allclose(cell.weight.asnumpy(), -MEAN * 2.0 / NORM, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_makes_no_update(value, mode):
    step = keeping_step(Weights(2), 2, check_loss=False)
    rows = X.copy()
    rows[1, 1] = value
    with pytest.warns(UserWarning, match="must have a finite norm, but got an Inf or a NaN for the parameter 'weight'"):
        assert not step(Tensor(rows)).updated
