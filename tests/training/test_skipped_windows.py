"""A window that makes no update says so once, with the name of a parameter; a graph of them ends the training."""

import mindspore as ms
import numpy as np
import pytest
from built_for import built_for
from linear_toy import X, sgd, toy_step
from loop_toy import own_loop
from mindspore import Tensor, nn
from refusal import refuses, told, warns
from step_probe import Around, Of, number, tensors

from ms_gradaccum import (
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    GradAccumulation,
    MixedPrecision,
    TrainOneStepCell,
)
from ms_gradaccum.training import window_end

START = "the gradient of a window must have a finite norm, but got "
END = (
    ": this window makes no update, and later windows like it are skipped without a warning. Look for NaN in the data "
)
END += "and the loss, or lower the learning rate."


def build():
    return nn.SequentialCell(nn.Dense(2, 2, weight_init="ones", bias_init="zeros"), nn.Dense(2, 1, weight_init="ones"))


def step_of(network, function=lambda out, factor: (out * factor).mean(), weighted=False, **settings):
    loss_cell = GradAccumulation(Of(network, function), 2, weighted=weighted)
    return TrainOneStepCell(loss_cell, sgd(network), **settings)


def weighted_step():
    return step_of(build(), lambda out, factor: ((out * factor).mean(), factor.sum()), weighted=True)


def rows(factor):
    return Tensor(np.ones((4, 2), np.float32)), Tensor(np.full((4, 1), factor, np.float32))


def train(step, *factors):
    with told(START) as said:
        for factor in factors:
            step(*rows(factor))
    return said


def test_a_nan_is_told_once_with_the_name_of_a_parameter(eager):
    step = step_of(build())
    sentence = f"For 'TrainOneStepCell', {START}an Inf or a NaN for the parameter 'network.0.weight'{END}"
    assert train(step, 1.0, np.nan, np.nan, 1.0, np.inf) == [sentence]


@pytest.mark.parametrize("clip", [None, ClipByGlobalNorm(1.0), ClipByGroupNorm({"*": 1.0})])
def test_a_finite_gradient_whose_squares_are_not_is_told_of(clip, eager):
    network = build()
    before = [each.asnumpy().copy() for each in network.trainable_params()]
    # The gradient is 1e20 for the first weights, 2e20 for the last ones.
    got = "up to 2e+20 for the parameter 'network.1.weight', whose squares are Inf in float32"
    assert train(step_of(network, clip=clip), 1e20) == [f"For 'TrainOneStepCell', {START}{got}{END}"]
    assert all((a == b.asnumpy()).all() for a, b in zip(before, network.trainable_params()))


def test_a_loop_tells_it_too(eager):
    network = build()
    optimizers = [nn.SGD([each], 0.1) for each in network.trainable_params()]
    accumulator = Accumulator([Of(network, lambda out, factor: (out * factor).mean())], [optimizers])
    with told(START) as said:
        for _ in range(2):
            accumulator.backward(*rows(np.nan))
            accumulator.step()
    assert said == [f"For 'Accumulator', {START}an Inf or a NaN for the parameter 'network.0.weight'{END}"]


def test_a_loss_scale_that_looks_for_its_size_says_nothing_until_there_is_none(eager):
    precision = MixedPrecision(level="O0", init_scale=4.0)
    step = step_of(build(), mixed_precision=precision)
    assert train(step, np.inf, np.inf) == []
    assert number(step.scale_sense) == 1.0
    assert len(train(step, np.inf, np.inf)) == 1


def test_a_weight_that_is_no_number_is_told_as_such_and_one_of_zero_is_none_of_them(eager):
    assert train(weighted_step(), np.nan) == [f"For 'TrainOneStepCell', {START}the weight nan{END}"]
    assert train(weighted_step(), 0.0) == []


def test_a_window_of_which_everything_was_left_out_is_told_as_such(eager):
    step = step_of(build(), bad_micro_batch="drop")
    assert train(step, np.nan) == [f"For 'TrainOneStepCell', {START}an Inf or a NaN in each micro batch{END}"]


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_four_windows_in_a_row_that_weigh_nothing_are_told_of(weight, eager):
    step = weighted_step()
    with told("in a row") as said:
        for factor in [weight] * 3 + [1.0] + [weight] * 3:
            step(*rows(factor))
    assert said == []
    with told("in a row") as said:
        for _ in range(3):
            step(*rows(weight))
    (text,) = said
    assert text.startswith(f"For 'TrainOneStepCell', the weight of a window must be positive, but got {weight * 4:g} ")


@pytest.mark.parametrize(
    "mode, accumulation_steps",
    [(ms.GRAPH_MODE, 1), (ms.PYNATIVE_MODE, 2)],
    ids=["GRAPH-1", "PYNATIVE-2"],
    indirect=["mode"],
)
def test_a_graph_without_updates_ends_the_training(accumulation_steps, mode, monkeypatch):
    monkeypatch.setattr(window_end, "MAX_OVERFLOWS", 3)
    network, step = toy_step(accumulation_steps=accumulation_steps, check_loss=False)
    graph = Around(step) if mode == ms.GRAPH_MODE else ms.jit(Around(step))
    right, broken = tensors(X, 2 * X), tensors(X, np.nan * X)

    def windows(*batches):
        for batch in batches:
            for _ in range(accumulation_steps):
                output = graph(*batch)
        return output

    windows(broken, broken, right, broken, broken, right)
    before = network.weight.asnumpy().copy()
    windows(broken, broken)
    with refuses(RuntimeError, "Inf or NaN"):
        str(windows(broken))
    assert (network.weight.asnumpy() == before).all() and before != 0
    # Another graph still runs.
    assert nn.Dense(1, 1)(right[0]).shape == (8, 1)


def test_a_device_whose_graphs_raise_no_error_says_so(mode):
    with built_for("GPU"):
        _, step = toy_step(check_loss=False)
        _, accumulator = own_loop(check_loss=False)
    graph = Around(step) if mode == ms.GRAPH_MODE else ms.jit(Around(step))
    with warns("For 'TrainOneStepCell'", "end the training"):
        graph(*tensors(X, 2 * X))

    @ms.jit
    def train(grad):
        return accumulator((grad,), 1.0)

    with warns("For 'Accumulator'", "end the training"):
        train(Tensor([[1.0]]))
