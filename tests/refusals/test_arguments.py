"""Arguments: what is wrong alone or together is refused by name and value, with nothing taken or changed."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import hsdp, line, mse, sgd, toy, toy_step
from loop_toy import toy_loop
from mindspore import Tensor, amp, nn
from modelled_window import plan
from refusal import loss_cell, new_step, refuses, typed

from ms_gradaccum import (
    AccumulationConfig,
    Accumulator,
    ClipByGlobalNorm,
    GradAccumulation,
    MetricsLogger,
    MixedPrecision,
    Model,
    TokenMeanLoss,
    TrainOneStepCell,
)


def test_a_training_step_is_no_loss_cell():
    network = line()
    inside = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params()))
    for each in (inside, nn.SequentialCell(inside)):
        with refuses(ValueError, "'network'", "a training step"):
            GradAccumulation(each, 2)


# What test_any_value.py does not try: the call, the name of the argument, and the value as it is shown.
WRONG = {
    "a float as a milestone": (lambda: AccumulationConfig(schedule={1.0: 1}), "schedule", typed(1.0)),
    "a bool as a milestone": (lambda: AccumulationConfig(schedule={True: 1}), "schedule", typed(True)),
    "a negative milestone": (lambda: AccumulationConfig(schedule={-1: 1}), "schedule", "-1"),
    "no batches": (lambda: AccumulationConfig(schedule={0: 0}), "schedule[0]", "0"),
    "prepare a class": (lambda: toy_loop()[1].prepare(list), "objects", typed(list)),
    "no optimizer of one network": (lambda: Accumulator(loss_cell(), [[]]), "optimizer", "[]"),
    # As an int32 it would be 0, and the scale would grow after each window.
    "growth_interval": (lambda: MixedPrecision(growth_interval=2**32), "growth_interval", f"{2**32}"),
    # As an int32 it would be class 0.
    "ignore_index": (lambda: TokenMeanLoss(line(), 2**32), "ignore_index", f"{2**32}"),
    "ranks of a plan": (lambda: plan(ranks=10**9), "ranks", "1000000000"),
}


@pytest.mark.parametrize("call, name, got", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_by_its_name_and_value(call, name, got, eager):
    with refuses((TypeError, ValueError), f"'{name}'", f"but got {got}"):
        call()


@pytest.mark.parametrize("batch_axis, wrong", [((0, "1"), "1"), ([0, (None, False)], False), ({"x": 1.5}, 1.5)])
def test_batch_axis_is_made_of_ints_and_none(batch_axis, wrong):
    with refuses(TypeError, "'batch_axis'", typed(wrong)):
        GradAccumulation(loss_cell(), 2, batch_axis=batch_axis)


def test_arguments_of_mindspores_model_that_do_nothing_here_are_named():
    meant = ("mixed_precision='fp16' for keep_batchnorm_fp32", "amp_level for acc_level")
    with refuses(TypeError, "unexpected arguments", *meant):
        toy(keep_batchnorm_fp32=None, acc_level="O0")


def test_the_largest_limit_leaves_the_gradient_alone():
    (grad,) = ClipByGlobalNorm(3.4e38)((Tensor([3.0, 4.0]),), Tensor(5.0))
    np.testing.assert_array_equal(grad.asnumpy(), [3, 4])


@pytest.mark.parametrize(
    "settings, got", [({"dataset_size": 10**12}, 125 * 10**9), ({"epochs": 2**31 - 1}, 13 * (2**31 - 1))]
)
def test_a_plan_is_counted_in_the_memory_that_there_is(settings, got):
    many = plan(dataset_size=10**15, batch_size=10**9, epochs=1, ranks=10)
    assert many.batches == many.updates == 10**5
    with refuses(ValueError, "For 'TrainingPlan'", f"but got {got}."):
        plan(**settings)


def test_what_is_logged_is_a_float(tmp_path, eager):
    cell = loss_cell()
    output = TrainOneStepCell(cell, sgd(cell))(Tensor([[1.0]]), Tensor([[1.0]]))
    logger = MetricsLogger(tmp_path / "run.jsonl")
    with refuses(TypeError, "'large'", f"{10**400}"[:20]):
        logger.log(output, large=10**400)
    assert (tmp_path / "run.jsonl").read_text() == ""


def of_two(*optimizers, **settings):
    """Accumulator of two networks, with optimizers of the first or second."""
    cells = [loss_cell(), loss_cell()]
    return Accumulator(cells, [sgd(cells[index]) for index in optimizers], **settings)


def of_one(make):
    """What is made of one cell, its optimizer and another optimizer of it."""
    cell = loss_cell()
    return make(cell, sgd(cell), sgd(cell))


def a_step_and(**more):
    return Model(toy_step()[1], **more)


TOGETHER = {
    "a stranger's optimizer": (lambda: new_step(optimizer=sgd(nn.Dense(1, 1))), "'optimizer'", "got 2 other"),
    "one of a model": (lambda: Model(line(), nn.MSELoss(), sgd(line())), "'optimizer'", "got 1 other"),
    "one of a loop": (lambda: of_two(1, 1), "'optimizer'", "got 1 other"),
    "too few optimizers": (lambda: of_two(0), "'optimizer'", "1 for 2 networks"),
    "one optimizer twice": (
        lambda: of_one(lambda cell, optimizer, _: Accumulator([cell, mse(cell._backbone)], [optimizer] * 2)),
        "'optimizer'",
        "twice",
    ),
    "one parameter twice": (
        lambda: of_one(lambda cell, *both: Accumulator(cell, list(both))),
        "'optimizer'",
        "'weight' in two",
    ),
    "one network twice": (
        lambda: of_one(lambda cell, *both: Accumulator([cell, cell], list(both))),
        "'network'",
        "twice",
    ),
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
    network = hsdp(GradAccumulation(loss_cell(), 2))
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
