"""Networks whose hooks reduce their gradients, on two and four processes, against one process on all rows.

The stand-in has the protocol of HyperParallel's hsdp, which `clients/hyper_parallel_ranks.py` runs itself.
"""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from reducing_network import RESUMED, TRAININGS, WRONG, build_layers
from scenarios import OPTIMIZERS, batch

PART, SIZES = "reduced_worker", (2, 4)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

SENTENCES = {
    "parallel": "the argument 'parallel' must be 'auto' for a network that reduces its gradients itself",
    "mean": "must be 'auto' for a network of hsdp(), but got Reduced(mean=True",
    "late": "hsdp() must come before the optimizer and the training step, but got it afterwards.",
    "late, gradients": "hsdp() must come before the optimizer and the training step, but got it afterwards.",
    "late, whole": "hsdp() must come before the optimizer and the training step, but got it afterwards.",
    "late, whole, gradients": "hsdp() must come before the optimizer and the training step, but got it afterwards.",
    "joined": "must have equally many micro batches on all ranks",
    "outside": "but got '1.weight' without a hook for it. Give the whole network to hsdp().",
    "state": "must be built from the network's shards, but got the state 'moment1.0.weight' of shape (8, 6). Build it",
    "weight": "the argument 'weight' must be the same for all batches of a window",
    "outside accumulate": "must know it beforehand, but got gradients that were taken outside accumulate().",
    "save": "must be saved right after an update, but got an open window",
    "flush": "must know it beforehand, but got the end of one in its middle.",
    "drop": "the argument 'bad_micro_batch' must be 'skip_window' for a network that reduces",
    "precision": "the argument 'mixed_precision' must be None or a loss scale for a network that reduces",
    "compile": "the argument 'compile' must be None for a network that reduces",
    "fully_shard": "must come from hsdp(), but got a Mock",
    "graph": "but got a graph, which calls no hooks.",
    "operators": "must accumulate its gradients with operators of this device, but got The kernel",
    "micro batches": "must have equally many micro batches on all ranks",
    "not reduced": "the ranks must have the same weights after an update, but ranks [1",
}


def mean_of_rows(network, x, y):
    return ((network(x) - y) ** 2).mean(), len(x)


def mean_of_tokens(network, x, y):
    weights = ops.where(y[:, 0] < 0, 3.0, 1.0)
    return (weights * ((network(x) - y) ** 2).mean(1)).sum() / weights.sum(), float(weights.sum().asnumpy())


@functools.cache
def whole(steps, loss=mean_of_rows, limit=np.inf, windows=2):
    """MindSpore's optimizer on the gradient of all rows of each window: weights, last loss, norm and weight."""
    network = build_layers()
    optimizer = OPTIMIZERS["Adam"](network.trainable_params())
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for window in range(windows):
        batches = [batch(number) for number in range(window * steps, (window + 1) * steps)]
        x, y = [Tensor(np.concatenate(arrays)) for arrays in zip(*batches)]
        value, grads = ms.value_and_grad(lambda *rows: loss(network, *rows)[0], None, network.trainable_params())(x, y)
        norm = np.sqrt(sum((grad.asnumpy() ** 2).sum() for grad in grads))
        optimizer(tuple(grad * float(min(1.0, limit / norm)) for grad in grads))
    weights = np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()])
    return weights, float(value.asnumpy()), float(norm), loss(network, x, y)[1]


def check(reports, key, expected):
    for report in reports:
        weights, loss, norm, weight = report[key]
        np.testing.assert_allclose(weights, expected[0], **CLOSE)
        np.testing.assert_allclose([loss, norm, weight], expected[1:], rtol=2e-5)
    assert all(report[key] == reports[0][key] for report in reports)


NAMES = {2: "two", 4: "four"}


@pytest.fixture(params=NAMES.values())
def ranks(request):
    return request.getfixturevalue(request.param)


def each_of(cases):
    """Parametrize a test with the processes and what runs on so many."""
    return pytest.mark.parametrize(
        "ranks,case", [(NAMES[size], case) for size in SIZES for case in cases[size]], indirect=["ranks"]
    )


