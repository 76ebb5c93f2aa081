"""States of several processes: nothing is lost where one of them fails, and their number may change."""

import json

import mindspore as ms
import numpy as np
import pytest
from open_window import buffer_of
from safetensors.numpy import load_file
from scenarios import KINDS, build_step, train_batches, weights_of, whole_batches
from state_scenarios import FIRST, LAST, MOVES

from ms_gradaccum import load_state

PART, SIZES = "state_worker", (2, 4)


@pytest.fixture(scope="module")
def expected():
    return whole_batches("Adam", ((0, 1), (2, 3), (4, 5)))


def assert_same(weights, expected):
    np.testing.assert_allclose(weights, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_as_many_ranks_go_on_bit_for_bit(name, two, expected):
    for report in two:
        assert report[name]["bits"][0] == report[name]["bits"][1]
        assert_same(report[name]["weights"], expected)


@pytest.mark.parametrize("source,name", MOVES)
def test_twice_as_many_ranks_go_on(source, name, four, expected):
    for report in four:
        assert_same(report[f"{source} to {name}"], expected)


@pytest.mark.parametrize("state", [f"{name} 2" for name in KINDS] + ["data parallel 4"])
def test_one_process_goes_on(state, two, four, states, expected, eager):
    network, step = build_step(accumulation_steps=2)
    load_state(step, states / state)
    assert step.open_batches() == 1
    assert abs(buffer_of(step).weight.asnumpy() - 12) < 1e-6  # the rows of both ranks
    train_batches(step, LAST)
    assert_same(weights_of(network), expected)
    ms.set_context(mode=ms.PYNATIVE_MODE)


def test_without_the_open_window_the_weights_would_be_others(two, states, expected, eager):
    network, step = build_step(accumulation_steps=2)
    load_state(step, states / "data parallel 2")
    step.drop()
    train_batches(step, [FIRST[-1], *LAST][1:])
    assert np.abs(np.array(weights_of(network)) - expected).max() > 1e-3


def test_what_a_rank_has_for_itself_stays_its_own(two):
    means = [report["statistics"] for report in two]
    assert means[0][0] == means[0][1] and means[1][0] == means[1][1]
    assert means[0][0] != means[1][0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_loses_nothing(rank, two):
    for report in two:
        error, left, unchanged, name = report[f"full {rank}"]
        assert error.startswith("OSError: ") and "No space left on device" in error
        assert "Earlier states are intact." in error
        # Rank 0 clears up, while the other one may look.
        assert [each for each in left if report is two[0] or not each.startswith(".")] == ["state-000001"]
        assert unchanged and name == "state-000002"


def test_ranks_that_have_parted_save_nothing(two):
    for report in two:
        assert "different values of '0.weight'." in report["differing_ranks"]
    # Rank 0 clears up, while the other one may look.
    assert two[0]["differing_ranks left"] == []


def test_a_damaged_file_of_one_rank_is_refused_by_all(two):
    for report in two:
        error, unchanged = report["damaged"]
        assert "rank_1/parameters-00000.safetensors has another checksum" in error
        assert "Give the folder of the state before it" in error and "state-000001." in error
        assert unchanged


def test_a_signal_to_one_rank_ends_all_after_the_same_window(two):
    for report in two:
        code, states, straight, resumed = report["signalled"]
        assert code == 143
        # After steps 3, the end of a pass, and 4; after step 2 only one rank has a batch left.
        assert states == ["state-000001", "state-000002"]
        assert resumed == straight
    assert two[0]["signalled"][2] == two[1]["signalled"][2]


def test_what_the_compiler_has_partitioned_is_saved_rank_by_rank_as_mindspore_reads_it(two):
    for rank, report in enumerate(two):
        found = report["partitioned"]
        assert found["files"] == [f"rank_{each}/parameters-00000.safetensors" for each in (0, 1)]
        assert found["values"][0] == found["values"][1] == found["values"][2]
        assert found["left over"] == []
        assert rank == 0 or found["values"] != two[0]["partitioned"]["values"]


def test_the_manifest_holds_each_rank(two, states):
    state = states / "data parallel 2" / "state-000001"
    manifest = json.loads((state / "manifest.json").read_text())
    assert len(manifest["ranks"]) == 2
    assert [rank["windows"][0]["batches"] for rank in manifest["ranks"]] == [1, 1]
    assert sorted(manifest["files"]) == [
        "parameters-00000.safetensors",
        "rank_0/parameters-00000.safetensors",
        "rank_1/parameters-00000.safetensors",
    ]
    weights = [load_file(state / f"rank_{rank}" / "parameters-00000.safetensors") for rank in (0, 1)]
    assert [float(sums["accu_grads.0.weight.window_weight"]) for sums in weights] == [7.0, 5.0]
