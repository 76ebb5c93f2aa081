"""Clipping next to NumPy in float64: of the whole gradient, of each element, and of groups of parameters."""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses
from step_probe import KeepGradients, number
from tiers import share_of

from ms_gradaccum import (
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    GradAccumulation,
    MixedPrecision,
    TrainOneStepCell,
)
from ms_gradaccum.gradients.clipping import NoClip

GRADS = st.lists(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=0, max_dims=4, max_side=4),
        elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
    ),
    min_size=1,
    max_size=4,
)


def norm_of(grads):
    return np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in grads))


def clipped(clip, grads):
    outputs = clip(tuple(Tensor(grad) for grad in grads), Tensor(norm_of(grads), ms.float32))
    assert [tuple(o.shape) for o in outputs] == [grad.shape for grad in grads]
    assert all(output.asnumpy().dtype == grad.dtype for output, grad in zip(outputs, grads))
    return [output.asnumpy() for output in outputs]


@settings(max_examples=share_of(30), deadline=None)
@given(grads=GRADS, max_norm=st.floats(1e-3, 1e8))
def test_the_global_norm_is_limited_and_the_direction_stays(grads, max_norm):
    factor = min(1.0, max_norm / max(norm_of(grads), 1e-30))
    for after, before in zip(clipped(ClipByGlobalNorm(max_norm), grads), grads):
        np.testing.assert_allclose(after, before.astype(np.float64) * factor, rtol=1e-6, atol=1e-35)


@settings(max_examples=share_of(30), deadline=None)
@given(grads=GRADS, limit=st.floats(1e-3, 1e8))
def test_each_element_is_limited(grads, limit):
    for after, before in zip(clipped(ClipByValue(limit), grads), grads):
        np.testing.assert_array_equal(after, np.clip(before, -np.float32(limit), np.float32(limit)))


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(5.0), ClipByValue(4.0), NoClip()], ids=lambda c: type(c).__name__)
def test_gradients_within_the_limit_keep_their_bits(clip, mode):
    for grads in ([np.float32([[0.1, -3.0]]), np.float32(np.sqrt(7.0))], [np.zeros((2, 3), np.float32)]):
        for after, before in zip(clipped(clip, grads), grads):
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
def test_float16_gradients_are_scaled_with_a_float32_factor(max_norm):
    # The factor of 8e-6 or 8e-9 is no normal float16 number, the clipped gradients are.
    (after,) = clipped(ClipByGlobalNorm(max_norm), [np.full(4, 6e4, np.float16)])
    np.testing.assert_allclose(after, max_norm / 2, rtol=1e-3)


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


def clipped_in(groups):
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
    expected = clipped_in(groups)
    np.testing.assert_allclose(np.concatenate(step.optimizer.gradients()), expected, rtol=1e-5, atol=1e-8)
    norms = [number(output.grad_norm), number(output.clipped_grad_norm)]
    assert norms == pytest.approx([np.linalg.norm(MEANS), np.linalg.norm(expected)], rel=1e-5)


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
