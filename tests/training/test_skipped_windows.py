"""A window that makes no update says so once, with the name of a parameter, whoever listens."""

import warnings

import numpy as np
import pytest
from mindspore import Tensor, nn
from step_probe import number

from ms_gradaccum import (
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    GradAccumulation,
    MixedPrecision,
    TrainOneStepCell,
)

pytestmark = pytest.mark.usefixtures("eager")

START = "the gradient of a window must have a finite norm, but got "
END = (
    ": this window makes no update, and later windows like it are skipped without a warning. Look for NaN in the data "
)
END += "and the loss, or lower the learning rate."


def build():
    return nn.SequentialCell(nn.Dense(2, 2, weight_init="ones", bias_init="zeros"), nn.Dense(2, 1, weight_init="ones"))


class Times(nn.Cell):
    """The mean of the outputs, times a factor of each row."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, factor):
        return (self.network(x) * factor).mean()


def step_of(network, **settings):
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    return TrainOneStepCell(GradAccumulation(Times(network), 2), optimizer, **settings)


def rows(factor):
    return Tensor(np.ones((4, 2), np.float32)), Tensor(np.full((4, 1), factor, np.float32))


def said(run):
    """Return the warnings of norms while windows of these factors are trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [text for each in caught if START in (text := str(each.message))]


def train(step, *factors):
    return said(lambda: [step(*rows(factor)) for factor in factors])


def test_a_nan_is_told_once_with_the_name_of_a_parameter():
    step = step_of(build())
    sentence = f"For 'TrainOneStepCell', {START}an Inf or a NaN for the parameter 'network.0.weight'{END}"
    assert train(step, 1.0, np.nan, np.nan, 1.0, np.inf) == [sentence]


@pytest.mark.parametrize("clip", [None, ClipByGlobalNorm(1.0), ClipByGroupNorm({"*": 1.0})])
def test_a_finite_gradient_whose_squares_are_not_is_told_of(clip):
    network = build()
    before = [each.asnumpy().copy() for each in network.trainable_params()]
    # The gradient is 1e20 for the first weights, 2e20 for the last ones.
    got = "up to 2e+20 for the parameter 'network.1.weight', whose squares are Inf in float32"
    assert train(step_of(network, clip=clip), 1e20) == [f"For 'TrainOneStepCell', {START}{got}{END}"]
    assert all((a == b.asnumpy()).all() for a, b in zip(before, network.trainable_params()))


def test_a_loop_tells_it_too():
    network = build()
    optimizers = [nn.SGD([each], 0.1) for each in network.trainable_params()]
    accumulator = Accumulator([Times(network)], [optimizers])

    def run():
        for _ in range(2):
            accumulator.backward(*rows(np.nan))
            accumulator.step()

    sentence = f"For 'Accumulator', {START}an Inf or a NaN for the parameter 'network.0.weight'{END}"
    assert said(run) == [sentence]


def test_a_loss_scale_that_looks_for_its_size_says_nothing_until_there_is_none():
    precision = MixedPrecision(level="O0", init_scale=4.0)
    step = step_of(build(), mixed_precision=precision)
    assert train(step, np.inf, np.inf) == []
    assert number(step.scale_sense) == 1.0
    assert len(train(step, np.inf, np.inf)) == 1


class NoWeight(Times):
    def construct(self, x, factor):
        return super().construct(x, factor), factor.sum()


def test_a_weight_that_is_no_number_is_told_as_such():
    network = build()
    step = TrainOneStepCell(
        GradAccumulation(NoWeight(network), 2, weighted=True), nn.SGD(network.trainable_params(), 0.1)
    )
    assert train(step, np.nan) == [f"For 'TrainOneStepCell', {START}the weight nan{END}"]


def test_a_window_of_which_everything_was_left_out_is_told_as_such():
    step = step_of(build(), bad_micro_batch="drop")
    assert train(step, np.nan) == [f"For 'TrainOneStepCell', {START}an Inf or a NaN in each micro batch{END}"]


def test_a_window_that_weighs_nothing_is_none_of_them():
    network = build()
    loss_cell = GradAccumulation(NoWeight(network), 2, weighted=True)
    assert train(TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1)), 0.0) == []


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_four_windows_in_a_row_that_weigh_nothing_are_told_of(weight):
    network = build()
    loss_cell = GradAccumulation(NoWeight(network), 2, weighted=True)
    step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in [weight] * 3 + [1.0] + [weight] * 3:
            step(*rows(factor))
        assert not [each for each in caught if "in a row" in str(each.message)]
        for _ in range(3):
            step(*rows(weight))
    (said,) = [str(each.message) for each in caught if "in a row" in str(each.message)]
    assert said.startswith(f"For 'TrainOneStepCell', the weight of a window must be positive, but got {weight * 4:g} ")
