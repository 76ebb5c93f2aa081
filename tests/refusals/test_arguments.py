"""Arguments one by one: each wrong value is refused by the name of the argument and the value as it is shown."""

import copy

import numpy as np
import pytest
from linear_toy import line, sgd, toy, weight_of
from loop_toy import FOUR, toy_loop
from mindspore import Tensor, nn
from modelled_window import plan
from refusal import loss_cell, new_step, refuses, typed
from strategies import ALL_ROWS, endless

from ms_gradaccum import (
    AccumulationConfig,
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    GradAccumulation,
    MetricsLogger,
    MixedPrecision,
    Model,
    StepReporter,
    TokenMeanLoss,
    TrainOneStepCell,
    verify,
)
from ms_gradaccum.loops.schedule import merge_config

COUNTS = {
    "micro_size": lambda value: GradAccumulation(loss_cell(), value),
    "accumulation_steps": lambda value: new_step(accumulation_steps=value),
}
LIMITS = {"max_norm": ClipByGlobalNorm, "limit": ClipByValue}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_ints_and_a_bool_is_none(name):
    for value in (True, 2.0, "2", None, [2]):
        with refuses(TypeError, f"'{name}'", f"a positive int, but got {typed(value)}."):
            COUNTS[name](value)
    for value in (0, -1):
        with refuses(ValueError, f"'{name}'", f"a positive int, but got {value}."):
            COUNTS[name](value)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_positive_finite_numbers_and_a_bool_is_none(name):
    for value in (True, "1", None, [1.0]):
        with refuses(TypeError, f"'{name}'", f"a positive number, but got {typed(value)}."):
            LIMITS[name](value)
    for value in (0, 0.0, -1.5, float("nan"), float("inf")):
        with refuses(ValueError, f"'{name}'", f"a positive number, but got {value}."):
            LIMITS[name](value)


OF_STEP = {
    "network": (2,),
    "clip": (1.0, "norm", ClipByGlobalNorm),
    "parallel": (None, "data", True, np.array([1, 2])),
}


@pytest.mark.parametrize("name", OF_STEP)
def test_settings_of_a_step_are_of_their_kind(name):
    for value in OF_STEP[name]:
        with refuses(TypeError, f"'{name}'", f"but got {value!r}"):
            new_step(**{name: value})


def test_an_optimizer_is_one_of_mindspores():
    for optimizer, got in ((0.1, "float"), (nn.Dense(1, 1), "Dense"), (line().trainable_params(), "list")):
        with refuses(TypeError, "'optimizer'", f"but got {got}."):
            new_step(optimizer=optimizer)
    with refuses(TypeError, "For 'Accumulator'", "'optimizer'"):
        Accumulator(loss_cell(), 0.1)


def test_a_training_step_is_no_loss_cell():
    network = line()
    inside = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params()))
    for each in (inside, nn.SequentialCell(inside)):
        with refuses(ValueError, "'network'", "a training step"):
            GradAccumulation(each, 2)


def test_settings_are_given_by_name():
    for positional in (lambda: GradAccumulation(loss_cell(), 2, True), lambda: new_step(None, None, 2)):
        with pytest.raises(TypeError, match="positional arguments? but"):
            positional()


# batch_axis, and what is wrong with it.
WRONG_AXES = [(0.5, 0.5), (True, True), ("0", "0"), ((0, "1"), "1"), ([0, (None, False)], False), ({"x": 1.5}, 1.5)]


@pytest.mark.parametrize("batch_axis, wrong", WRONG_AXES, ids=repr)
def test_batch_axis_is_made_of_ints_and_none(batch_axis, wrong):
    with refuses(TypeError, "'batch_axis'", typed(wrong)):
        GradAccumulation(loss_cell(), 2, batch_axis=batch_axis)


