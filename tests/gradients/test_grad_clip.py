"""Clipping next to NumPy in float64."""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mindspore import Tensor
from tiers import share_of

from ms_gradaccum import ClipByGlobalNorm, ClipByValue
from ms_gradaccum.backend.arithmetic import sum_of_squares
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
    """The clipped gradients as arrays, given their exact norm."""
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


@settings(max_examples=share_of(30), deadline=None)
@given(grads=GRADS)
def test_the_norm_is_that_of_all_gradients_as_one_vector(grads):
    total = sum(sum_of_squares(Tensor(grad)).asnumpy() for grad in grads)
    assert np.sqrt(total) == pytest.approx(norm_of(grads), rel=1e-5)


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(5.0), ClipByValue(4.0), NoClip()], ids=lambda c: type(c).__name__)
def test_gradients_within_the_limit_keep_their_bits(clip, mode):
    grads = [np.float32([[0.1, -3.0]]), np.float32(np.sqrt(7.0))]
    for after, before in zip(clipped(clip, grads), grads):
        np.testing.assert_array_equal(after, before)


def test_a_gradient_of_zeros_stays_zero():
    for clip in (ClipByGlobalNorm(1.0), ClipByValue(1.0)):
        np.testing.assert_array_equal(clipped(clip, [np.zeros((2, 3), np.float32)]), np.zeros((1, 2, 3)))


@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
def test_float16_gradients_are_scaled_with_a_float32_factor(max_norm):
    # The factor of 8e-6 or 8e-9 is no normal float16 number, the clipped gradients are.
    (after,) = clipped(ClipByGlobalNorm(max_norm), [np.full(4, 6e4, np.float16)])
    np.testing.assert_allclose(after, max_norm / 2, rtol=1e-3)


def test_the_norm_after_clipping_is_known_without_another_pass():
    assert ClipByGlobalNorm(2.0).norm_after(Tensor(5.0)) == 2.0
    assert ClipByGlobalNorm(2.0).norm_after(Tensor(1.5)) == 1.5
    assert NoClip().norm_after(Tensor(5.0)) == 5.0
