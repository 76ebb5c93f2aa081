"""Every public method and function that takes values: a result, or one of our sentences and nothing changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_toy import line, sgd
from loop_toy import FOUR, toy_loop
from mindspore import Tensor, nn
from step_probe import changed, values_of
from strategies import ALL_ROWS, ODD, anything, attempt, examples, loss_cell, refusal

from ms_gradaccum import (
    AccumulationConfig,
    AccumulationSchedule,
    GradAccumulation,
    MetricsLogger,
    Model,
    ProgressBar,
    StepReporter,
    TrainOneStepCell,
    verify,
)

GRAD = Tensor([[1.0]])


def of_accumulator(name):
    """What is called with one odd value, in the middle of a window of the toy."""
    return {
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
        "zero_grad": lambda each, value: each.zero_grad(network=value),
        "scale": lambda each, value: each.scale(value),
        "prepare": lambda each, value: each.prepare(value),
        "add_callback": lambda each, value: each.add_callback(value),
    }[name]


METHODS = ["grads", "weight", "loss", "reduction", "network", "backward", "backward network", "clip_grad_norm"]
METHODS += ["clip_grad_value", "clip network", "zero_grad", "scale", "prepare", "add_callback"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_accumulator(name):
    _, accumulator = toy_loop(2**31 - 1)  # the window never ends
    accumulator.backward(*FOUR[0])
    refused, call = 0, of_accumulator(name)
    for make in ODD:
        before, batches = values_of(accumulator), accumulator.window.counter.batches
        clip = accumulator._networks[0].last_clip
        if refusal(call, accumulator, make()) is not None:
            refused += 1
            assert not changed(before, values_of(accumulator))
            assert batches == accumulator.window.counter.batches == accumulator.window.events.batches
            assert clip is accumulator._networks[0].last_clip
    assert refused > len(ODD) / (4 if name == "prepare" else 2)
    assert accumulator.drop() >= 1


def test_a_method_of_a_step():
    cell = loss_cell()
    step = TrainOneStepCell(GradAccumulation(cell, 2), sgd(cell), accumulation_steps=2)
    step(*ALL_ROWS)
    before = values_of(step)
    for make in ODD:
        assert refusal(step, make()) and refusal(step, *ALL_ROWS, make()) and refusal(step.add_callback, make())
        assert not changed(before, values_of(step)) and (step.open_batches(), step.events.batches) == (1, 1)


@pytest.mark.parametrize("name", ["path", "tensorboard_dir", "log", "append", "every", "train_step", "weight_norm"])
def test_metrics_logger(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, make in enumerate(ODD):
        arguments = {"path": f"{number}.jsonl", name: make()}
        logger, _ = attempt(MetricsLogger, **arguments, errors=(TypeError, ValueError, OSError))
        if logger is not None:
            logger.close()
    assert list(tmp_path.iterdir())


@examples(60)
@given(
    extra=st.dictionaries(st.sampled_from(["a", "loss", "update", "ep\0"]), anything(), max_size=2), output=anything()
)
def test_what_is_logged(extra, output, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    logged = []
    logger = MetricsLogger(path, log=lambda *args: logged.append(args))
    said = refusal(logger.log, output, **extra)
    assert said is not None or output is None
    assert not logged and path.read_text() == ""
    logger.close()


def test_what_is_reported():
    cell = loss_cell()
    step = TrainOneStepCell(cell, sgd(cell))
    output = step(*ALL_ROWS)
    for make in ODD:
        assert make() is None or refusal(StepReporter(step).report, make())
        assert make() is None or refusal(ProgressBar(live=False).update, make())
        for name in ("train_step", "every", "weight_norm", "communication_time", "peak_memory"):
            reporter, _ = attempt(StepReporter, **{"train_step": step, name: make()})
            if reporter is not None:
                report = reporter.report(output)
                assert (report is None) == (reporter.every > 1) and (report is None or report.loss == 102.0)


def test_a_schedule():
    schedule = AccumulationSchedule({0: 1, 4: 2})
    config = AccumulationConfig(schedule=schedule)
    for make in ODD:
        steps, said = attempt(schedule.steps_at, make())
        assert said or steps in (1, 2)
        steps, said = attempt(config.steps_for, make(), 0, 0)
        assert said or steps in (1, 2)


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
    for make in ODD:
        if name in ("metrics", "eval_indexes") and not isinstance(make(), (int, str)):
            continue  # MindSpore takes nests for names of metrics and looks them up.
        model, said = attempt(Model, **{**good, name: make()}, stock=STOCK_METRICS)
        assert said or model.train_network is not None
        del model  # It has the optimizer.
    assert Model(**good).train_network.network.micro_size == 1


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, False) for name in ("network", "batch", "micro_size", "weighted", "batch_axis", "reference", "rtol")),
        *((name, True) for name in ("batch", "micro_size", "weighted", "batch_axis")),
    ],
)
def test_verify(name, whole, eager):
    cell = loss_cell()
    network = GradAccumulation(cell, 2) if whole else cell
    before = values_of(network)
    good = {"network": network, "batch": ALL_ROWS, "micro_size": 2}
    refused = 0
    for make in ODD:
        value = make()
        if name == "rtol" and isinstance(value, (int, float)) and value > 0:
            continue  # Each of these is a verification.
        refused += refusal(verify, **{**good, name: value}) is not None
        assert not changed(before, values_of(network))
    assert refused > len(ODD) / 2
