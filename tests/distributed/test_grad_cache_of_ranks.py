"""Losses over the rows of all processes: each sees the negatives of the others, and the update is the whole batch's."""

import functools

import numpy as np
import pytest
from mindspore import nn
from whole_batch_losses import LOSSES, OrdinaryLoss, WholeBatches, batch, flat, parts_of, train, values_of

PART, SIZES = "grad_cache_worker", (2, 4)
KINDS = ["data parallel", "each batch", "level1", "level2"]


@pytest.fixture(scope="module", params=["two", "four"], ids=["2_ranks", "4_ranks"])
def reports(request):
    return request.getfixturevalue(request.param)


@functools.cache
def whole(name):
    """The start, the end and the losses of a training with all rows in one process."""
    cell = OrdinaryLoss(*parts_of(name))
    start = flat(values_of(cell.trainable_params()))
    step = WholeBatches(cell, nn.Momentum(cell.trainable_params(), 0.05, 0.9))
    losses = train(step, [batch(name, number, 18 + number % 2) for number in range(3)])
    return start, flat(values_of(cell.trainable_params())), losses


def check(reports, key, name):
    _, expected, losses = whole(name)
    for report in reports:
        found = np.array(report[key]["weights"])
        assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)
        np.testing.assert_allclose(report[key]["outputs"], list(zip(losses, (18, 19, 18))), rtol=1e-6)
        assert report[key]["weights"] == reports[0][key]["weights"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_train_like_one_process_on_all_rows(name, reports):
    check(reports, name, name)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LOSSES)
def test_without_the_rows_of_the_others_they_would_train_something_else(name, two):
    start, expected, _ = whole(name)
    plain = np.array(two[0][f"{name} plain"]["weights"])
    assert np.linalg.norm(plain - expected) > 0.1 * np.linalg.norm(expected - start)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [*KINDS, "blocks"])
def test_all_kinds_of_parallelism_do(kind, reports):
    check(reports, kind, "clip")


@pytest.mark.usefixtures("eager")
def test_compiled_networks_do(reports):
    if len(reports) == 2:
        check(reports, "compiled", "clip")


def test_rows_are_gathered_in_the_order_of_the_ranks_bit_for_bit(reports):
    counts = [2 + rank for rank in range(len(reports))]
    bools = [i % 2 == 0 for count in counts for i in range(count)]
    ints = [[-(2**40) - rank] * 2 for rank, count in enumerate(counts) for _ in range(count)]
    for rank, report in enumerate(reports):
        assert report["gathered"] == [sum(counts[:rank]), sum(counts), bools, ints, True]


def test_rows_of_different_lengths_are_refused_on_all_ranks(reports):
    widths = ", ".join(str(4 * (3 + rank)) for rank in range(len(reports)))
    assert all("number of bytes" in report["widths"] and f"got {widths}. " in report["widths"] for report in reports)
