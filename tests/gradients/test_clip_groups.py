"""ClipByGroupNorm next to NumPy: each group by its own norm, on the mean gradient of the window."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses
from step_probe import KeepGradients, number

from ms_gradaccum import Accumulator, ClipByGroupNorm, GradAccumulation, MixedPrecision, TrainOneStepCell

ROWS = 6


class ThreeWeights(nn.Cell):
    """The gradient of each weight is a mean over rows of its own columns."""

    def __init__(self):
        super().__init__()
        self.embedding = Parameter(ops.zeros((2,)), "embedding")
        self.bias = Parameter(ops.zeros((1,)), "head.bias")
        self.weight = Parameter(ops.zeros((3,)), "head.weight")

    def construct(self, x):
        products = (x[:, :2] * self.embedding).sum(-1) + x[:, 2] * self.bias
        return (products + (x[:, 3:] * self.weight).sum(-1)).mean()


X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
MEANS = X.astype(np.float64).mean(0)
PIECES = {"embedding": slice(0, 2), "head.bias": slice(2, 3), "head.weight": slice(3, 6)}


def clipped(groups):
    """The mean gradient with each group of names scaled down to its limit, in float64."""
    gradient = MEANS.copy()
    for names, limit in groups:
        columns = np.concatenate([np.r_[PIECES[name]] for name in names])
        gradient[columns] *= min(1, limit / np.linalg.norm(gradient[columns]))
    return gradient


def step_with(clip, **settings):
    cell = ThreeWeights()
    network = GradAccumulation(cell, 4)  # 2, 2, 1 and 1 rows
    return TrainOneStepCell(network, KeepGradients(cell.trainable_params()), clip=clip, **settings)


@pytest.mark.parametrize(
    "limits, groups",
    [
        ({"embedding": 0.01, "head.*": 0.02}, [(["embedding"], 0.01), (["head.bias", "head.weight"], 0.02)]),
        # The first pattern that fits counts.
        ({"*bias": 0.01, "*": 0.02}, [(["head.bias"], 0.01), (["embedding", "head.weight"], 0.02)]),
        # What fits none is not clipped, what is small enough neither.
        ({"head.weight": 0.01}, [(["head.weight"], 0.01)]),
        ({"*": 100.0}, []),
    ],
)
def test_each_group_is_clipped_by_its_own_norm(limits, groups, eager):
    step = step_with(ClipByGroupNorm(limits), mixed_precision=MixedPrecision(level="O0", init_scale=1024.0))
    output = step(Tensor(X))
    expected = clipped(groups)
    np.testing.assert_allclose(np.concatenate(step.optimizer.gradients()), expected, rtol=1e-5, atol=1e-8)
    norms = [number(output.grad_norm), number(output.clipped_grad_norm)]
    assert norms == pytest.approx([np.linalg.norm(MEANS), np.linalg.norm(expected)], rel=1e-5)


def test_on_compiled_graphs_in_both_modes(mode):
    step = step_with(ClipByGroupNorm({"*bias": 0.01, "*": 0.02}))
    step(Tensor(X))
    expected = clipped([(["head.bias"], 0.01), (["embedding", "head.weight"], 0.02)])
    np.testing.assert_allclose(np.concatenate(step.optimizer.gradients()), expected, rtol=1e-5, atol=1e-8)


def test_a_norm_of_a_group_is_positive_and_finite_as_a_float32():
    for wrong in (0, -1.5, float("nan"), 1e39, 1e-39):
        with refuses(ValueError, "'limits['*']'"):
            ClipByGroupNorm({"*": wrong})


def test_a_pattern_that_no_parameter_is_left_for_is_refused():
    with refuses(ValueError, "'embedding' in 'limits' matches no remaining parameter (3 in all", "wide ones last"):
        step_with(ClipByGroupNorm({"*": 1.0, "embedding": 0.1}))


def test_several_optimizers_of_a_network_have_no_groups():
    cell = ThreeWeights()
    optimizers = [nn.SGD([cell.embedding], 0.1), nn.SGD([cell.bias, cell.weight], 0.1)]
    with refuses(ValueError, "'clip'"):
        Accumulator(cell, optimizers, clip=ClipByGroupNorm({"*": 1.0}))
