"""ReplayDropout: masks that depend on nothing but a seed and a place, and look like chance."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from open_window import window_of
from refusal import refuses
from step_probe import sgd_step
from whole_batch_losses import Tower, batch

from ms_gradaccum import GradCacheLoss, ReplayDropout

SHAPE, P = (400, 500), 0.3


def hashed(values):
    values = values.astype(np.uint32)
    values ^= values >> np.uint32(16)
    values = values * np.uint32(0x7FEB352D)
    values ^= values >> np.uint32(15)
    values = values * np.uint32(0x846CA68B)
    return values ^ (values >> np.uint32(16))


def mask(seed, shape=SHAPE, p=P):
    places = np.arange(1, np.prod(shape) + 1, dtype=np.uint32)
    draws = hashed(places ^ hashed(np.array([seed % 2**32]))) & np.uint32(2**24 - 1)
    return (draws >= round(p * 2**24)).reshape(shape)


def test_masks_are_those_of_numpy(mode):
    drop = ReplayDropout(P, seed=-5).set_train()
    for seed in range(-5, -3):
        found = drop(ops.ones(SHAPE, ms.float32)).asnumpy()
        np.testing.assert_array_equal(found, np.where(mask(seed), np.float32(1 / (1 - P)), np.float32(0)))
        assert abs(mask(seed).mean() - (1 - P)) < 4 * np.sqrt(P * (1 - P) / np.prod(SHAPE))
    assert drop.seed.asnumpy() == -3


def test_16_bit_numbers_stay_such_and_evaluation_changes_nothing(eager):
    x = ops.ones(SHAPE, ms.float16)
    drop = ReplayDropout(P, seed=1)
    assert drop(x) is x and drop.seed.asnumpy() == 1
    found = drop.set_train()(x)
    assert found.dtype == ms.float16
    np.testing.assert_array_equal(found.asnumpy() > 0, mask(1))


def test_masks_of_neighbours_in_place_and_seed_have_nothing_in_common():
    first = mask(7).astype(np.float64)
    others = [mask(seed).astype(np.float64) for seed in (8, 9, 7 + 2**20, -7)]
    moved = [np.roll(first, shift, axis) for axis in (0, 1) for shift in (1, 2, 16, 128)]
    # The mask of the next seed, moved: what counting places and seeds together would give.
    moved += [np.roll(others[0].reshape(-1), shift).reshape(SHAPE) for shift in (-1, 1)]
    for other in (*others, *moved):
        assert abs(np.corrcoef(first.reshape(-1), other.reshape(-1))[0, 1]) < 4 / np.sqrt(first.size)
    # Three at a time, as a mask that is an exclusive or of rows and columns would fail.
    signs = 2.0 * mask(7, p=0.5) - 1
    assert abs((signs[:-1, :-1] * signs[1:, :-1] * signs[:-1, 1:] * signs[1:, 1:]).mean()) < 4 / np.sqrt(signs.size)


def test_layers_without_a_seed_have_their_own():
    seeds = [int(ReplayDropout().seed.asnumpy()) for _ in range(3)]
    assert min(abs(a - b) for a, b in zip(seeds, seeds[1:])) > 10**6


class Sum(nn.Cell):
    def construct(self, rows):
        return ops.square(rows.sum(0)).sum()


def test_the_second_pass_of_a_loss_of_the_whole_batch_draws_the_same_masks(monkeypatch, eager):
    network = nn.SequentialCell(Tower(), ReplayDropout(0.5, seed=3))
    cell = GradCacheLoss(network, Sum()).set_train()
    step = sgd_step(cell, 4, 0.1)
    differences = []
    cache_pass = window_of(step).micro_steps.preparation
    monkeypatch.setattr(cache_pass, "check", lambda outputs: differences.extend(output[3] for output in outputs))
    rows = batch("clip", 0, 18)[0]
    loss = step(Tensor(rows)).loss.asnumpy()
    assert [difference.asnumpy()[0] for difference in differences] == [0.0] * 4
    assert network[1].seed.asnumpy() == 3 + 4
    # Masks are drawn in training, one for each micro batch.
    assert loss != cell.set_train(False)(Tensor(rows)).asnumpy()


@pytest.mark.parametrize(("p", "error"), [(1, ValueError), (-0.1, ValueError), (True, TypeError), ("0.5", TypeError)])
def test_a_probability_out_of_range_is_refused(p, error):
    with refuses(error, "'p'"):
        ReplayDropout(p)