@pytest.mark.parametrize("accumulates", [False, True])
@each_of(TRAININGS)
def test_gradients_that_come_reduced_train_like_one_process(case, accumulates, ranks):
    level, steps = case
    expected = whole(steps, limit=0.5)
    assert expected[2] > 0.5  # It clips.
    check(ranks, f"level{level} {accumulates} {steps}", expected)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_token_counts_the_same_on_whichever_rank_it_is(accumulates, ranks):
    expected = whole(2, mean_of_tokens)
    check(ranks, f"tokens {accumulates}", expected)
    assert not np.allclose(expected[0], whole(2)[0], **CLOSE)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_of_the_callers_own_are_not_added_up_again(reduction, accumulates, ranks):
    weights, loss, norm, rows = whole(2)
    # A sum over all numbers has the numbers for its weight.
    check(ranks, f"{reduction} {accumulates}", (weights, loss, norm, rows * (3 if reduction == "sum" else 1)))


@pytest.mark.parametrize("name", ["mean", "scale"])
def test_a_mean_over_ranks_and_a_scale_of_the_network_are_undone(name, ranks):
    check(ranks, name, whole(2))


@pytest.mark.parametrize("accumulates", [False, True])
@each_of(WRONG)
def test_reduced_once_more_they_would_be_wrong(case, accumulates, ranks):
    found = ranks[0][f"wrong level{case} {accumulates}"]
    if not isinstance(found, str):  # Some end with an error about shapes.
        assert not np.allclose(found[0], whole(2)[0], rtol=1e-3, atol=1e-4)


@each_of(TRAININGS)
def test_a_network_that_can_wait_sends_its_gradients_once_per_window(case, ranks):
    (level, steps), size = case, len(ranks)
    for report in ranks:
        each, once = [report[f"level{level} {accumulates} {steps} sent"] for accumulates in (False, True)]
        parameters, shards = 6, 0 if level == 0 else 4
        passes = 2 * steps
        # In two windows; level3 gathers for the backward pass, too.
        assert each == [shards * passes * (2 if level == 3 else 1), parameters * passes]
        whole_gathers = shards * (passes * 2 if level == 3 else 2)
        fully = level > 1 and size == 2
        assert once == [whole_gathers, (shards * passes if fully else shards * 2) + (parameters - shards) * 2]


def test_the_ranks_send_scalars_alone(ranks):
    sizes, counts, planned = ranks[0]["messages"]
    # Loss and weight, the squares of six gradients; and before each batch the number of its micro batches.
    assert sizes == [2, 6] and counts == [1, 1, 1]
    assert planned == [["AllGather", 16]] * 3 + [["AllReduce", 8], ["AllReduce", 24]]


@each_of(RESUMED)
def test_each_rank_goes_on_with_its_shards(case, ranks):
    for report in ranks:
        straight, resumed = report["resumed level{} {}".format(*case)]
        assert straight == resumed
    np.testing.assert_allclose(straight, whole(2)[0], **CLOSE)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_averages_are_those_of_the_shards_although_an_evaluation_makes_whole_parameters(level, ranks):
    for report in ranks:
        averages, expected = report[f"averages level{level}"]
        np.testing.assert_allclose(averages, expected, **CLOSE)
    assert not np.allclose(averages, whole(1)[0], atol=1e-4)


def test_ranks_without_rows_are_told_together(ranks):
    first, *others = [report["errors"]["no rows"] for report in ranks]
    assert "a batch must have at least one row, but got 0 in input[1]. Skip it or, if other processes" in first
    assert all("must have equally many micro batches on all ranks" in each and "got [0, 1" in each for each in others)


def test_the_shards_of_two_ranks_are_not_those_of_four(four):
    assert all("has the network's shards of 2 processes, not 4. Use as many" in report["elastic"] for report in four)


def test_what_cannot_be_right_is_refused(ranks):
    for report in ranks:
        errors = report["errors"]
        for key, sentence in SENTENCES.items():
            assert errors[key] is not None and sentence in errors[key], (key, errors[key])
