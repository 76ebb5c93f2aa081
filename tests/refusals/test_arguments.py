"""Arguments one by one: what is wrong with one is said in a sentence, with the rule, the value and the way out."""

import copy

import numpy as np
import pytest
from linear_toy import line, sgd, toy, weight_of
from loop_toy import FOUR, toy_loop
from mindspore import Tensor, nn
from modelled_window import plan
from refusal import AXIS, loss_cell, new_step, raises, typed
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


def argument(owner, name):
    return f"For '{owner}', the argument '{name}' must be"


MICRO_SIZE = (
    f"{argument('GradAccumulation', 'micro_size')} a positive int, but got {{}}. "
    "It counts the micro batches of one batch; 1 means no split."
)
STEPS = "a positive int, but got {}. It counts the batches of one update; 1 means an update per batch."
NORM, LIMIT = "Typical norms are 0.5 to 5.", "Typical limits are 0.1 to 10."
COUNTS = {
    "micro_size": (lambda value: GradAccumulation(loss_cell(), value), MICRO_SIZE),
    "accumulation_steps": (
        lambda value: new_step(accumulation_steps=value),
        f"{argument('TrainOneStepCell', 'accumulation_steps')} {STEPS}",
    ),
}
LIMITS = {
    "max_norm": (ClipByGlobalNorm, argument("ClipByGlobalNorm", "max_norm"), NORM),
    "limit": (ClipByValue, argument("ClipByValue", "limit"), LIMIT),
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
    make, begin, remedy = LIMITS[name]
    sentence = f"{begin} a positive number, but got {{}}. {remedy}"
    for value in (True, "1", None, [1.0]):
        with raises(TypeError, sentence.format(typed(value))):
            make(value)
    for value in (0, 0.0, -1.5, float("nan"), float("inf")):
        with raises(ValueError, sentence.format(value)):
            make(value)


OPTIMIZER = "an optimizer of mindspore.nn, mindspore.mint or mindspore.experimental, but got {}. Build it from "
OPTIMIZER += "network.trainable_params()."
CLIP = "a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue, a cell or None, but got {!r}. For example "
CLIP += "clip=ClipByGlobalNorm(1.0)."
OF_STEP = {
    "network": ((2,), "must be an nn.Cell, but got {0!r} of type int. Give a GradAccumulation or a loss cell."),
    "clip": ((1.0, "norm", ClipByGlobalNorm), f"must be {CLIP}"),
    "parallel": (
        (None, "data", True, np.array([1, 2])),
        "must be 'auto', DataParallel(), HSDP() or Reduced(), but got {!r}. 'auto' looks at the number of processes.",
    ),
}


@pytest.mark.parametrize("name", OF_STEP)
def test_settings_of_a_step_are_of_their_kind(name):
    values, rule = OF_STEP[name]
    for value in values:
        with raises(TypeError, f"For 'TrainOneStepCell', the argument '{name}' {rule.format(value)}"):
            new_step(**{name: value})


def test_an_optimizer_is_one_of_mindspores():
    for optimizer, got in ((0.1, "float"), (nn.Dense(1, 1), "Dense"), (line().trainable_params(), "list")):
        with raises(TypeError, f"{argument('TrainOneStepCell', 'optimizer')} {OPTIMIZER.format(got)}"):
            new_step(optimizer=optimizer)
    with raises(TypeError, f"{argument('Accumulator', 'optimizer')} {OPTIMIZER.format('float')}"):
        Accumulator(loss_cell(), 0.1)


def test_a_training_step_is_no_loss_cell():
    network = line()
    inside = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params()))
    rest = "a loss cell, but got TrainOneStepCell, a training step. Give the loss cell inside it."
    for each in (inside, nn.SequentialCell(inside)):
        with raises(ValueError, f"{argument('GradAccumulation', 'network')} {rest}"):
            GradAccumulation(each, 2)


