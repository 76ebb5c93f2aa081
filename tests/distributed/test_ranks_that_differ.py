"""Ranks that were told different things, read the same rows, or fail alone: an error or a warning, and no hang."""

import itertools

import numpy as np
import pytest
from scenarios import APART, KINDS, batch, build_network, joined, share, stock_weights, weights_of, whole_batches

PART, SIZES = "unlike_worker", (2,)
DISAGREEMENTS = {
    "decay": ("optimizer.weight_decay", "0.0", "0.1"),
    "epsilon": ("optimizer.eps", "1e-08", "2e-08"),
    "class": ("optimizer", "Momentum", "Adam"),
    "parameters": ("optimizer.parameters[0]", "0.weight", "0.bias"),
    "mode": ("mode", "GRAPH_MODE", "PYNATIVE_MODE"),
    "loss": ("network.network._loss_fn", "MSELoss", "L1Loss"),
    "axis": ("batch_axis", "0", "1"),
    "compile": ("compile", "False", "True"),
    "drop": ("bad_micro_batch", "False", "True"),
    "kind": ("parallel", "DataParallel(sync_each_batch=False", "HSDP(shard_size=-1"),
    "cell": ("the training cell", "TrainOneStepCell", "Accumulator"),
    "layers": ("parameter 1.weight", "(3, 3) of Float32", "(4, 3) of Float32"),
    "frozen": ("parameter 0.weight", "(8, 6) of Float32", "(8, 6) of Float32, frozen"),
    "states": ("callbacks", "[]", "['StateCheckpoint(save_checkpoint_steps=None, "),
    "averages": ("callbacks", "['StateCheckpoint(", "['StateCheckpoint("),
    "steps": ("callbacks", "['StateCheckpoint(save_checkpoint_steps=1", "['StateCheckpoint(save_checkpoint_steps=2"),
    "cast": ("network.network._backbone.2.to_float", "None", "fp16"),
    "last_window": ("last_window", "apply", "drop"),
    "epoch": ("epoch", "1", "2"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_would_train_unlike_or_wait_for_each_other_are_told_what_differs(what, two):
    name, *values = DISAGREEMENTS[what]
    for rank, report in enumerate(two):
        assert what in report["disagreements"], f"rank {rank} trains"
        said = report["disagreements"][what]
        assert f"the ranks must agree about '{name}', but got {values[0]}" in said
        assert f" on rank 0 and {values[1]}" in said and said.endswith(" Start all ranks with the same settings.")


def test_a_cell_may_know_its_rank_and_takes_over_the_count_of_updates(two):
    assert [report["agreed"] for report in two] == [3, 3]


def test_parameters_of_all_dtypes_arrive_bit_for_bit(two):
    assert [report["differ"] for report in two] == [[True, False], [True, False]]
    assert two[0]["bits"] == two[1]["bits"] == two[0]["own bits"]
    assert all(two[0]["shapes"] + two[1]["shapes"])
    assert all(mine != theirs for mine, theirs in zip(two[0]["own bits"], two[1]["own bits"]))


REPLICAS = "the argument 'network' must be a network with the same parameters on all processes, but got "
EXPERTS = {
    "named": "the ranks must agree about 'optimizer.parameters[1]', but got expert0 on rank 0 and expert1 on rank 1. ",
    "alike": f"{REPLICAS}different values, and All",
    "marked": f"{REPLICAS}'expert' with layerwise_parallel. ",
}


@pytest.mark.parametrize("what", EXPERTS)
def test_experts_that_only_one_rank_has_are_refused_on_all_ranks_and_keep_their_values(what, two):
    for report in two:
        said, is_kept = report[f"experts {what}"]
        assert said.startswith(f"For 'TrainOneStepCell', {EXPERTS[what]}") and is_kept


def test_counts_beyond_those_of_a_float32_arrive(two):
    assert [report["counts"] for report in two] == [[2**24 + 1, 2**24 + 2]] * 2


DROPPED = "a batch failed on one of the ranks, so all ranks discard this window. See the log of that rank."


def check_second_window(weights):
    """Only the rows of the second window have trained, those of both ranks: MindSpore's own step with all of them."""
    expected = np.array(whole_batches("Momentum", ((2, 3),)))
    assert not np.allclose(expected, weights_of(build_network()), atol=1e-3)
    assert not np.allclose(expected, whole_batches("Momentum", ((0, 1), (2, 3))), atol=1e-3)
    np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "kind, failure",
    [*((kind, "mid-batch") for kind in KINDS), *itertools.product(APART, ["last micro batch", "update"])],
)
def test_a_window_in_which_a_batch_has_failed_on_one_rank_is_dropped_on_all(kind, failure, two):
    key = f"{kind}, {failure}"
    assert [report[f"errors {key}"] for report in two] == [[], ["of this rank"]]
    for report in two:
        weights, updates, skipped, open_batches, ended = report[key]
        assert (updates, skipped, open_batches) == (1, 1, 0)
        # The rank that has raised the error has no report of that batch.
        assert ended in ([False, True, False, True], [True, False, True], [False, False, True])
        check_second_window(weights)
        assert [said for said in report[f"warnings {key}"] if DROPPED in said] != []


@pytest.mark.parametrize("kind", APART)
def test_a_batch_of_which_nothing_was_added_is_left_out(kind, two):
    """The first batch has the rows of rank 0 alone."""
    windows = [joined(share(batch(0), 0, 2), batch(1)), joined(batch(2), batch(3))]
    first = stock_weights("Momentum", windows)
    for report in two:
        weights, updates, skipped, *_ = report[f"{kind}, first micro batch"]
        assert (updates, skipped) == (2, 0) and report[f"warnings {kind}, first micro batch"] == []
        np.testing.assert_allclose(weights, first, rtol=2e-5, atol=2e-6)


def test_a_batch_that_was_given_wrong_is_left_out(two):
    expected = stock_weights("Momentum", [joined(batch(0), share(batch(1), 0, 2))])
    for report in two:
        weights, updates, skipped = report["wrong batch"]
        assert (updates, skipped) == (1, 0)
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-6)
    assert [len(report["errors wrong batch"]) for report in two] == [0, 1]


