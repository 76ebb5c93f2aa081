"""Settings that are right by themselves and wrong together: refused when built, with nothing taken or changed."""

import mindspore as ms
import pytest
from linear_toy import hsdp, line, sgd
from mindspore import amp, nn
from refusal import loss_cell, new_step, refuses

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


def a_step_and(**more):
    network = line()
    return Model(TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), sgd(network)), **more)


TOGETHER = {
    "a step and a stranger's optimizer": (
        lambda: new_step(optimizer=sgd(nn.Dense(1, 1))),
        "'optimizer'",
        "got 2 other",
    ),
    "a model and a stranger's optimizer": (
        lambda: Model(GradAccumulation(line(), 2), nn.MSELoss(), sgd(line())),
        "'optimizer'",
        "got 1 other",
    ),
    "a loop and a stranger's optimizer": (lambda: of_two(1, 1), "'optimizer'", "got 1 other"),
    "too few optimizers": (lambda: of_two(0), "'optimizer'", "1 for 2 networks"),
    "one optimizer twice": (with_the_same_optimizer_twice, "'optimizer'", "twice"),
    "one parameter twice": (with_a_parameter_in_two_optimizers, "'optimizer'", "'weight' in two"),
    "one network twice": (with_the_same_network_twice, "'network'", "twice"),
    "one scale for two": (
        lambda: of_two(0, 1, mixed_precision=amp.DynamicLossScaleManager()),
        "'mixed_precision'",
        "one DynamicLossScaleManager for 2",
    ),
    "a step and an optimizer": (lambda: a_step_and(optimizer=sgd(line())), "'network'", "a loss_fn or an optimizer"),
    "a step and a loss": (lambda: a_step_and(loss_fn=nn.MSELoss()), "'network'", "a loss_fn or an optimizer"),
    "a step and its settings": (lambda: a_step_and(accumulation_steps=2), "'network'", "its own settings"),
}


@pytest.mark.parametrize("build, name, key", TOGETHER.values(), ids=TOGETHER)
def test_settings_that_go_badly_together(build, name, key, eager):
    with refuses(ValueError, name, key):
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
    with refuses(ValueError, "'optimizer'", "got 1 other"):
        Model(network, optimizer=sgd(line()))
    assert context() == before