def test_settings_are_given_by_name():
    for positional in (lambda: GradAccumulation(loss_cell(), 2, True), lambda: new_step(None, None, 2)):
        with pytest.raises(TypeError, match="positional arguments? but"):
            positional()


AXES = f"{argument('GradAccumulation', 'batch_axis')} an int, None or one of these per input, but got {{}}. {AXIS}"
# batch_axis, and what is wrong with it.
WRONG_AXES = [(0.5, 0.5), (True, True), ("0", "0"), ((0, "1"), "1"), ([0, (None, False)], False), ({"x": 1.5}, 1.5)]


@pytest.mark.parametrize("batch_axis, wrong", WRONG_AXES, ids=repr)
def test_batch_axis_is_made_of_ints_and_none(batch_axis, wrong):
    with raises(TypeError, AXES.format(typed(wrong))):
        GradAccumulation(loss_cell(), 2, batch_axis=batch_axis)


# What is wrong with one value: the error, the call, whose argument it is, and the rest of the sentence.
EXAMPLE, SEVERAL = (
    "For example schedule={0: 1, 4: 2}.",
    "Several networks take a list with the optimizer (or optimizers) of each.",
)
SCHEDULE, KEYS = "a dict from epochs to numbers of batches, a BySamples or a function, but got", "a dict whose keys are"
LAST_WINDOW = (
    "one of 'apply', 'drop', 'carry', but got {}. "
    "'apply' makes one more update, 'drop' none, and 'carry' goes on with the next pass."
)
PREPARED = "a dataset, a learning rate scheduler or a Cell, but got {}. Give what the loop iterates over."
INT32 = "a positive int of at most 2147483647, but got"
WRONG = {
    **{
        f"weighted {value}": (
            TypeError,
            lambda value=value: GradAccumulation(loss_cell(), 2, weighted=value),
            ("GradAccumulation", "weighted"),
            f"a bool or 'mean', but got {typed(value)}. True is for a network that returns (loss_sum, weight), "
            "'mean' for (loss_mean, weight).",
        )
        for value in (1, None)
    },
    **{
        f"network of GradAccumulation {name}": (
            TypeError,
            lambda value=value: GradAccumulation(value, 2),
            ("GradAccumulation", "network"),
            f"an nn.Cell, but got {typed(value)}. Wrap the network and its loss, for example in nn.WithLossCell.",
        )
        for name, value in {"text": "a network", "None": None, "class": nn.Dense}.items()
    },
    "an endless batch_axis": (
        ValueError,
        lambda: GradAccumulation(loss_cell(), 2, batch_axis=endless()),
        ("GradAccumulation", "batch_axis"),
        f"an int, None or one of these per input, but got a list that contains itself. {AXIS}",
    ),
    "accumulation_steps of a config": (
        ValueError,
        lambda: AccumulationConfig(0),
        ("AccumulationConfig", "accumulation_steps"),
        STEPS.format(0),
    ),
    "a bool of a config": (
        TypeError,
        lambda: AccumulationConfig(True),
        ("AccumulationConfig", "accumulation_steps"),
        STEPS.format(typed(True)),
    ),
    "a float of a config": (
        TypeError,
        lambda: AccumulationConfig(2.0),
        ("AccumulationConfig", "accumulation_steps"),
        STEPS.format(typed(2.0)),
    ),
    "sync_with_dataloader": (
        TypeError,
        lambda: AccumulationConfig(2, 1),
        ("AccumulationConfig", "sync_with_dataloader"),
        f"a bool, but got {typed(1)}. False carries the last window over.",
    ),
    "sync_each_batch": (
        TypeError,
        lambda: AccumulationConfig(2, True, None),
        ("AccumulationConfig", "sync_each_batch"),
        f"a bool, but got {typed(None)}. The default is False.",
    ),
    "schedule": (
        TypeError,
        lambda: AccumulationConfig(schedule=3),
        ("AccumulationConfig", "schedule"),
        f"{SCHEDULE} {typed(3)}. {EXAMPLE}",
    ),
    "no milestones": (
        ValueError,
        lambda: AccumulationConfig(schedule={}),
        ("AccumulationConfig", "schedule"),
        f"{SCHEDULE} an empty dict. {EXAMPLE}",
    ),
    "a float as a milestone": (
        TypeError,
        lambda: AccumulationConfig(schedule={1.0: 1}),
        ("AccumulationConfig", "schedule"),
        f"{KEYS} ints, but got {typed(1.0)}. {EXAMPLE}",
    ),
    "a bool as a milestone": (
        TypeError,
        lambda: AccumulationConfig(schedule={True: 1}),
        ("AccumulationConfig", "schedule"),
        f"{KEYS} ints, but got {typed(True)}. {EXAMPLE}",
    ),
    "a negative milestone": (
        ValueError,
        lambda: AccumulationConfig(schedule={-1: 1}),
        ("AccumulationConfig", "schedule"),
        f"{KEYS} not negative, but got -1. {EXAMPLE}",
    ),
    "no batches": (
        ValueError,
        lambda: AccumulationConfig(schedule={0: 0}),
        ("AccumulationConfig", "schedule[0]"),
        "a positive int, but got 0. It counts the batches of one update.",
    ),
    "config": (
        TypeError,
        lambda: merge_config("Accumulator", 1, 4),
        ("Accumulator", "config"),
        f"an AccumulationConfig or None, but got {typed(4)}. Build one, or leave it out.",
    ),
    "accumulation_steps of a loop": (
        ValueError,
        lambda: merge_config("Accumulator", 0, None),
        ("Accumulator", "accumulation_steps"),
        STEPS.format(0),
    ),
    "network of a loop": (
        TypeError,
        lambda: Accumulator(3, sgd(line())),
        ("Accumulator", "network"),
        f"an nn.Cell, but got {typed(3)}. Give a GradAccumulation or a loss cell.",
    ),
    "no network": (
        ValueError,
        lambda: Accumulator([], sgd(line())),
        ("Accumulator", "network"),
        f"at least one, but got an empty list. {SEVERAL}",
    ),
    "no optimizer": (
        ValueError,
        lambda: Accumulator(loss_cell(), []),
        ("Accumulator", "optimizer"),
        f"at least one per network, but got an empty list. {SEVERAL}",
    ),
    "no optimizer of one network": (
        ValueError,
        lambda: Accumulator(loss_cell(), [[]]),
        ("Accumulator", "optimizer"),
        f"at least one per network, but got an empty list. {SEVERAL}",
    ),
    "clip of a loop": (
        TypeError,
        lambda: Accumulator(loss_cell(), sgd(line()), clip=1.0),
        ("Accumulator", "clip"),
        CLIP.format(1.0),
    ),
    "scale": (
        TypeError,
        lambda: toy_loop()[1].scale("x"),
        ("Accumulator", "loss"),
        f"a tensor, but got {typed('x')}. Give what is differentiated.",
    ),
    "prepare": (
        TypeError,
        lambda: toy_loop()[1].prepare(5),
        ("Accumulator", "objects"),
        PREPARED.format(typed(5)),
    ),
    "prepare a class": (
        TypeError,
        lambda: toy_loop()[1].prepare(list),
        ("Accumulator", "objects"),
        PREPARED.format(typed(list)),
    ),
    "step of an array": (
        ValueError,
        lambda: toy_loop()[1].step(network=np.array([1, 2])),
        ("Accumulator", "network"),
        "one of its networks, but got ndarray. Give a network that the Accumulator was built with.",
    ),
    "zero_grad of an array": (
        ValueError,
        lambda: toy_loop()[1].zero_grad(network=np.array([1, 2])),
        ("Accumulator", "network"),
        "one of its networks, but got ndarray. Give a network that the Accumulator was built with.",
    ),
    "amp_level": (
        ValueError,
        lambda: toy(amp_level="O4"),
        ("Model", "amp_level"),
        "one of 'O0', 'O1', 'O2', 'O3', 'auto', but got 'O4'. mixed_precision has more names and settings.",
    ),
    "boost_level": (
        ValueError,
        lambda: toy(boost_level="O1"),
        ("Model", "boost_level"),
        "one of 'O0', but got 'O1'. Boost has an accumulation of its own.",
    ),
    "last_window": (
        ValueError,
        lambda: toy(last_window="keep"),
        ("Model", "last_window"),
        LAST_WINDOW.format("'keep'"),
    ),
    "a bool as last_window": (
        TypeError,
        lambda: toy(last_window=True),
        ("Model", "last_window"),
        LAST_WINDOW.format(typed(True)),
    ),
    "accumulation_steps of a model": (
        ValueError,
        lambda: toy(accumulation_steps=0),
        ("Model", "accumulation_steps"),
        STEPS.format(0),
    ),
    "clip of a model": (TypeError, lambda: toy(clip=1.0), ("Model", "clip"), CLIP.format(1.0)),
    **{
        name: (
            TypeError,
            lambda name=name: Model(
                **{"network": line(), "loss_fn": nn.MSELoss(), "optimizer": sgd(line()), name: 5},
            ),
            ("Model", name),
            f"an nn.Cell, but got {typed(5)}. {remedy}",
        )
        for name, remedy in {
            "network": "Give a GradAccumulation, a loss cell, or a network and a loss_fn.",
            "loss_fn": "For example nn.MSELoss(); None if network has its loss inside.",
            "eval_network": "Leave it out to evaluate network and loss_fn.",
        }.items()
    },
    # As an int32 it would be 0, and the scale would grow after each window.
    "growth_interval": (
        ValueError,
        lambda: MixedPrecision(growth_interval=2**32),
        ("MixedPrecision", "growth_interval"),
        f"{INT32} {2**32}. It counts windows without overflow.",
    ),
    "more steps than an int32": (
        ValueError,
        lambda: new_step(accumulation_steps=2**31),
        ("TrainOneStepCell", "accumulation_steps"),
        f"{INT32} {2**31}. It counts the batches of one update; 1 means an update per batch.",
    ),
    # As an int32 it would be class 0.
    "ignore_index": (
        ValueError,
        lambda: TokenMeanLoss(line(), 2**32),
        ("TokenMeanLoss", "ignore_index"),
        f"an int from -2147483648 to 2147483647, but got {2**32}. It is the label of padding.",
    ),
    "ranks of a plan": (
        ValueError,
        lambda: plan(ranks=10**9),
        ("TrainingPlan", "ranks"),
        "a positive int of at most 1000000, but got 1000000000. It counts the processes; 1 is a single one.",
    ),
    "outputs of several networks": (
        TypeError,
        lambda: StepReporter().report((None, None)),
        ("StepReporter", "output"),
        "a StepOutput or None, but got tuple. With several networks, give the output of one of them.",
    ),
}


