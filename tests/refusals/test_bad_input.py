"""Every public constructor with values of any kind: a usable object, or one of our sentences."""

import math

import mindspore as ms
import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from linear_toy import line, sgd
from mindspore import Tensor, amp, nn
from strategies import ODD, Call, arguments, attempt, examples, loss_cell, refusal

from ms_gradaccum import (
    HSDP,
    AccumulationConfig,
    AccumulationSchedule,
    Accumulator,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    DataParallel,
    GradAccumulation,
    MixedPrecision,
    ProgressBar,
    StepReporter,
    TokenMeanLoss,
    TrainingPlan,
    TrainOneStepCell,
)
from ms_gradaccum.gradients.mixed_precision import check_precision

LIMITS = st.floats(1e-30, 1e30) | st.integers(1, 10**30)
COUNTS = st.integers(1, 2**31 - 1)
BOOLS = st.booleans()
CELLS = st.builds(loss_cell)
CLIPS = st.sampled_from([None, ClipByValue(1.0), ClipByGlobalNorm(2)])
KINDS = st.sampled_from(["auto", DataParallel(), HSDP()])
WINDOWS = st.sampled_from(["apply", "drop", "carry"])
SCALERS = st.sampled_from([None, MixedPrecision(level="O0"), amp.StaticLossScaler(8.0)])
FATES = st.sampled_from(["skip_window", "drop"])
MILESTONES = st.dictionaries(st.integers(0, 10**12), COUNTS, min_size=1)


def clips(make, limit):
    """How a clip is called; the clipped gradient is finite and within the limit."""

    def use(clip):
        (grad,) = clip((Tensor([3.0, -4.0]),), Tensor(5.0))
        assert np.isfinite(grad.asnumpy()).all() and (abs(grad.asnumpy()) <= [3, 4]).all()

    return Call(make, {limit: LIMITS}, (limit,), use)


def scale_stays_a_number(precision):
    if precision.dtype == ms.bfloat16:
        return  # Not on every device, and without a scale.
    scale = check_precision("MixedPrecision", precision).loss_scale
    for bad in (False, True):
        scale(Tensor(not bad), Tensor(bad))
        assert math.isfinite(scale.value().asnumpy()) and scale.unscaled(Tensor(1.0)).asnumpy() > 0


def schedule_gives_counts(schedule):
    assert all(schedule.steps_at(count) >= 1 for count in (0, 1, 0.5, 10**9))


def config_gives_counts(config):
    # What a function returns is seen only when it is called; what it raises is its author's to see.
    if not isinstance(config.schedule, nn.Cell):
        refusal(config.steps_for, epoch=0, updates=0, tokens=0.0)
    config.as_text()


def plan_counts(plan):
    assert 0 <= len(plan.update_rows) == plan.updates <= plan.batches
    refusal(str, plan)  # A function's rates are seen only when it is called.


def step_is_new(step):
    assert (step.open_batches(), step.drop(), step.flush()) == (0, 0, None)


def accumulator_is_new(accumulator):
    assert (accumulator.sync_gradients, accumulator.drop(), accumulator.flush()) == (False, 0, None)


def its_optimizer(network):
    return sgd(network if isinstance(network, nn.Cell) and network.trainable_params() else line())


def built(kind):
    """How what trains is built."""

    def make(network, optimizer=None, **values):
        return kind(network, its_optimizer(network) if optimizer is None else optimizer, **values)

    make.__name__ = kind.__name__
    return make


def weights_of(network):
    return [p.asnumpy().copy() for p in network.get_parameters()] if isinstance(network, nn.Cell) else []