# What is wrong with one value: the error, the call, the name of the argument, and the value as it is shown.
WRONG = {
    **{
        f"weighted {value}": (
            TypeError,
            lambda value=value: GradAccumulation(loss_cell(), 2, weighted=value),
            "weighted",
            typed(value),
        )
        for value in (1, None)
    },
    **{
        f"network of GradAccumulation {name}": (
            TypeError,
            lambda value=value: GradAccumulation(value, 2),
            "network",
            typed(value),
        )
        for name, value in {"text": "a network", "None": None, "class": nn.Dense}.items()
    },
    "an endless batch_axis": (
        ValueError,
        lambda: GradAccumulation(loss_cell(), 2, batch_axis=endless()),
        "batch_axis",
        "a list that contains itself",
    ),
    "accumulation_steps of a config": (ValueError, lambda: AccumulationConfig(0), "accumulation_steps", "0"),
    "a bool of a config": (TypeError, lambda: AccumulationConfig(True), "accumulation_steps", typed(True)),
    "a float of a config": (TypeError, lambda: AccumulationConfig(2.0), "accumulation_steps", typed(2.0)),
    "sync_with_dataloader": (TypeError, lambda: AccumulationConfig(2, 1), "sync_with_dataloader", typed(1)),
    "sync_each_batch": (TypeError, lambda: AccumulationConfig(2, True, None), "sync_each_batch", typed(None)),
    "schedule": (TypeError, lambda: AccumulationConfig(schedule=3), "schedule", typed(3)),
    "no milestones": (ValueError, lambda: AccumulationConfig(schedule={}), "schedule", "an empty dict"),
    "a float as a milestone": (TypeError, lambda: AccumulationConfig(schedule={1.0: 1}), "schedule", typed(1.0)),
    "a bool as a milestone": (TypeError, lambda: AccumulationConfig(schedule={True: 1}), "schedule", typed(True)),
    "a negative milestone": (ValueError, lambda: AccumulationConfig(schedule={-1: 1}), "schedule", "-1"),
    "no batches": (ValueError, lambda: AccumulationConfig(schedule={0: 0}), "schedule[0]", "0"),
    "no milestones of a loop": (ValueError, lambda: merge_config("x", {}, None), "accumulation_steps", "an empty dict"),
    "config": (TypeError, lambda: merge_config("Accumulator", 1, 4), "config", typed(4)),
    "accumulation_steps of a loop": (
        ValueError,
        lambda: merge_config("Accumulator", 0, None),
        "accumulation_steps",
        "0",
    ),
    "network of a loop": (TypeError, lambda: Accumulator(3, sgd(line())), "network", typed(3)),
    "no network": (ValueError, lambda: Accumulator([], sgd(line())), "network", "an empty list"),
    "no optimizer": (ValueError, lambda: Accumulator(loss_cell(), []), "optimizer", "an empty list"),
    "no optimizer of one network": (ValueError, lambda: Accumulator(loss_cell(), [[]]), "optimizer", "an empty list"),
    "clip of a loop": (TypeError, lambda: Accumulator(loss_cell(), sgd(line()), clip=1.0), "clip", "1.0"),
    "scale": (TypeError, lambda: toy_loop()[1].scale("x"), "loss", typed("x")),
    "prepare": (TypeError, lambda: toy_loop()[1].prepare(5), "objects", typed(5)),
    "prepare a class": (TypeError, lambda: toy_loop()[1].prepare(list), "objects", typed(list)),
    "step of an array": (
        ValueError,
        lambda: toy_loop()[1].step(network=np.array([1, 2])),
        "network",
        "ndarray",
    ),
    "zero_grad of an array": (
        ValueError,
        lambda: toy_loop()[1].zero_grad(network=np.array([1, 2])),
        "network",
        "ndarray",
    ),
    "amp_level": (ValueError, lambda: toy(amp_level="O4"), "amp_level", "'O4'"),
    "boost_level": (ValueError, lambda: toy(boost_level="O1"), "boost_level", "'O1'"),
    "last_window": (ValueError, lambda: toy(last_window="keep"), "last_window", "'keep'"),
    "a bool as last_window": (TypeError, lambda: toy(last_window=True), "last_window", typed(True)),
    "accumulation_steps of a model": (ValueError, lambda: toy(accumulation_steps=0), "accumulation_steps", "0"),
    "clip of a model": (TypeError, lambda: toy(clip=1.0), "clip", "1.0"),
    **{
        name: (
            TypeError,
            lambda name=name: Model(
                **{"network": line(), "loss_fn": nn.MSELoss(), "optimizer": sgd(line()), name: 5},
            ),
            name,
            typed(5),
        )
        for name in ("network", "loss_fn", "eval_network")
    },
    # As an int32 it would be 0, and the scale would grow after each window.
    "growth_interval": (
        ValueError,
        lambda: MixedPrecision(growth_interval=2**32),
        "growth_interval",
        f"{2**32}",
    ),
    "more steps than an int32": (
        ValueError,
        lambda: new_step(accumulation_steps=2**31),
        "accumulation_steps",
        f"{2**31}",
    ),
    # As an int32 it would be class 0.
    "ignore_index": (ValueError, lambda: TokenMeanLoss(line(), 2**32), "ignore_index", f"{2**32}"),
    "ranks of a plan": (ValueError, lambda: plan(ranks=10**9), "ranks", "1000000000"),
    "outputs of several networks": (TypeError, lambda: StepReporter().report((None, None)), "output", "tuple"),
}


