"""Windows whose ranks have other numbers of tokens or rows: means over all of them, as of one whole batch."""

import numpy as np
import pytest
from token_scenarios import LEARNING_RATE, ROWS, START, TOKENS, row_gradients, token_gradients

PART, SIZES = "token_worker", (2,)


def by_rank(gradients):
    """The gradients of each rank's window."""
    return [np.concatenate([gradients(rank, number) for number in range(2)]) for rank in range(2)]


@pytest.mark.parametrize("name", ["by number", "by the network"])
def test_a_mean_over_tokens_is_one_over_those_of_all_ranks(name, two):
    ranks = by_rank(token_gradients)
    expected = START - LEARNING_RATE * np.concatenate(ranks).mean(0)
    for report in two:
        weights, tokens = report[name]
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
        assert tokens == np.sum(TOKENS)
    # The known wrong answer: each rank counts alike.
    alike = START - LEARNING_RATE * np.mean([each.mean(0) for each in ranks], 0)
    assert np.abs(alike - expected).max() > 1e-2


@pytest.mark.parametrize("name", ["prepared", "given"])
def test_gradients_of_uneven_rows_count_by_their_rows(name, two):
    ranks = by_rank(row_gradients)
    expected = -0.5 * np.concatenate(ranks).mean()
    for report in two:
        weight, said = report[name]
        np.testing.assert_allclose(weight, [expected], rtol=1e-5)
        assert said == []
    # The known wrong answers: each rank counts alike, and each batch.
    alike = [np.mean([each.mean() for each in ranks])]
    alike.append(np.mean([row_gradients(rank, number).mean() for rank in range(2) for number in range(2)]))
    assert sum(ROWS[0]) != sum(ROWS[1]) and np.abs(-0.5 * np.array(alike) - expected).min() > 1e-2


def test_gradients_whose_rows_nobody_knows_are_said_once_on_each_rank(two):
    for report in two:
        _, said = report["unprepared"]
        assert len(said) == 1 and "all batches and ranks count alike" in said[0]
