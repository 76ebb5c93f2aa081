"""Several processes against one: weights, agreement, messages, memory."""

import functools

import mindspore as ms
import numpy as np
import pytest
from open_window import buffer_of
from scenarios import (
    NO_SPIKE,
    OPTIMIZERS,
    STEPS,
    Halved,
    batch,
    build_network,
    build_step,
    fingerprint,
    joined,
    stock_weights,
    train,
    train_batches,
    train_factors,
    train_lookup,
    uneven_data,
    weights_of,
    whole_batches,
)

from ms_gradaccum import TrainingPlan

PART, SIZES = "parallel_worker", (2, 4)
KINDS = [
    "data parallel",
    "data parallel, each batch",
    "all shards",
    "two shards",
    "all shards, level2",
    "two shards, level2",
]


# One update per batch, and two batches per update.
EACH, PAIRS = tuple((number,) for number in range(STEPS)), ((0, 1), (2, 3))


@functools.cache
def one_process(clip):
    return train("Adam", clip)


@pytest.mark.parametrize("name", KINDS)
def test_uneven_rows_on_several_processes_train_like_one_process_on_all_rows(name, two):
    expected = whole_batches("Adam", EACH)
    assert not np.allclose(expected, weights_of(build_network()))  # otherwise the test proves nothing
    np.testing.assert_allclose(two[0][f"{name}, none"]["weights"], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "processes,name,clip",
    [
        *[("two", name, "value") for name in ("data parallel", "all shards", "two shards, level2")],
        *[(processes, name, "norm") for processes in ("two", "four") for name in KINDS],
        ("two", "nothing above the threshold", "norm"),
    ],
)
def test_clipping_sees_the_whole_gradient(processes, name, clip, request):
    reports = request.getfixturevalue(processes)
    network, _, output = one_process(clip)
    got = reports[0][f"{name}, {clip}"]
    norms = [float(output.grad_norm.asnumpy()), float(output.clipped_grad_norm.asnumpy())]
    assert norms[1] < norms[0]  # something is clipped
    np.testing.assert_allclose(got["norms"], norms, rtol=1e-5)
    np.testing.assert_allclose(got["loss"], output.loss.asnumpy(), rtol=1e-5)
    np.testing.assert_allclose(got["weights"], weights_of(network), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("processes", ["two", "four"])
def test_all_processes_have_the_same_bits_after_the_updates(processes, request):
    reports = request.getfixturevalue(processes)
    trained = [name for name, value in reports[0].items() if isinstance(value, dict) and "fingerprint" in value]
    assert len(trained) >= len(KINDS)
    for name in trained:
        assert len({report[name]["fingerprint"] for report in reports}) == 1, name


def test_gradients_differ_inside_a_window_and_are_equal_at_its_boundary(two):
    first, second = [report["inside"] for report in two]
    assert not first["moved"] and not second["moved"]
    assert not np.allclose(first["sums"], second["sums"])
    assert two[0]["at the boundary"] == two[1]["at the boundary"]
    # Each rank's sums inside are of its own rows: together, those of all rows in one process.
    _, step = build_step(accumulation_steps=2)
    train_batches(step, [0])
    whole = np.concatenate([total.asnumpy().ravel() for total in buffer_of(step).sums])
    np.testing.assert_allclose(np.add(first["sums"], second["sums"]), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_optimizer_updates_like_a_whole_one(optimizer, two):
    np.testing.assert_allclose(two[0][optimizer]["weights"], whole_batches(optimizer, EACH), rtol=2e-5, atol=2e-6)


def test_pynative_mode_trains_the_same_weights(two):
    weights = two[0]["PYNATIVE two shards"]["weights"]
    np.testing.assert_allclose(weights, two[0]["two shards, norm"]["weights"], rtol=2e-5, atol=2e-6)


def test_the_context_of_data_parallel_changes_no_update_and_a_sum_is_named(two):
    # With parameter_broadcast=True each graph that MindSpore compiles would get the sums and shards of rank 0.
    for report in two:
        for mean in (True, False):
            got = report[f"parameter_broadcast, mean {mean}"]["weights"]
            np.testing.assert_allclose(got, weights_of(one_process("norm")[0]), rtol=2e-5, atol=2e-6)
        (said,) = report["warned of a sum"]
        assert "gradients_mean=True uses 2 times that" in said


def test_optimizer_state_is_divided_by_the_shard_size(four):
    network = build_network()
    sizes = [weight.size for weight in network.trainable_params()]
    small = sizes[-2] + sizes[-1]  # 3 rows cannot be divided
    rest = four[0]["data parallel, norm"]["state"] - 3 * sum(sizes)  # global_step and the like
    for name, shards in (("two shards", 2), ("all shards", 4), ("all shards, level2", 4)):
        expected = 3 * ((sum(sizes) - small) // shards + small) + rest  # weight and two moments
        assert four[0][f"{name}, norm"]["state"] == expected


@pytest.mark.parametrize("name", ["data parallel", "all shards", "all shards, level2"])
@pytest.mark.parametrize("limit", ["NormSpike", "float"])
def test_all_processes_leave_out_the_same_window(name, limit, two):
    # Of the five windows, the spike makes no update.
    without = stock_weights("Momentum", [batch(0)] * 4)
    for report in two:
        got = report[f"left out {name}, {limit}"]
        assert got["updated"] == [True, True, True, False, True]
        np.testing.assert_allclose(got["weights"], without, rtol=2e-5, atol=2e-6)
    # Nothing is sent for it.
    sent, sent_with_a_limit = two[0][f"messages left out {name}"]
    assert sent == sent_with_a_limit != []


def test_a_clip_of_ones_own_gets_the_gradient_of_all_processes_or_is_refused(two):
    expected = train_factors(NO_SPIKE, clip=Halved())["weights"]
    assert not np.allclose(expected, train_factors(NO_SPIKE)["weights"], rtol=1e-3)
    for report in two:
        np.testing.assert_allclose(report["own clip"]["weights"], expected, rtol=2e-5, atol=2e-6)
        assert "a clip of your own needs whole gradients, but got Halved with HSDP(" in report["own clip refused"]
        assert report["left whole"]


@pytest.mark.parametrize("name,messages", [("data parallel", 1), ("all shards", 4)])
def test_a_window_costs_the_same_messages_for_any_micro_size(name, messages, two):
    one, four = [counted["sent"] for counted in two[0][f"messages {name}"]]
    # All sums, the loss and the weight in one. Shards: what stays whole, the sums, the norm, the weights.
    assert len(one) == messages
    assert one == four


@pytest.mark.parametrize("name", ["data parallel, each batch", "all shards, level2"])
def test_ranks_that_share_the_sums_send_one_message_per_micro_batch(name, two):
    one, four = [counted["sent"] for counted in two[0][f"messages {name}"]]
    # The number of micro batches, one for each of them; what stays whole, the norm, the gradients or the weights.
    assert len(one) == 1 + 1 + 3
    assert len(four) == 1 + 4 + 3


@pytest.mark.parametrize(
    "processes,name",
    [
        ("two", "data parallel"),
        ("two", "data parallel, each batch"),
        ("two", "all shards"),
        ("two", "all shards, level2"),
        ("two", "nothing above the threshold"),
        ("two", "clipped"),
        ("two", "clipped by groups"),
        ("four", "two shards"),
        ("four", "two shards, level2"),
    ],
)
def test_the_messages_and_the_sums_are_those_of_the_layout(processes, name, request):
    for report in request.getfixturevalue(processes):
        for counted in report[f"messages {name}"]:
            assert counted["sent"] == counted["described"]
            assert counted["kept"] == counted["kept by description"]


@pytest.mark.parametrize(
    "processes,name",
    [("two", "data parallel"), ("two", "all shards"), ("four", "two shards, level2")],
)
def test_the_graphs_have_the_collectives_that_the_reducer_describes(processes, name, request):
    for report in request.getfixturevalue(processes):
        found = report[f"graphs {name}"]
        assert found["sent"] == found["described"] != []


@pytest.mark.parametrize("name", ["data parallel", "all shards", "all shards, level2"])
def test_16_bits_and_dropped_micro_batches_are_in_what_the_reducer_describes(name, two):
    for report in two:
        found = report[f"messages unforeseen {name}"]
        assert found["sent"] == found["described"]
        assert found["kept"] == found["kept by description"]
        # The loss, the weight and the dropped micro batches go by themselves.
        assert ["AllReduce", 2, 12] in found["sent"]


def test_shared_sums_take_their_part_of_the_memory(two):
    shapes = two[0]["level2 sums"]
    network = build_network()
    for weight in network.trainable_params():
        rows = weight.shape[0] // 2 if weight.shape[0] % 2 == 0 else weight.shape[0]
        assert shapes[f"accu_grads.{weight.name}"] == [rows, *weight.shape[1:]]


@pytest.mark.parametrize("processes", ["two", "four"])
def test_checkpoints_hold_whole_parameters_and_state(processes, request):
    reports = request.getfixturevalue(processes)
    shapes = reports[0]["saved shapes"]
    for weight in build_network().trainable_params():
        for name in (weight.name, f"moment1.{weight.name}", f"moment2.{weight.name}", f"accu_grads.{weight.name}"):
            assert shapes[name] == list(weight.shape)
    assert not [name for name in shapes if "shard" in name]
    # MindSpore's ModelCheckpoint with `remove_redundancy` must not take the parts of other ranks for copies of its own.
    assert [report["differs without redundancy"] for report in reports] == [[]] * len(reports)


@pytest.mark.parametrize("how", ["read", "copied", "cloned", "listed", "set", "saved"])
def test_parameters_and_state_are_whole_where_a_callback_reads_or_copies_them(how, two):
    assert [report[f"differs where {how}"] for report in two] == [[], []]


@pytest.mark.parametrize("name", ["data parallel", "two shards"])
@pytest.mark.parametrize("processes", ["two", "four"])
def test_training_goes_on_with_another_number_of_shards(name, processes, request):
    for report in request.getfixturevalue(processes):
        assert report[f"not loaded {name}"] == [[], []]
        np.testing.assert_allclose(report[f"resumed {name}"], report["not interrupted"], rtol=2e-6, atol=2e-7)
    expected = whole_batches("Adam", PAIRS)
    np.testing.assert_allclose(report["not interrupted"], expected, rtol=2e-5, atol=2e-6)


def test_training_goes_on_in_another_number_of_processes(four):
    expected = whole_batches("Adam", PAIRS)
    np.testing.assert_allclose(four[0]["from two"], expected, rtol=2e-5, atol=2e-6)


def test_one_process_loads_what_several_have_saved(two):
    network, step = build_step(accumulation_steps=2)
    assert ms.load_param_into_net(step, ms.load_checkpoint(two[1]["checkpoint"])) == ([], [])
    train_batches(step, [2, 3])
    np.testing.assert_allclose(weights_of(network), whole_batches("Adam", PAIRS), rtol=2e-5, atol=2e-6)


def test_weights_that_differ_are_noticed_when_asked_for(two):
    assert all("same weights after an update, but ranks [1] differ" in report["different"] for report in two)


@pytest.mark.parametrize("name", ["data parallel", "all shards"])
def test_sparse_gradients_are_those_of_one_process(name, two):
    expected = train_lookup()
    # By hand: ids and factors as in the scenario, mean over 12 rows, learning rate 0.1.
    sums = np.array([0 + 4 + 10, 1 + 2 + 5 + 8 + 9, 3 + 6 + 7 + 11, 0])
    by_hand = np.arange(8).reshape(4, 2) - 0.1 * sums[:, None] / 12
    np.testing.assert_allclose(expected, by_hand.ravel(), rtol=1e-6)
    np.testing.assert_allclose(two[0][f"lookup {name}"], expected, rtol=1e-6)


def test_sparse_gradients_cannot_be_shared_in_each_micro_batch(two):
    assert all("'network'" in report["lookup refused"] for report in two)
    assert all("a sparse lookup in EmbeddingLookup" in report["lookup refused"] for report in two)


def test_level3_says_what_it_does_not_shard(two):
    (said,) = two[0]["level3"]
    assert "'level3' behaves like 'level2' here" in said


@pytest.mark.parametrize("processes", ["two", "four"])
def test_processes_that_start_differently_take_the_weights_of_rank_0(processes, request):
    reports = request.getfixturevalue(processes)
    assert {report["unified"] for report in reports} == {fingerprint(build_network())}
    (said,) = reports[0]["warnings"]
    assert "different parameters or buffers" in said


def test_settings_that_differ_raise_on_every_rank(four):
    sentence = (
        "For 'TrainOneStepCell', the ranks must agree about 'accumulation_steps', but got 1 on rank 0 and 2 on "
        "rank 1. Start all ranks with the same settings."
    )
    assert [report["disagreement"] for report in four] == [sentence] * 4


@pytest.mark.parametrize("name", ["data parallel", "two shards, level2"])
@pytest.mark.parametrize("last_window,updates", [("apply", 4), ("drop", 2)])
def test_a_process_that_runs_out_of_data_joins_the_others(last_window, updates, name, two):
    assert [report[f"updates {name} {last_window}"] for report in two] == [updates] * 2
    settings = {"accumulation_steps": 2, "last_window": last_window}
    assert TrainingPlan(dataset_size=12, batch_size=2, ranks=2, epochs=2, **settings).updates == updates
    assert two[0][f"early {name} {last_window}"] == two[1][f"early {name} {last_window}"]
    first, second = (uneven_data(rank) for rank in (0, 1))
    windows = [joined([array[:4] for array in first], second)]
    if last_window == "apply":
        windows.append([array[4:] for array in first])
    expected = stock_weights("Momentum", windows * 2)
    np.testing.assert_allclose(two[0][f"early {name} {last_window}"], expected, rtol=2e-5, atol=2e-6)
