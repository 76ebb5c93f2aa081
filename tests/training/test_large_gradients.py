"""A gradient whose norm is no float32 number makes no update, and a warning says why."""

import numpy as np
import pytest
from mindspore import Tensor
from step_probe import Weights, keeping_step, values_of

# The gradient is the mean of the rows.
X = np.array([[1.0, 3.0], [5.0, -1.0], [0.0, 1.0], [2.0, 1.0]], np.float32)
SAID = "must have a finite norm, but got {} for the parameter 'weight'"


@pytest.mark.parametrize(
    ("value", "said"),
    [(4e20, "up to 1e\\+20"), (np.nan, "an Inf or a NaN"), (np.inf, "an Inf or a NaN")],
    ids=["squares", "nan", "inf"],
)
def test_what_has_no_finite_norm_makes_no_update(value, said, mode):
    step = keeping_step(Weights(2), 2, check_loss=False)
    before, rows = values_of(step), X.copy()
    rows[1, 1] = value
    with pytest.warns(UserWarning, match=SAID.format(said)):
        output = step(Tensor(rows))
    assert output.overflow and not output.updated
    after = values_of(step)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    # The next window has nothing of it.
    assert step(Tensor(X)).updated
    np.testing.assert_allclose(step.optimizer.gradients()[0], X.mean(0), rtol=1e-6)
