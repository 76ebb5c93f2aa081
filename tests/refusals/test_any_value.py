"""Every public constructor, method and function with values of any kind: a result, or one of our sentences."""

import math

import mindspore as ms
import numpy as np
import pytest
from linear_toy import line, sgd
from loop_toy import FOUR, toy_loop
from mindspore import Tensor, nn
from refusal import loss_cell
from step_probe import changed, sgd_step, values_of
from strategies import ALL_ROWS, ODD, Call, attempt, refusal

import ms_gradaccum as ours
from ms_gradaccum.gradients.mixed_precision import check_precision

# What is taken of these is above 0 and no Inf as a float32.
POSITIVE = "micro_size max_norm limit init_scale growth_interval accumulation_steps every".split()
# Arguments that take True, which is a number for no other.
FLAGS = "weighted sync_each_batch check_weights mean sync_with_dataloader live weight_norm compile check_loss"
FLAGS += " drop_remainder losses token_weights trainable_only"


def clips(clip):
    (grad,) = clip((Tensor([3.0, -4.0]),), Tensor(5.0))
    assert np.isfinite(grad.asnumpy()).all() and (abs(grad.asnumpy()) <= [3, 4]).all()


def scale_stays_a_number(precision):
    if precision.dtype == ms.bfloat16:
        return  # Not on every device, and without a scale.
    scale = check_precision("MixedPrecision", precision).loss_scale
    for bad in (False, True):
        scale(Tensor(not bad), Tensor(bad))
        assert math.isfinite(scale.value().asnumpy()) and scale.unscaled(Tensor(1.0)).asnumpy() > 0


def config_counts(config):
    # What a function returns is seen only when it is called; what it raises is its author's to see.
    if not isinstance(config.window_length.steps, nn.Cell):
        refusal(config.steps_for, epoch=0, updates=0)
    config.as_text()


def plan_counts(plan):
    assert 0 <= plan.updates_per_epoch <= plan.updates <= plan.batches
    assert str(plan)


def step_is_new(step):
    assert (step.open_batches(), step.drop(), step.flush()) == (0, 0, None)


def accumulator_is_new(accumulator):
    assert (accumulator.sync_gradients, accumulator.drop(), accumulator.flush()) == (False, 0, None)


def its_optimizer(network):
    return sgd(network if isinstance(network, nn.Cell) and network.trainable_params() else line())


def built(kind):
    def make(network, optimizer=None, **values):
        return kind(network, its_optimizer(network) if optimizer is None else optimizer, **values)

    make.__name__ = kind.__name__
    return make


def a_network():
    return {"network": loss_cell()}


TRAINING = " accumulation_steps clip mixed_precision parallel bad_micro_batch skip_above compile check_loss"
CALLS = [
    Call(ours.GradAccumulation, "network micro_size weighted batch_axis", lambda: a_network() | {"micro_size": 1}),
    Call(
        ours.TokenMeanLoss,
        "backbone ignore_index block_tokens label_smoothing z_loss logit_softcap token_weights",
        lambda: {"backbone": line()},
    ),
    Call(ours.ClipByGlobalNorm, "max_norm", use=clips),
    Call(ours.ClipByValue, "limit", use=clips),
    Call(ours.ClipByGroupNorm, "limits"),
    Call(ours.DataParallel, "sync_each_batch check_weights"),
    Call(ours.Reduced, "mean check_weights"),
    Call(ours.HSDP, "shard_size threshold optimizer_level check_weights"),
    Call(
        ours.MixedPrecision,
        "dtype level init_scale growth_factor backoff_factor growth_interval loss_scale reduce_dtype",
        use=scale_stays_a_number,
    ),
    Call(
        ours.AccumulationConfig,
        "accumulation_steps sync_with_dataloader sync_each_batch schedule",
        use=config_counts,
    ),
    Call(
        ours.TrainingPlan,
        "dataset_size batch_size epochs ranks drop_remainder accumulation_steps last_window",
        lambda: {"dataset_size": 1, "batch_size": 1, "epochs": 1},
        plan_counts,
    ),
    Call(ours.ProgressBar, "live"),
    Call(ours.EMA, "decay warmup_updates trainable_only"),
    Call(ours.StepReporter, "train_step every weight_norm network", takes_anything=["network"]),
    Call(built(ours.TrainOneStepCell), "network optimizer" + TRAINING, a_network, step_is_new),
    Call(built(ours.Accumulator), "network optimizer config" + TRAINING, a_network, accumulator_is_new),
]


def check(call, values):
    """Call, use what was made, and return the sentence with which it was refused."""
    made, said = attempt(call.make, **values)
    if made is not None:
        call.use(made)
    return said


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_one_odd_argument(call):
    good = call.good()
    for name in call.names.split():
        taken = []
        for make in ODD:
            value = make()
            said = check(call, {**good, name: value})
            if said is None:
                taken.append(value)
            else:
                assert "but got" in said
                assert name in said or "must have at most" in said  # A plan has a limit for the product of several.
        # That of a reporter that looks at nothing is not looked at.
        assert len(taken) <= len(ODD) / 2 or name in call.takes_anything
        assert name in FLAGS.split() or name in call.takes_anything or not any(value is True for value in taken)
        if name in POSITIVE:
            numbers = [value for value in taken if isinstance(value, (int, float, np.number))]
            assert all(0 < np.float32(number) < np.inf for number in numbers), taken


@pytest.mark.parametrize("call", CALLS[-2:], ids=str)
def test_a_refusal_leaves_the_network_and_the_optimizer_as_they_were(call):
    network = loss_cell()
    optimizer = sgd(network)
    before = values_of(network)
    for name in call.names.split()[2:]:
        refused = [attempt(call.make, network=network, optimizer=optimizer, **{name: make()})[1] for make in ODD]
        assert any(refused) and not changed(before, values_of(network))
        call.use(call.make(network, optimizer))


