"""A new clip is a class with `construct(grads, norm)`: here one that nothing in the package has heard of."""

import numpy as np
import pytest
from mindspore import Tensor, ops
from step_probe import Around, Weights, keeping_step, number

from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.gradients.clipping import Clip


def at_most(limit, grad):
    return ops.minimum(grad, limit)


class HalfOfNorm(Clip):
    """Limit each element to half of the norm of the whole gradient."""

    def construct(self, grads, norm):
        return map_tensors(ops.partial(at_most, norm * 0.5), grads)


# The gradients of the four micro batches of a window; their mean is (3, 4) and their sum (12, 16).
FIRST, SECOND = np.float32([[12, 0], [0, 0]]), np.float32([[0, 16], [0, 0]])


def test_it_gets_the_mean_gradient_of_the_window_and_its_norm(eager):
    step = keeping_step(Weights(2), 2, accumulation_steps=2, clip=HalfOfNorm())
    step(Tensor(FIRST))
    output = step(Tensor(SECOND))
    assert number(output.grad_norm) == 5
    np.testing.assert_allclose(step.optimizer.gradients(), [[2.5, 2.5]], rtol=1e-6)
    assert number(output.clipped_grad_norm) == pytest.approx(np.hypot(2.5, 2.5), rel=1e-6)


def test_in_a_larger_graph_too(mode):
    step = keeping_step(Weights(2), 2, accumulation_steps=2, clip=HalfOfNorm(), check_loss=False)
    whole = Around(step)
    whole(Tensor(FIRST))
    whole(Tensor(SECOND))
    np.testing.assert_allclose(step.optimizer.gradients(), [[2.5, 2.5]], rtol=1e-6)
