"""ContrastiveLoss: in blocks of rows it is the plain formula, with its gradient."""

import math

import mindspore as ms
import numpy as np
import pytest
from linear_toy import sgd
from mindspore import Tensor, ops
from refusal import refuses
from step_probe import sgd_step
from whole_batch_losses import OrdinaryLoss, WholeBatches, batch, distance, parts_of, train, values_of

from ms_gradaccum import ContrastiveLoss, GradCacheLoss

ROWS, TEMPERATURE = 23, 0.2
_RANDOM = np.random.default_rng(0)
FIRST, SECOND = _RANDOM.normal(size=(2, ROWS, 5))
LABELS = _RANDOM.integers(-3, 6, ROWS) * 2**33  # Alike to int32.
LABELS[5] = 1  # A row without another one of its label.


def formula(first, second, temperature, labels=None, one=False, normalize=True):
    if normalize:
        first, second = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (first, second))
    itself = np.eye(len(first))
    similarities = first @ second.T / temperature
    alike = itself if labels is None else labels[:, None] == labels[None]
    if one:
        similarities, alike = np.where(itself, -np.inf, similarities), alike - itself
    each = []
    for table in (similarities,) if one else (similarities, similarities.T):
        logs = table - np.log(np.exp(table).sum(1, keepdims=True))
        counts = alike.sum(1)
        rows = np.where(alike > 0, logs, 0).sum(1) / np.maximum(counts, 1)
        each.append(-rows[counts > 0].mean())
    return np.mean(each)


def slope(function, x, step=1e-6):
    """The gradient of a function of an array, by differences."""
    grad = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        grad[place] = (function(x + moved) - function(x - moved)) / (2 * step)
    return grad


KINDS = {
    "pairs": ({}, None),
    "labels": ({}, LABELS),
    "one tower": ({"towers": 1}, LABELS),
    "lengths as they are": ({"normalize": False}, None),
}


# One block, blocks that do not come out even, and one for each row.
@pytest.mark.parametrize("block_rows", [256, 7, 1])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_formula_with_its_gradients(name, block_rows, eager):
    settings, labels = KINDS[name]
    one = settings.get("towers") == 1
    loss = ContrastiveLoss(TEMPERATURE, block_rows=block_rows, **settings)
    inputs = [FIRST.astype(np.float32)] + ([] if one else [SECOND.astype(np.float32)])
    with_grads = ops.value_and_grad(loss, tuple(range(len(inputs))), loss.logit_scale)
    value, (grads, scale_grad) = with_grads(*map(Tensor, inputs + ([] if labels is None else [labels])))

    def expected(first, second=SECOND, temperature=TEMPERATURE):
        normalize = settings.get("normalize", True)
        return formula(first, first if one else second, temperature, labels, one, normalize)

    np.testing.assert_allclose(value.asnumpy(), expected(FIRST), rtol=1e-6)
    slopes = [slope(expected, FIRST)] + ([] if one else [slope(lambda second: expected(FIRST, second), SECOND)])
    for grad, wanted in zip(grads if isinstance(grads, tuple) else (grads,), slopes):
        np.testing.assert_allclose(grad.asnumpy(), wanted, atol=2e-6 * np.abs(wanted).max(), rtol=1e-5)
    by_scale = slope(lambda scale: expected(FIRST, SECOND, TEMPERATURE * np.exp(-scale[0])), np.zeros(1))
    np.testing.assert_allclose(scale_grad.asnumpy(), by_scale[0], rtol=1e-5)


def test_cached_and_compiled_it_trains_like_the_formula_of_the_whole_batch():
    data = [batch("clip", number, 18) for number in range(2)]
    cell = OrdinaryLoss(*parts_of("clip"))
    start = values_of(cell.trainable_params())
    ms.set_context(mode=ms.PYNATIVE_MODE)
    losses = train(WholeBatches(cell, sgd(cell, 0.1)), data)
    ours = GradCacheLoss(*parts_of("clip", lambda: ContrastiveLoss(math.exp(-1.5), block_rows=7)))
    step = sgd_step(ours, 4, 0.1, compile=True)
    np.testing.assert_allclose(train(step, data), losses, rtol=1e-6)
    expected = values_of(cell.trainable_params())
    assert distance(values_of(ours.trainable_params()), expected) < 1e-6
    assert distance(start, expected) > 1e-3


def test_a_temperature_that_is_not_learnable_is_no_parameter_to_train():
    assert ContrastiveLoss(learnable=False).trainable_params() == []
    assert [parameter.name for parameter in ContrastiveLoss().trainable_params()] == ["logit_scale"]


REFUSED = {
    "one representation for two towers": ({}, [(4, 3)], "towers=2"),
    "no labels for one tower": ({"towers": 1}, [(4, 3)], "towers=1"),
    "other lengths": ({}, [(4, 3), (4, 2)], "(4, 3), (4, 2)"),
    "labels of other rows": ({}, [(4, 3), (4, 3), (5,)], "(4, 3), (4, 3), (5,)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_are_not_those_of_so_many_towers_are_refused(name, eager):
    settings, shapes, key = REFUSED[name]
    with refuses(ValueError, key):
        ContrastiveLoss(**settings)(*(ops.ones(shape, ms.float32) for shape in shapes))


def test_a_single_row_has_no_loss(mode):
    """The last batch may have one, and so have the halves of two rows that are measured."""
    rows = [Tensor(each[:1].astype(np.float32)) for each in (FIRST, SECOND)]
    loss = ContrastiveLoss()(*rows, Tensor(LABELS[:1]))
    assert abs(loss.asnumpy()) < 1e-6