@pytest.mark.parametrize("error, call, about, rest", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_in_a_sentence(error, call, about, rest, eager):
    with raises(error, f"{argument(*about)} {rest}"):
        call()


def test_what_is_like_a_wrong_argument_is_taken():
    assert AccumulationConfig(schedule={0: 1}).steps_for(-1, 0) == 1
    _, accumulator = toy_loop()
    assert list(copy.copy(accumulator.prepare(FOUR))) == FOUR


def test_arguments_of_mindspores_model_that_do_nothing_here_are_named():
    rest = "'keep_batchnorm_fp32', 'acc_level'. Did you mean mixed_precision='fp16' for keep_batchnorm_fp32, amp_level "
    text = f"For 'Model', unexpected arguments {rest}for acc_level?"
    with raises(TypeError, text):
        toy(keep_batchnorm_fp32=None, acc_level="O0")


def test_a_model_trains_on_a_dataset():
    network, model = toy()
    sentence = f"{argument('Model', 'train_dataset')} a dataset of mindspore.dataset, but got {typed([1])}. "
    for call in (model.train, model.fit):
        with raises(TypeError, sentence + "An Accumulator loops over anything."):
            call(1, [1])
    assert weight_of(network) == 0


# Numbers that float32 cannot hold are refused, where they would have become Inf or 0.
RANGE = "a positive number in the range of float32, 1.18e-38 to 3.4e+38"
FLOATS = {
    "max_norm": (ClipByGlobalNorm, ("ClipByGlobalNorm", "max_norm"), NORM),
    "limit": (ClipByValue, ("ClipByValue", "limit"), LIMIT),
    "limits": (lambda value: ClipByGroupNorm({"*": value}), ("ClipByGroupNorm", "limits['*']"), "It is a norm."),
    "init_scale": (
        lambda value: MixedPrecision(init_scale=value),
        ("MixedPrecision", "init_scale"),
        "The default is 65536.",
    ),
}


@pytest.mark.parametrize("make, about, remedy", FLOATS.values(), ids=FLOATS)
def test_a_limit_that_is_infinite_or_zero_as_a_float32(make, about, remedy):
    for value in (1e39, 1e-39):
        with raises(ValueError, f"{argument(*about)} {RANGE}, but got {value}. {remedy}"):
            make(value)
    # Python's own floats cannot hold it either.
    with raises(ValueError, f"{argument(*about)} a positive number, but got {10**400}. {remedy}"):
        make(10**400)
    make(3e38), make(10**38)


def test_the_largest_limit_leaves_the_gradient_alone():
    (grad,) = ClipByGlobalNorm(3.4e38)((Tensor([3.0, 4.0]),), Tensor(5.0))
    np.testing.assert_array_equal(grad.asnumpy(), [3, 4])


@pytest.mark.parametrize(
    "settings, got", [({"dataset_size": 10**12}, 125 * 10**9), ({"epochs": 2**31 - 1}, 13 * (2**31 - 1))]
)
def test_a_plan_is_counted_in_the_memory_that_there_is(settings, got):
    many = plan(dataset_size=10**15, batch_size=10**9, epochs=1, ranks=10)
    assert many.batches == many.updates == 10**5
    sentence = f"For 'TrainingPlan', a training must have at most 100000000 batches on each rank, but got {got}. "
    with raises(ValueError, sentence + "Plan fewer epochs, or larger batches."):
        plan(**settings)


def test_a_path():
    remedy = "For example 'log_output/run.jsonl'."
    begin = argument("MetricsLogger", "path")
    for value in (3, b"run"):
        with raises(TypeError, f"{begin} a str or an os.PathLike, but got {typed(value)}. {remedy}"):
            MetricsLogger(value)
    for value in ("", "a\0b", "\ud800"):
        with raises(ValueError, f"{begin} a path that the system can have, but got {value!r}. {remedy}"):
            MetricsLogger(value)


def test_what_is_logged_is_a_float(tmp_path, eager):
    cell = loss_cell()
    output = TrainOneStepCell(cell, sgd(cell))(Tensor([[1.0]]), Tensor([[1.0]]))
    logger = MetricsLogger(tmp_path / "run.jsonl")
    sentence = f"{argument('MetricsLogger', 'large')} a number, but got {10**400} of type int. "
    with raises(TypeError, sentence + "Metrics of several values take a name for each."):
        logger.log(output, large=10**400)
    assert (tmp_path / "run.jsonl").read_text() == ""


def test_settings_of_verify(eager):
    remedy = "Settings of a GradAccumulation are its own: leave them out here."
    cell = GradAccumulation(loss_cell(), 2, batch_axis=(0, 0))
    rule = f"{argument('verify', 'weighted')} a bool or 'mean', but got"
    with raises(TypeError, f"{rule} {typed(2)}. {remedy}"):
        verify(cell, ALL_ROWS, None, weighted=2)
    with raises(ValueError, f"{rule} 'no'. {remedy}"):
        verify(cell, ALL_ROWS, None, weighted="no")
    assert verify(cell, ALL_ROWS, None, batch_axis=[0, 0]).equal