@pytest.mark.parametrize("kind", APART)
def test_a_loop_goes_on_after_an_error_of_one_rank(kind, two):
    """Before the backward pass the batch is left out; inside it the window is dropped; after it all rows are there."""
    without = stock_weights("Momentum", [joined(share(batch(0), 0, 2), batch(1)), joined(batch(2), batch(3))])
    for report in two:
        np.testing.assert_allclose(report[f"loop {kind}, before 1"][0], without, rtol=2e-5, atol=2e-6)
        check_second_window(report[f"loop {kind}, inside 1"][0])
        expected = whole_batches("Momentum", ((0, 1), (2, 3)))
        np.testing.assert_allclose(report[f"loop {kind}, after 2"][0], expected, rtol=2e-5, atol=2e-6)
        assert [report[f"loop {kind}, {place}"][1] for place in ("before 1", "inside 1", "after 2")] == [2, 1, 2]
    for place in ("before 1", "inside 1", "after 2"):
        assert [report[f"errors loop {kind}, {place}"] for report in two] == [[], ["of this rank"]]


def test_ranks_that_read_the_same_data_are_told_once(two):
    for report in two:
        for data in ("same", "joined", "sunk"):
            (said,) = report[f"warnings data {data}"]
            assert "must read different data" in said and "num_shards=2" in said
        assert report["warnings data other"] == report["warnings data none"] == []


def test_a_rank_that_finds_something_wrong_with_its_loss_trains_on_with_the_others(two):
    """It sends nothing for its measurement, and measures no more."""
    assert [report["found True"][0] for report in two] == [1, 0]
    assert [report["found False"][0] for report in two] == [0, 0]
    assert len({str(report[key][1]) for report in two for key in ("found True", "found False")}) == 1


def apart(what, owner="TrainOneStepCell"):
    return (
        f"For '{owner}', the ranks must have the same {what} in an update, but ranks [1] differ from rank 0. "
        "Give all optimizers the same numbers; load a checkpoint, add an EMA, step a scheduler and change parameters "
        "on all ranks or on none."
    )


@pytest.mark.parametrize("key", ["loaded", "loaded, level1", "loaded, loop", "loaded, loop of two, joined"])
def test_what_one_rank_alone_has_loaded_before_the_first_window_is_an_error_on_all(key, two):
    for report in two:
        said = report[f"errors apart {key}"]
        assert said[0] == apart("parameters", "Accumulator" if "loop" in key else "TrainOneStepCell")


