"""Settings that are right by themselves and wrong together: refused when built, with nothing taken or changed."""

import mindspore as ms
import pytest
from linear_toy import hsdp, line, sgd
from mindspore import amp, nn
from refusal import loss_cell, new_step, raises

from ms_gradaccum import Accumulator, GradAccumulation, Model, TrainOneStepCell


def of_two(*optimizers, **settings):
    """Accumulator of two networks, with optimizers of the first or second."""
    cells = [loss_cell(), loss_cell()]
    return Accumulator(cells, [sgd(cells[index]) for index in optimizers], **settings)


def with_the_same_optimizer_twice():
    network = line()
    optimizer = sgd(network)
    return Accumulator([nn.WithLossCell(network, nn.MSELoss()), nn.WithLossCell(network, nn.L1Loss())], [optimizer] * 2)


def with_a_parameter_in_two_optimizers():
    cell = loss_cell()
    return Accumulator(cell, [sgd(cell), sgd(cell)])


def with_the_same_network_twice():
    cell = loss_cell()
    return Accumulator([cell, cell], [sgd(cell), sgd(cell)])


def inside_another():
    inner = GradAccumulation(loss_cell(), 2)
    return GradAccumulation(inner, 2)


def deep_inside_another():
    inner = GradAccumulation(loss_cell(), 2)
    return GradAccumulation(nn.WithLossCell(inner, nn.MSELoss()), 2)


def a_step_and(**more):
    network = line()
    return Model(TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), sgd(network)), **more)


STRANGER = (
    "For '{}', the argument 'optimizer' must be one over parameters of the network, but got {} parameters that it does "
    "not have, first 'weight'. Build it from network.trainable_params()."
)
INSIDE = (
    "For 'GradAccumulation', the argument 'network' must be a network without GradAccumulation, but got one inside. "
    "Use one, with the product of the two micro_size."
)
STEP_AND = (
    "For 'Model', the argument 'network' must be a loss cell, but got a TrainOneStepCell together with a loss_fn or an "
    "optimizer. Give Model(train_step), or the cell inside it with the optimizer."
)
TOGETHER = {
    "one inside another": (inside_another, INSIDE),
    "one deep inside another": (deep_inside_another, INSIDE),
    "a step and a stranger's optimizer": (
        lambda: new_step(optimizer=sgd(nn.Dense(1, 1))),
        STRANGER.format("TrainOneStepCell", 2),
    ),
    "a model and a stranger's optimizer": (
        lambda: Model(GradAccumulation(line(), 2), nn.MSELoss(), sgd(line())),
        STRANGER.format("Model", 1),
    ),
    "a loop and a stranger's optimizer": (lambda: of_two(1, 1), STRANGER.format("Accumulator", 1)),
    "too few optimizers": (
        lambda: of_two(0),
        "For 'Accumulator', the argument 'optimizer' must be one per network, but got 1 for 2 networks. Several "
        "networks take a list with the optimizer (or optimizers) of each.",
    ),
    "one optimizer twice": (
        with_the_same_optimizer_twice,
        "For 'Accumulator', the argument 'optimizer' must be different optimizers, but got one of them twice. Put "
        "losses that train the same weights into one cell.",
    ),
    "one parameter twice": (
        with_a_parameter_in_two_optimizers,
        "For 'Accumulator', the argument 'optimizer' must be optimizers of different parameters, but got 'weight' in "
        "two of them. Give each parameter to one optimizer.",
    ),
    "one network twice": (
        with_the_same_network_twice,
        "For 'Accumulator', the argument 'network' must be different networks, but got one of them twice. Nobody could "
        "tell its batches apart: put its losses into one cell.",
    ),
    "one scale for two": (
        lambda: of_two(0, 1, mixed_precision=amp.DynamicLossScaleManager()),
        "For 'Accumulator', the argument 'mixed_precision' must be a rule for the scale of each network, but got one "
        "DynamicLossScaleManager for 2. Give a name or a MixedPrecision without one.",
    ),
    "a step and an optimizer": (lambda: a_step_and(optimizer=sgd(line())), STEP_AND),
    "a step and a loss": (lambda: a_step_and(loss_fn=nn.MSELoss()), STEP_AND),
    "a step and its settings": (
        lambda: a_step_and(accumulation_steps=2),
        "For 'Model', the argument 'network' must be a loss cell, but got a TrainOneStepCell with its own settings. "
        "Give accumulation_steps, clip and the like to the TrainOneStepCell.",
    ),
}


@pytest.mark.parametrize("build, sentence", TOGETHER.values(), ids=TOGETHER)
def test_settings_that_go_badly_together(build, sentence, eager):
    with raises(ValueError, sentence):
        build()


def test_a_refused_model_leaves_the_parallel_context_as_it_was():
    names = ("parallel_mode", "enable_parallel_optimizer", "dataset_strategy", "gradients_mean")

    def context():
        return {name: ms.get_auto_parallel_context(name) for name in names}

    before = context()
    network = hsdp(GradAccumulation(nn.WithLossCell(line(), nn.MSELoss()), 2))
    try:
        # Stock Model sets it first and does not come to setting it back.
        with pytest.raises(TypeError):
            ms.Model(network, optimizer="none")
        assert context() != before
    finally:
        ms.reset_auto_parallel_context()
    assert context() == before
    with raises(ValueError, STRANGER.format("Model", 1)):
        Model(network, optimizer=sgd(line()))
    assert context() == before