GRAD = Tensor([[1.0]])


# Calls with one odd value, in the middle of a window of the toy.
METHODS = {
    "grads": lambda each, value: each(value),
    "weight": lambda each, value: each(GRAD, value),
    "loss": lambda each, value: each(GRAD, 1, value),
    "reduction": lambda each, value: each(GRAD, 1, reduction=value),
    "network": lambda each, value: each(GRAD, 1, network=value),
    "backward": lambda each, value: each.backward(value),
    "backward network": lambda each, value: each.backward(*FOUR[0], network=value),
    "clip_grad_norm": lambda each, value: each.clip_grad_norm(value),
    "clip_grad_value": lambda each, value: each.clip_grad_value(value),
    "clip network": lambda each, value: each.clip_grad_norm(1.0, network=value),
    "step network": lambda each, value: each.step(network=value),
    "zero_grad": lambda each, value: each.zero_grad(network=value),
    "scale": lambda each, value: each.scale(value),
    "prepare": lambda each, value: each.prepare(value),
    "add_callback": lambda each, value: each.add_callback(value),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_accumulator(name):
    _, accumulator = toy_loop(2**31 - 1)  # the window never ends
    accumulator.backward(*FOUR[0])
    refused, call = 0, METHODS[name]
    for make in ODD:
        before, batches = values_of(accumulator), accumulator.driver.batches
        clip = accumulator.windows[0].last_clip
        if refusal(call, accumulator, make()) is not None:
            refused += 1
            assert not changed(before, values_of(accumulator))
            assert batches == accumulator.driver.batches == accumulator.driver.events.batches
            assert clip is accumulator.windows[0].last_clip
    assert refused > len(ODD) / (4 if name == "prepare" else 2)
    assert accumulator.drop() >= 1


def test_a_method_of_a_step():
    cell = loss_cell()
    step = sgd_step(cell, accumulation_steps=2)
    step(*ALL_ROWS)
    before = values_of(step)
    for make in ODD:
        assert refusal(step, make()) and refusal(step, *ALL_ROWS, make()) and refusal(step.add_callback, make())
        assert not changed(before, values_of(step)) and (step.open_batches(), step.events.batches) == (1, 1)


@pytest.mark.parametrize("name", ["path", "log", "every", "train_step", "weight_norm"])
def test_metrics_logger(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, make in enumerate(ODD):
        arguments = {"path": f"{number}.jsonl", name: make()}
        attempt(ours.MetricsLogger, **arguments, errors=(TypeError, ValueError, OSError))
    assert list(tmp_path.iterdir())


def test_what_is_logged(tmp_path):
    path = tmp_path / "run.jsonl"
    logged = []
    logger = ours.MetricsLogger(path, log=lambda *args: logged.append(args))
    for make in ODD:
        assert make() is None or refusal(logger.log, make(), loss=1.0)
        for name in ("a", "loss", "update", "ep\0"):
            refusal(logger.log, None, **{name: make()})
    assert not logged and path.read_text() == ""


def test_what_is_reported():
    cell = loss_cell()
    step = ours.TrainOneStepCell(cell, sgd(cell))
    output = step(*ALL_ROWS)
    for make in ODD:
        assert make() is None or refusal(ours.StepReporter(step).report, make())
        for name in ("train_step", "every", "weight_norm"):
            reporter, _ = attempt(ours.StepReporter, **{"train_step": step, name: make()})
            if reporter is not None:
                report = reporter.report(output)
                assert (report is None) == (reporter.every > 1) and (report is None or report.loss == 102.0)


# MindSpore's own sentences about what is handed on to its Model as it is.
STOCK_METRICS = r"For 'get_metrics'|The argument 'eval_indexes'|If `metrics` is set|Unknown Metric|Auto mixed precision"


@pytest.mark.parametrize(
    "name",
    [
        *("network", "loss_fn", "optimizer", "metrics", "eval_network", "eval_indexes", "amp_level", "boost_level"),
        *("accumulation_steps", "clip", "mixed_precision", "parallel", "last_window", "bad_micro_batch"),
        "loss_scale_manager",
    ],
)
def test_model(name):
    network = line()
    good = {"network": network, "loss_fn": nn.MSELoss(), "optimizer": sgd(network), "metrics": {"mse"}}
    refused = 0
    for make in ODD:
        if name in ("metrics", "eval_indexes") and not isinstance(make(), (int, str)):
            continue  # MindSpore takes nests for names of metrics and looks them up.
        model, said = attempt(ours.Model, **{**good, name: make()}, stock=STOCK_METRICS)
        assert said or model.train_network is not None
        refused += said is not None
        del model  # It has the optimizer.
    assert refused > len(ODD) / 4 or name == "eval_indexes"  # Without an eval_network nobody looks at them.
    assert ours.Model(**good).train_network.network.micro_size == 1


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, False) for name in ("network", "batch", "micro_size", "weighted", "batch_axis", "reference", "rtol")),
        *((name, True) for name in ("batch", "micro_size", "weighted", "batch_axis")),
    ],
)
def test_verify(name, whole, eager):
    cell = loss_cell()
    network = ours.GradAccumulation(cell, 2) if whole else cell
    before = values_of(network)
    good = {"network": network, "batch": ALL_ROWS, "micro_size": 2}
    refused = 0
    for make in ODD:
        value = make()
        if name == "rtol" and isinstance(value, (int, float)) and value > 0:
            continue  # Each of these is a verification.
        refused += refusal(ours.verify, **{**good, name: value}) is not None
        assert not changed(before, values_of(network))
    assert refused > len(ODD) / 2
