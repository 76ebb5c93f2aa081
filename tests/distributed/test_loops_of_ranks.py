"""Hand-written loops on two processes against one process on all rows."""

import mindspore as ms
import numpy as np
import pytest
from loop_scenarios import (
    START,
    build_loop,
    joined_batches,
    train_adversaries,
    train_functionally,
    train_loop,
    train_sentences,
    train_with_scheduler,
)
from mindspore import Tensor
from scenarios import batch, weights_of

PART, SIZES = "loop_worker", (2,)
KINDS = ["data parallel", "data parallel, each batch", "level1", "level2"]
TARGET = [0.2117, 0.3172]
PARTS = [list(range(i, i + 4)) for i in range(0, 16, 4)]


@pytest.fixture(scope="module", autouse=True)
def eager():
    """One process trains these few rows quicker than it compiles them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MS_JIT", "0")
        yield


@pytest.mark.parametrize("name", KINDS)
def test_a_token_counts_the_same_on_whichever_rank_it_is(name, two):
    assert [report["own tokens"] for report in two] == [[52, 64], [84, 72]]
    for report in two:
        weights, loss, updated, tokens = report[f"tokens {name}"]
        np.testing.assert_allclose(weights, TARGET, atol=5e-5)
        assert (updated, tokens) == (1, 136)
    whole, output = train_sentences([list(range(16))])
    np.testing.assert_allclose(weights, whole, rtol=1e-5)
    np.testing.assert_allclose(loss, output.loss.asnumpy(), rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_head_in_blocks_of_tokens_is_the_same_training(name, two):
    for report in two:
        weights, loss, updated, tokens = report[f"blocks {name}"]
        np.testing.assert_allclose(weights, report[f"tokens {name}"][0], rtol=1e-6)
        np.testing.assert_allclose(weights, TARGET, atol=5e-5)
        assert (updated, tokens) == (1, 136)
        assert loss == pytest.approx(report[f"tokens {name}"][1], rel=1e-6)


def test_the_way_the_sentences_are_dealt_changes_nothing(two):
    np.testing.assert_allclose(two[1]["by sentence"][0], two[1]["tokens data parallel"][0], rtol=1e-5)


def test_a_mean_of_means_would_be_another_number():
    """The known wrong answers: one division per rank, and one per micro batch."""
    for groups, wrong in (
        ((PARTS[0::2], PARTS[1::2]), [0.2042, 0.3247]),
        ([[part] for part in PARTS], [0.1622, 0.3668]),
    ):
        by_group = [train_sentences(group)[0] for group in groups]
        np.testing.assert_allclose(np.mean(by_group, 0), wrong, atol=5e-5)
        assert not np.allclose(wrong, TARGET, atol=1e-3)


def test_a_rank_without_tokens_follows_the_others(two):
    expected, _ = train_sentences([[0, 1, 2], [3]])
    for report in two:
        weights, _, updated, tokens = report["tokens of one"]
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        assert (updated, tokens) == (1, 10)


def test_a_window_without_tokens_on_any_rank_changes_nothing(two):
    for report in two:
        assert report["no tokens"] == [START.ravel().tolist(), 0, 0, 0]


@pytest.mark.parametrize("name", ["data parallel", "level2"])
@pytest.mark.parametrize("end,updates", [("apply", 4), ("carry", 3)])
def test_a_rank_that_runs_out_of_data_joins_with_its_clip_and_its_scheduler(end, updates, name, two):
    whole = joined_batches(2)
    if end == "apply":
        expected = train_with_scheduler(whole, 2, 2)
    else:
        expected = train_with_scheduler(whole + whole, 1, 2)
    # Batches of 2, 2 and 1 times two rows: the last one belongs to rank 0 alone.
    assert [len(x) for x, _ in whole] == [4, 4, 2] and expected[1] == updates
    for report in two:
        weights, made, rate = report[f"early {name} {end}"]
        np.testing.assert_allclose(weights, expected[0], rtol=2e-5, atol=2e-6)
        assert made == updates and rate == pytest.approx(expected[2]) and expected[2] < 0.1


# Gradients that the caller took.
LOOPS = [("functional", train_functionally, name) for name in KINDS]


@pytest.mark.parametrize("loop, train, name", LOOPS)
def test_gradients_of_a_loop_are_added_over_the_ranks(loop, train, name, two):
    expected, output = train([tuple(Tensor(array) for array in batch(number)) for number in (0, 1)])
    for report in two:
        weights, loss, updated, rows = report[f"{loop} {name}"]
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(loss, output.loss.asnumpy(), rtol=1e-5)
        assert (updated, rows) == (1, 24)


def test_all_ranks_skip_what_one_cannot_use(two):
    for report in two:
        assert report["one has NaN"] == [True, False, True]
        assert report["and then"] == [True, False]


def test_two_networks_share_their_windows(two):
    """Against the same loop in one process."""
    expected = train_adversaries()
    for report in two:
        np.testing.assert_allclose(report["adversaries"], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["level1", "level2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_of_any_rank_holds_the_whole_loop(rank, name, two):
    """One process goes on from it, as from its own first window."""
    network, accumulator = build_loop()
    assert ms.load_param_into_net(accumulator, ms.load_checkpoint(two[rank][f"checkpoint {name}"])) == ([], [])
    train_loop(accumulator, (2, 3))
    expected, accumulator = build_loop()
    train_loop(accumulator, range(4))
    np.testing.assert_allclose(weights_of(network), weights_of(expected), rtol=2e-5, atol=2e-6)


def test_what_cannot_work_is_refused_on_all_ranks(two):
    for report in two:
        disagreement, shared, unknown = report["errors"]
        assert disagreement.startswith("For 'Accumulator', the ranks must agree about 'config', but got Accumulation")
        assert "'parallel'" in shared and "sync_each_batch" in shared and "optimizer_level='level1'" in shared
        assert "'dataset'" in unknown and "got generator" in unknown


def test_sync_each_batch_sends_the_gradient_in_each_batch(two):
    """The gradient has two elements, of which each rank keeps one."""
    at_the_end = [2, 1, 1]  # loss and weight, the norm, this rank's part of the mean gradient
    assert two[0]["shared batches"] == [2, "batch", 2, "batch", 2, *at_the_end, "batch"]
