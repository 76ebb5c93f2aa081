"""Several processes against one: weights, agreement, messages, memory."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from launch import launch  # noqa: E402
from scenarios import OPTIMIZERS, STEPS, batch, build_network, fingerprint, train, weights_of  # noqa: E402

WORKER = Path(__file__).with_name("parallel_worker.py")
KINDS = ["data parallel", "all shards", "two shards"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(WORKER, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launch(WORKER, 4, tmp_path_factory.mktemp("four"))


def whole_batches(optimizer):
    """MindSpore's own step on the rows of all processes in one batch."""
    ms.set_context(mode=ms.GRAPH_MODE)
    network = build_network()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(network, nn.MSELoss()), OPTIMIZERS[optimizer](network.trainable_params())
    )
    step.set_train()
    for number in range(STEPS):
        step(*[Tensor(array) for array in batch(number)])
    return weights_of(network)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("processes", ["two", "four"])
def test_uneven_rows_on_several_processes_train_like_one_process_on_all_rows(name, processes, request):
    reports = request.getfixturevalue(processes)
    expected = whole_batches("Adam")
    assert not np.allclose(expected, weights_of(build_network()))  # otherwise the test proves nothing
    np.testing.assert_allclose(reports[0][f"{name}, none"]["weights"], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("name", [*KINDS, "nothing above the threshold"])
@pytest.mark.parametrize("processes", ["two", "four"])
def test_clipping_sees_the_whole_gradient(name, clip, processes, request):
    reports = request.getfixturevalue(processes)
    if f"{name}, {clip}" not in reports[0]:
        pytest.skip("the threshold is tried with one kind of clipping")
    network, _, output = train("Adam", clip)
    got = reports[0][f"{name}, {clip}"]
    norms = [float(output.grad_norm.asnumpy()), float(output.clipped_grad_norm.asnumpy())]
    assert norms[1] < norms[0]  # something is clipped
    np.testing.assert_allclose(got["norms"], norms, rtol=1e-5)
    np.testing.assert_allclose(got["loss"], output.loss.asnumpy(), rtol=1e-5)
    np.testing.assert_allclose(got["weights"], weights_of(network), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("processes", ["two", "four"])
def test_all_processes_have_the_same_bits_after_the_updates(processes, request):
    reports = request.getfixturevalue(processes)
    trained = [name for name, value in reports[0].items() if isinstance(value, dict)]
    assert len(trained) >= 10
    for name in trained:
        assert len({report[name]["fingerprint"] for report in reports}) == 1, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_optimizer_updates_like_a_whole_one(optimizer, two):
    np.testing.assert_allclose(two[0][optimizer]["weights"], whole_batches(optimizer), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["data parallel", "two shards"])
def test_pynative_mode_trains_the_same_weights(name, two):
    np.testing.assert_allclose(
        two[0][f"PYNATIVE {name}"]["weights"], two[0][f"{name}, norm"]["weights"], rtol=2e-5, atol=2e-6
    )


def test_optimizer_state_is_divided_by_the_shard_size(four):
    network = build_network()
    sizes = [weight.size for weight in network.trainable_params()]
    small = sizes[2] + sizes[3]  # 3 rows cannot be divided
    rest = four[0]["data parallel, none"]["state"] - 3 * sum(sizes)  # global_step and the like
    for name, shards in (("two shards", 2), ("all shards", 4)):
        expected = 3 * ((sum(sizes) - small) // shards + small) + rest  # weight and two moments
        assert four[0][f"{name}, none"]["state"] == expected


def test_a_window_costs_the_same_messages_for_any_micro_size(two):
    assert len(two[0]["messages 1"]) == 1  # one bucket, and the loss and the weight in it
    assert two[0]["messages 1"] == two[0]["messages 16"]


@pytest.mark.parametrize("processes", ["two", "four"])
def test_processes_that_start_differently_take_the_weights_of_rank_0(processes, request):
    reports = request.getfixturevalue(processes)
    assert {report["unified"] for report in reports} == {fingerprint(build_network())}
    assert reports[0]["warnings"] == [
        "For 'TrainOneStepCell', the ranks started with different parameters: those of rank 0 are used. Call "
        "mindspore.set_seed() with the same seed on all ranks, or load the same checkpoint."
    ]


def test_settings_that_differ_raise_on_every_rank(four):
    sentence = (
        "For 'TrainOneStepCell', the ranks must agree about 'accumulation_steps', but got 1 on rank 0 and 2 on "
        "rank 1. Start all ranks with the same settings."
    )
    assert [report["disagreement"] for report in four] == [sentence] * 4


@pytest.mark.parametrize("last_window,updates", [("apply", 4), ("drop", 2)])
def test_a_process_that_runs_out_of_data_joins_the_others(last_window, updates, two):
    assert [report[f"updates {last_window}"] for report in two] == [updates] * 2
    assert two[0][f"early {last_window}"] == two[1][f"early {last_window}"]
    rows = [[np.random.default_rng(rank).normal(size=(6 - 2 * rank, 6)).astype(np.float32)] for rank in (0, 1)]
    for rank, parts in enumerate(rows):
        generator = np.random.default_rng(rank)
        generator.normal(size=(6 - 2 * rank, 6))
        parts.append(generator.normal(size=(6 - 2 * rank, 3)).astype(np.float32))
    both = [np.concatenate([rows[0][i][:4], rows[1][i]]) for i in (0, 1)]
    network = build_network()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(network, nn.MSELoss()), nn.Momentum(network.trainable_params(), 0.1, 0.9)
    ).set_train()
    for _ in range(2):
        step(*map(Tensor, both))
        if last_window == "apply":
            step(*[Tensor(array[4:]) for array in rows[0]])
    np.testing.assert_allclose(two[0][f"early {last_window}"], weights_of(network), rtol=2e-5, atol=2e-6)