TRAINING = {"clip": CLIPS, "mixed_precision": SCALERS, "parallel": KINDS, "bad_micro_batch": FATES}
AXES = st.sampled_from([0, 1, None, -1, (0, None), [0, 0], {"x": 0}, ((0, None), 0)])
PLAN = {
    "dataset_size": st.integers(1, 1000),
    "batch_size": st.integers(1, 50),
    "epochs": st.integers(1, 5),
    "ranks": st.integers(1, 9),
    "drop_remainder": st.just(False),
    "micro_size": COUNTS,
    "accumulation_steps": COUNTS,
    "last_window": WINDOWS,
    "clip": CLIPS,
    "parallel": KINDS,
    "tokens_per_row": LIMITS,
    "learning_rate": st.just(0.1) | st.just(lambda update: 0.1),
    "parameters": st.builds(lambda: line().trainable_params()),
    "device_target": st.sampled_from([None, "CPU", "GPU"]),
}
CALLS = [
    Call(
        GradAccumulation,
        {"network": CELLS, "micro_size": COUNTS, "weighted": BOOLS, "batch_axis": AXES, "terms": st.just(1)},
        ("network", "micro_size"),
    ),
    Call(TokenMeanLoss, {"backbone": st.builds(line), "ignore_index": st.integers(-(2**31), 2**31 - 1)}, ("backbone",)),
    clips(ClipByGlobalNorm, "max_norm"),
    clips(ClipByValue, "limit"),
    Call(ClipByGroupNorm, {"limits": st.dictionaries(st.text(min_size=1), LIMITS, min_size=1)}, ("limits",)),
    # Of overlap and sync_each_batch one alone may be True, which test_parallel_settings.py shows.
    Call(DataParallel, {"sync_each_batch": BOOLS, "check_weights": BOOLS}),
    Call(DataParallel, {"overlap": BOOLS, "check_weights": BOOLS}),
    Call(
        HSDP,
        {
            "shard_size": st.just(-1) | COUNTS,
            "threshold": st.integers(0),
            "optimizer_level": st.sampled_from(["level1", "level2", "level3"]),
            "check_weights": BOOLS,
        },
    ),
    Call(
        MixedPrecision,
        {
            "dtype": st.sampled_from([ms.float16, "fp16"]),
            "level": st.sampled_from(["O0", "O1", "O2", "O3", "auto"]),
            "init_scale": st.floats(1, 1e30),
            "growth_factor": st.floats(1, 100),
            "backoff_factor": st.floats(1e-30, 1, exclude_max=True),
            "growth_interval": COUNTS,
            "loss_scale": st.just(None),
            "reduce_dtype": st.sampled_from([ms.float32, "float16", ms.bfloat16]),
        },
        use=scale_stays_a_number,
    ),
    Call(
        AccumulationSchedule,
        {"milestones": MILESTONES, "unit": st.sampled_from(["epoch", "update", "token"])},
        ("milestones",),
        schedule_gives_counts,
    ),
    Call(
        AccumulationConfig,
        {
            "accumulation_steps": st.just(1),
            "sync_with_dataloader": BOOLS,
            "sync_each_batch": BOOLS,
            "schedule": st.none() | MILESTONES | st.just(lambda updates: 2),
        },
        use=config_gives_counts,
    ),
    Call(TrainingPlan, PLAN, ("dataset_size", "batch_size", "epochs"), plan_counts),
    Call(
        ProgressBar,
        {"live": st.sampled_from([None, True, False]), "seconds_per_line": LIMITS, "total": st.none() | COUNTS},
    ),
    Call(
        StepReporter,
        {"train_step": st.none(), "every": COUNTS, "peak_memory": BOOLS, "network": st.none()},
        takes_anything=["network"],
    ),
    Call(
        built(TrainOneStepCell),
        {"network": CELLS, "optimizer": st.none(), "accumulation_steps": COUNTS, **TRAINING},
        ("network",),
        step_is_new,
    ),
    Call(
        built(Accumulator),
        {
            "network": CELLS,
            "optimizer": st.none(),
            "accumulation_steps": COUNTS,
            "config": st.none() | st.builds(AccumulationConfig),
            **TRAINING,
        },
        ("network",),
        accumulator_is_new,
    ),
]


def check(call, values, may_be_bad):
    """Call, use what was made, and return whether it was refused."""
    made, said = attempt(call.make, **values)
    assert may_be_bad or said is None, f"good values were refused: {said}"
    if made is not None:
        call.use(made)
    return said is not None


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_one_odd_argument(call):
    good = {name: find(call.good[name], lambda _: True) for name in call.needed}
    refused = dict.fromkeys(call.good, 0)
    for name in call.good:
        for make in ODD:
            refused[name] += check(call, {**good, name: make()}, True)
    # No argument takes most of them; but that of a reporter that looks at nothing is not looked at.
    assert [name for name, count in refused.items() if count < len(ODD) / 2] == call.takes_anything


@pytest.mark.parametrize("call", CALLS, ids=str)
@examples(15)
@given(data=st.data())
def test_several_arguments(call, data):
    values, bad = data.draw(arguments(call))
    check(call, values, bad)


@pytest.mark.parametrize("call", CALLS[-2:], ids=str)
@examples(15)
@given(data=st.data())
def test_a_refusal_leaves_the_network_and_the_optimizer_as_they_were(call, data):
    values, _ = data.draw(arguments(call))
    network = loss_cell()
    values |= {"network": network, "optimizer": sgd(network)}
    before = weights_of(network)
    made, said = attempt(call.make, **values)
    assert all(np.array_equal(*pair) for pair in zip(before, weights_of(network)))
    if said:
        call.use(call.make(network, values["optimizer"]))