@pytest.mark.parametrize(
    "key,what,times",
    [
        ("loaded late", "parameters", 2),
        ("loaded last", "parameters", 1),
        ("rate", "learning rate", 2),
        # Numbers that no rank has compared before: they show in the parameters.
        ("momentum", "parameters", 2),
        ("schedule", "parameters", 2),
    ],
)
def test_ranks_that_train_apart_end_in_one_sentence(key, what, times, two):
    """In the next of windows 1, 2, 4, or where the loop flushes."""
    for report in two:
        assert (report[f"errors apart {key}"], report[f"warnings apart {key}"]) == ([apart(what)] * times, [])


def test_numbers_that_an_optimizer_has_in_parameters_are_those_of_rank_0(two):
    for report in two:
        (said,) = report["warnings momentum held"]
        assert "the ranks started with different parameters or buffers" in said
        assert report["momentum held"] == np.float32(0.9)


def test_ranks_that_train_alike_are_told_nothing(two):
    for report in two:
        assert report["errors apart alike"] == report["warnings apart alike"] == []


@pytest.mark.parametrize("key", ["mean", "sum"])
def test_gradients_that_were_reduced_before_are_told_once(key, two):
    for report in two:
        (said,) = report[f"warnings gradients {key}"]
        assert "have begun with the same gradients" in said and "DistributedGradReducer" in said


@pytest.mark.parametrize("key", ["own", "declared", "of 0.0", "of nan"])
def test_other_gradients_are_told_nothing_of_their_data(key, two):
    for report in two:
        assert report[f"warnings gradients {key}"] == []


def test_buffers_are_those_of_rank_0_and_other_tensors_that_differ_are_named(two):
    start = "For 'TrainOneStepCell', the ranks started with different parameters or buffers"
    other = "For 'TrainOneStepCell', the ranks have different values in a tensor of the network "
    for rank, report in enumerate(two):
        assert report["warnings drawn nothing"] == []
        (sentence,) = report["warnings drawn buffer"]
        assert sentence.startswith(start) and report["drawn buffer"] == [[1.0] * 3, [1.0] * 3]
        (sentence,) = report["warnings drawn constant"]
        assert sentence.startswith(f"{other}(one of network._backbone.constant)")
        assert report["drawn constant"] == [[1.0] * 3, [1.0 + rank] * 3]


def test_optimizers_and_hooks_that_add_up_over_the_ranks_are_named(two):
    for report in two:
        first, second = report["warnings reduced by optimizer"]  # Two are built.
        assert first == second and "the optimizer calls AllReduce" in first
        (said,) = report["warnings reduced by hook"]
        assert "the hook of a parameter calls AllReduce" in said
        assert report["warnings reduced not"] == []


def test_all_ranks_stop_after_the_pass_after_which_one_stops(two):
    most = max(report["stop"][2] for report in two)
    for report in two:
        weights, updates, _ = report["stop"]
        (said,) = report["warnings stop"]
        assert "only ranks [1] have called request_stop()" in said and updates == most
        assert weights == two[0]["stop"][0]


def test_ranks_that_are_asked_to_exit_do_so_in_the_step_in_which_all_are(two):
    for report in two:
        assert report["exit"] == [5, 5, two[0]["exit"][2]]


def test_a_skipped_window_names_the_parameter_once_on_all_ranks(two):
    said = "For 'TrainOneStepCell', the gradient of a window must have a finite norm, but got an Inf or a NaN "
    for report in two:
        (sentence,) = report["not finite data parallel"]
        assert sentence.startswith(f"{said}for the parameter '0.weight': this window makes no update")
        (sentence,) = report["not finite level2"]
        assert sentence.startswith(said)


def test_averages_that_one_rank_alone_has_are_told_before_the_first_update(two):
    for report in two:
        assert report["errors averages alone"] == [apart("averages (EMA)")]
        assert report["averages alone"], "the weights have moved"


def test_ranks_that_are_one_message_apart_get_one_sentence_and_can_go_on(two):
    for report in two:
        found = dict(report["apart by a message"])
        assert found.pop("data parallel: trains") and found.pop("level2: trains")
        # Each call against the next one.
        assert len(found) == 4 + 5
        for key, said in found.items():
            what = key.partition(": ")[2]
            assert f"the ranks made different calls: {what}. " in said
