"""Loss scale, bad micro batches, 16-bit messages and limits per group: two processes against one."""

import numpy as np
import pytest
from mindspore import Tensor
from precision_scenarios import BAD, GROUPS, KINDS, good_rows, trained, trained_by_group
from scenarios import CLIPS, batch, build_step, weights_of

PART, SIZES = "precision_worker", (2,)
SKIPPED = [(name, bad) for name, choice, bad in BAD if choice == "skip_window"]
DROPPED = [(name, bad) for name, choice, bad in BAD if choice == "drop"]


def one_process(batches):
    """The weights of one process that sees no bad row."""
    network, step = build_step("schedule", clip=CLIPS["norm"]())
    norms = [float(step(*inputs).grad_norm.asnumpy()) for inputs in batches]
    return weights_of(network), norms


@pytest.fixture(scope="module")
def skipped():
    """The weights of one process that never sees the second batch."""
    return one_process([whole(0), whole(2)])[0]


def whole(number):
    return [Tensor(array) for array in batch(number)]


@pytest.mark.parametrize("name,bad", SKIPPED)
def test_an_overflow_on_one_rank_skips_the_update_on_all(name, bad, two, skipped):
    first, second = [report[f"bad {name} skip_window {bad}"] for report in two]
    np.testing.assert_array_equal(first["seen"], second["seen"])
    _, overflow, scale, updated, _, _, rate, weight = np.array(first["seen"]).T
    assert overflow.tolist() == [0, 1, 0] and updated.tolist() == [1, 0, 1] and scale.tolist() == [64, 64, 32]
    # The rate waits for the update that is not made.
    assert rate[1] == rate[2] == pytest.approx(rate[0] / 2)
    assert weight[[0, 2]].tolist() == [12, 12]
    assert (first["updates"], first["scale"]) == (second["updates"], second["scale"]) == (2, 32)
    assert first["weights"] == second["weights"]
    np.testing.assert_allclose(first["weights"], skipped, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name,bad", DROPPED)
def test_a_bad_micro_batch_on_one_rank_is_left_out_by_all(name, bad, two, skipped, eager):
    first, second = [report[f"bad {name} drop {bad}"] for report in two]
    np.testing.assert_array_equal(first["seen"], second["seen"])
    _, overflow, scale, updated, norm, _, _, weight = np.array(first["seen"]).T
    rest = good_rows(bad)
    assert overflow.tolist() == [0, 0, 0] and updated.tolist() == [1, 1, 1] and scale.tolist() == [64, 64, 32]
    assert weight.tolist() == [12, len(rest[0]), 12]
    assert first["weights"] == second["weights"] and first["updates"] == 3
    expected, norms = one_process([whole(0), rest, whole(2)])
    np.testing.assert_allclose(norm, norms, rtol=1e-5)
    np.testing.assert_allclose(first["weights"], expected, rtol=2e-5, atol=2e-6)
    # Without the whole second batch the weights are others.
    assert not np.allclose(first["weights"], skipped, atol=1e-4)


def test_groups_are_clipped_by_their_norms_over_all_shards(two, eager):
    expected = trained(0, 1, clip=GROUPS)
    assert expected["norms"][1] < expected["norms"][0]
    for report in two:
        got = report["groups two shards"]
        np.testing.assert_allclose(got["norms"], expected["norms"], rtol=1e-5)
        np.testing.assert_allclose(got["weights"], expected["weights"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_16_bit_messages_round_the_gradient_and_nothing_else(name, two, eager):
    expected = np.array(trained(0, 1)["weights"])
    got = [np.array(report[f"sent {name}"]["weights"]) for report in two]
    assert got[0].tolist() == got[1].tolist()
    # Of the learning rate 0.1, gradients of about 1 and 11 bits.
    assert 1e-5 < np.abs(got[0] - expected).max() < 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_messages_of_a_group_of_parameters_have_16_bits_and_the_others_float32(name, two, eager):
    expected = trained_by_group(0, 1)
    for report in two:
        got = report[f"sent in groups {name}"]
        assert {"Float16", "Float32"} == set(got["dtypes"])
        assert 1e-5 < np.abs(np.subtract(got["weight"], expected["weight"])).max() < 1e-3
        np.testing.assert_allclose(got["bias"], expected["bias"], rtol=2e-6, atol=2e-7)


def test_half_precision_on_several_processes_trains_like_one(two, eager):
    expected = np.array(trained(0, 1, clip=GROUPS)["weights"])
    got = [np.array(report["half two shards"]["weights"]) for report in two]
    assert got[0].tolist() == got[1].tolist()
    assert 1e-5 < np.abs(got[0] - expected).max() < 1e-2


def test_messages_that_a_device_cannot_add_up_are_refused(two):
    assert all("'mixed_precision'" in report["refused"] and "reduce_dtype" in report["refused"] for report in two)
