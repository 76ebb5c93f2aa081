"""Micro batches by tokens on ranks that have other numbers of them: one mean over the tokens of all ranks."""

import numpy as np
import pytest
from micro_token_scenarios import LENGTHS, RATE, START, mean_of
from scenarios import KINDS

PART, SIZES = "micro_tokens_worker", (2,)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_with_other_numbers_of_micro_batches_train_as_one_batch(name, two):
    gradient, loss, tokens = mean_of([0, 1])
    assert [report[name][3] for report in two] == [3, 5]
    for report in two:
        weights, its_loss, weight, _ = report[name]
        np.testing.assert_allclose(weights, START - RATE * gradient, rtol=0, atol=1e-6)
        assert its_loss == pytest.approx(loss, rel=1e-6)
        assert weight == tokens == np.concatenate(LENGTHS).sum()
    # The known wrong answer: each rank counts alike.
    alike = np.mean([mean_of([rank])[0] for rank in range(2)], 0)
    assert np.abs(alike - gradient).max() > 1e-2


@pytest.mark.parametrize("name", ["data parallel", "level2"])
def test_a_row_that_is_too_long_on_one_rank_takes_no_other_rank_along(name, two):
    gradient, _, tokens = mean_of([0, 1])
    for rank, report in enumerate(two):
        said, _, weights, weight = report[f"refused, {name}"]
        assert ("must be at least the length of each row" in said) == (rank == 1)
        assert weight == tokens
    np.testing.assert_array_equal(two[0][f"refused, {name}"][2], two[1][f"refused, {name}"][2])


@pytest.mark.parametrize("name", ["data parallel", "level1"])
def test_a_rank_that_runs_out_of_memory_splits_its_batch_for_itself(name, two):
    gradient, _, _ = mean_of([0, 1])
    for report, micro_size in zip(two, (1, 4)):
        weights, said, its_micro_size = report[f"memory, {name}"]
        assert (said, its_micro_size) == ("", micro_size)
        np.testing.assert_allclose(weights, START - RATE * gradient, rtol=0, atol=1e-6)


def test_where_each_micro_batch_communicates_it_is_the_error_of_that_rank(two):
    said = [report["memory, level2"][1] for report in two]
    assert said[0] == "" and "Allocate output memory failed" in said[1]
    assert [report["memory, level2"][2] for report in two] == [1, 1]
    assert two[0]["memory, level2"][0] == two[1]["memory, level2"][0]