@pytest.mark.parametrize("error, call, name, got", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_by_its_name_and_value(error, call, name, got, eager):
    with refuses(error, f"'{name}'", f"but got {got}"):
        call()


def test_what_is_like_a_wrong_argument_is_taken():
    assert AccumulationConfig(schedule={0: 1}).steps_for(-1, 0) == 1
    _, accumulator = toy_loop()
    assert list(copy.copy(accumulator.prepare(FOUR))) == FOUR


def test_arguments_of_mindspores_model_that_do_nothing_here_are_named():
    meant = ("mixed_precision='fp16' for keep_batchnorm_fp32", "amp_level for acc_level")
    with refuses(TypeError, "unexpected arguments", *meant):
        toy(keep_batchnorm_fp32=None, acc_level="O0")


def test_a_model_trains_on_a_dataset():
    network, model = toy()
    for call in (model.train, model.fit):
        with refuses(TypeError, "'train_dataset'", typed([1])):
            call(1, [1])
    assert weight_of(network) == 0


# Numbers that float32 cannot hold are refused, where they would have become Inf or 0.
FLOATS = {
    "max_norm": ClipByGlobalNorm,
    "limit": ClipByValue,
    "limits['*']": lambda value: ClipByGroupNorm({"*": value}),
    "init_scale": lambda value: MixedPrecision(init_scale=value),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_limit_that_is_infinite_or_zero_as_a_float32(name):
    for value in (1e39, 1e-39):
        with refuses(ValueError, f"'{name}'", f"the range of float32, 1.18e-38 to 3.4e+38, but got {value}."):
            FLOATS[name](value)
    # Python's own floats cannot hold it either.
    with refuses(ValueError, f"'{name}'", f"but got {10**400}."):
        FLOATS[name](10**400)
    FLOATS[name](3e38), FLOATS[name](10**38)


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


def test_a_path():
    for value in (3, b"run"):
        with refuses(TypeError, "'path'", typed(value)):
            MetricsLogger(value)
    for value in ("", "a\0b", "\ud800"):
        with refuses(ValueError, "'path'", f"but got {value!r}."):
            MetricsLogger(value)


def test_what_is_logged_is_a_float(tmp_path, eager):
    cell = loss_cell()
    output = TrainOneStepCell(cell, sgd(cell))(Tensor([[1.0]]), Tensor([[1.0]]))
    logger = MetricsLogger(tmp_path / "run.jsonl")
    with refuses(TypeError, "'large'", f"{10**400}"[:20]):
        logger.log(output, large=10**400)
    assert (tmp_path / "run.jsonl").read_text() == ""


def test_settings_of_verify(eager):
    cell = GradAccumulation(loss_cell(), 2, batch_axis=(0, 0))
    with refuses(TypeError, "For 'verify'", "'weighted'", typed(2)):
        verify(cell, ALL_ROWS, None, weighted=2)
    with refuses(ValueError, "For 'verify'", "'weighted'", "'no'"):
        verify(cell, ALL_ROWS, None, weighted="no")
    assert verify(cell, ALL_ROWS, None, batch_axis=[0, 0]).equal
