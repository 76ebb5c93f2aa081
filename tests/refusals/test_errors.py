"""Arguments that are refused: every error is one sentence with the rule, the value and the way out."""

import pytest
from linear_toy import line, sgd
from mindspore import nn
from refusal import AXIS, loss_cell, new_step, raises, typed

from ms_gradaccum import ClipByGlobalNorm, ClipByValue, GradAccumulation, TrainOneStepCell


@pytest.mark.parametrize("network", ["a network", None, nn.Dense], ids=repr)
def test_grad_accumulation_needs_a_cell(network):
    remedy = "Wrap the network and its loss, for example in nn.WithLossCell."
    with raises(
        TypeError,
        f"For 'GradAccumulation', the argument 'network' must be an nn.Cell, but got {typed(network)}. {remedy}",
    ):
        GradAccumulation(network, 2)


def test_grad_accumulation_inside_another_is_refused():
    inner = GradAccumulation(loss_cell(), 2)
    sentence = (
        "For 'GradAccumulation', the argument 'network' must be a network without GradAccumulation, but got one "
        "inside. Use one, with the product of the two micro_size."
    )
    for network in (inner, nn.WithLossCell(inner, nn.MSELoss())):
        with raises(ValueError, sentence):
            GradAccumulation(network, 2)


COUNTS = {
    "micro_size": (
        lambda value: GradAccumulation(loss_cell(), value),
        "For 'GradAccumulation', the argument 'micro_size' must be a positive int, but got {}. "
        "It counts the micro batches of one batch; 1 means no split.",
    ),
    "accumulation_steps": (
        lambda value: new_step(accumulation_steps=value),
        "For 'TrainOneStepCell', the argument 'accumulation_steps' must be a positive int, but got {}. "
        "It counts the batches of one update; 1 means an update per batch.",
    ),
}
LIMITS = {
    "max_norm": (
        ClipByGlobalNorm,
        "For 'ClipByGlobalNorm', the argument 'max_norm' must be a positive number, but got {}. "
        "Typical norms are 0.5 to 5.",
    ),
    "limit": (
        ClipByValue,
        "For 'ClipByValue', the argument 'limit' must be a positive number, but got {}. Typical limits are 0.1 to 10.",
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_ints_and_a_bool_is_none(name):
    make, sentence = COUNTS[name]
    for value in (True, 2.0, "2", None, [2]):
        with raises(TypeError, sentence.format(typed(value))):
            make(value)
    for value in (0, -1):
        with raises(ValueError, sentence.format(value)):
            make(value)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_positive_finite_numbers_and_a_bool_is_none(name):
    make, sentence = LIMITS[name]
    for value in (True, "1", None, [1.0]):
        with raises(TypeError, sentence.format(typed(value))):
            make(value)
    for value in (0, 0.0, -1.5, float("nan"), float("inf")):
        with raises(ValueError, sentence.format(value)):
            make(value)


@pytest.mark.parametrize("weighted", [1, None, "yes"])
def test_weighted_is_a_bool(weighted):
    with raises(
        TypeError,
        f"For 'GradAccumulation', the argument 'weighted' must be a bool, but got {typed(weighted)}. "
        "True means that network returns (loss_sum, weight).",
    ):
        GradAccumulation(loss_cell(), 2, weighted=weighted)


@pytest.mark.parametrize(
    ("batch_axis", "wrong"),
    [(0.5, 0.5), (True, True), ("0", "0"), ((0, "1"), "1"), ([0, (None, False)], False), ({"x": 1.5}, 1.5)],
    ids=repr,
)
def test_batch_axis_is_made_of_ints_and_none(batch_axis, wrong):
    with raises(
        TypeError,
        "For 'GradAccumulation', the argument 'batch_axis' must be an int, None or one of these per input, "
        f"but got {typed(wrong)}. {AXIS}",
    ):
        GradAccumulation(loss_cell(), 2, batch_axis=batch_axis)


def test_settings_are_given_by_name():
    for positional in (lambda: GradAccumulation(loss_cell(), 2, True), lambda: new_step(None, None, 2)):
        with pytest.raises(TypeError, match="positional arguments? but"):
            positional()


def test_the_train_cell_needs_a_cell_and_an_optimizer():
    remedy = "Give a GradAccumulation or a loss cell."
    with raises(
        TypeError, f"For 'TrainOneStepCell', the argument 'network' must be an nn.Cell, but got 2 of type int. {remedy}"
    ):
        new_step(2)
    for optimizer, got in ((0.1, "float"), (nn.Dense(1, 1), "Dense"), (line().trainable_params(), "list")):
        with raises(
            TypeError,
            "For 'TrainOneStepCell', the argument 'optimizer' must be an optimizer of mindspore.nn, mindspore.mint or "
            f"mindspore.experimental, but got {got}. Build it from network.trainable_params().",
        ):
            new_step(optimizer=optimizer)


def test_the_optimizer_must_be_of_the_network():
    with raises(
        ValueError,
        "For 'TrainOneStepCell', the argument 'optimizer' must be one over parameters of the network, but got "
        "2 parameters that it does not have, first 'weight'. Build it from network.trainable_params().",
    ):
        new_step(optimizer=sgd(nn.Dense(1, 1)))


def test_an_optimizer_serves_one_train_cell_at_a_time():
    network = loss_cell()
    optimizer = sgd(network)
    # What was refused has not taken the optimizer.
    for wrong in ({"accumulation_steps": 0}, {"clip": 1.0}):
        with pytest.raises((TypeError, ValueError)):
            TrainOneStepCell(network, optimizer, **wrong)
    step = TrainOneStepCell(network, optimizer)
    with raises(
        ValueError,
        "For 'TrainOneStepCell', the argument 'optimizer' must be one that nothing else trains with, but got the "
        "optimizer of another TrainOneStepCell. Two training cells would divide its windows between them: use the "
        "first one, or delete it.",
    ):
        TrainOneStepCell(network, optimizer)
    del step
    assert TrainOneStepCell(network, optimizer).optimizer is optimizer


@pytest.mark.parametrize("clip", [1.0, "norm", ClipByGlobalNorm], ids=repr)
def test_clip_is_one_of_the_two(clip):
    with raises(
        TypeError,
        "For 'TrainOneStepCell', the argument 'clip' must be a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue "
        f"or None, but got {clip!r}. For example clip=ClipByGlobalNorm(1.0).",
    ):
        new_step(clip=clip)


@pytest.mark.parametrize("parallel", [None, "data", True])
def test_parallel_is_auto_or_one_of_the_two(parallel):
    with raises(
        TypeError,
        "For 'TrainOneStepCell', the argument 'parallel' must be 'auto', DataParallel() or HSDP(), but got "
        f"{parallel!r}. 'auto' looks at the number of processes.",
    ):
        new_step(parallel=parallel)
