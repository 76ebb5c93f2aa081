"""MetricsLogger: what it writes is what happened, in each place, and nothing stops the training or gets lost."""

import json
import os
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from linear_toy import Recorder, X, batches, line, sgd, toy, toy_step, toy_with_metrics
from loop_toy import own_loop
from mindspore import Tensor, nn
from no_space import no_file_larger_than
from refusal import refuses, warns
from step_probe import output_of

from ms_gradaccum import ClipByGlobalNorm, GradAccumulationWarning, MetricsLogger, Model, StepOutput, StepReporter
from ms_gradaccum.tools.reporting.run_plot import read_run

pytestmark = pytest.mark.usefixtures("eager")


def lines_of(path):
    # NaN and Infinity are no JSON.
    return [json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines()]


def test_the_lines_have_the_numbers_of_the_outputs(tmp_path):
    """Two epochs of four batches, three batches to an update, written in all ways."""
    recorder, calls, path = Recorder(), [], tmp_path / "new" / "run.jsonl"
    logger = MetricsLogger(path, lambda *args: calls.append(args), weight_norm=True)
    _, model = toy(accumulation_steps=3, clip=ClipByGlobalNorm(1.0))
    model.train(2, batches(2), callbacks=[logger, recorder])
    lines, outputs = lines_of(path), [output for output in recorder.outputs if output.ends_window]
    weights = [weight for weight, output in zip(recorder.weights, recorder.outputs) if output.ends_window]
    # Two windows an epoch, the second one flushed.
    wanted = {"update": [1, 2, 3, 4], "epoch": [1, 1, 2, 2], "batches": [3, 4, 7, 8], "micro_batches": [3, 4, 7, 8]}
    assert {name: [line[name] for line in lines] for name in wanted} == wanted
    assert lines[0]["clipped_grad_norm"] < lines[0]["grad_norm"]  # They cannot be exchanged.
    for line_, output in zip(lines, outputs):
        for name in StepOutput._fields:
            assert line_[name] == getattr(output, name).asnumpy().item(), name
    np.testing.assert_allclose([line["weight_norm"] for line in lines], np.abs(weights), 1e-6)
    assert all(line["rows_per_second"] > 0 for line in lines[1:])
    assert all(b["time"] >= a["time"] > 1.7e9 for a, b in zip(lines, lines[1:]))
    # A function gets the same.
    assert [step for _, step in calls] == [1, 2, 3, 4]
    for (numbers, _), line_ in zip(calls, lines):
        assert numbers == {name: value for name, value in line_.items() if name != "time"}


def test_what_fit_evaluates_is_written_with_its_epoch(tmp_path):
    path, calls = tmp_path / "run.jsonl", []
    _, model = toy_with_metrics(accumulation_steps=4)
    logger = MetricsLogger(path, lambda numbers, step: calls.append((numbers, step)))
    model.fit(2, batches(2), batches(8), callbacks=[logger])
    lines = lines_of(path)
    assert [(line["epoch"], line["update"]) for line in lines] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert ["loss" in line for line in lines] == [True, False, True, False]
    # After the first update the weight is 2.04, see linear_toy.
    np.testing.assert_allclose(lines[1]["eval_mse"], np.mean((0.04 * X) ** 2), 1e-4)
    assert calls[1] == ({"eval_mse": lines[1]["eval_mse"], "eval_loss": lines[1]["eval_loss"]}, 1)


def test_a_loop_of_ones_own(tmp_path):
    """By hand, and as a callback of an Accumulator: the same lines."""
    _, accumulator = own_loop(2)
    by_hand = MetricsLogger(tmp_path / "by_hand.jsonl", train_step=accumulator, weight_norm=True)
    called = MetricsLogger(tmp_path / "called.jsonl", train_step=accumulator, weight_norm=True)
    accumulator.add_callback(called)
    reports = []
    for x in [Tensor(X[:2]), Tensor(X[2:4])] * 2:
        with accumulator.accumulate():
            accumulator.backward(x, 2 * x)
            reports.append(by_hand.log(accumulator.step(), note=7))
    lines = lines_of(tmp_path / "by_hand.jsonl")
    assert [report is None for report in reports] == [True, False, True, False]
    assert [line.pop("note") for line in lines] == [7, 7]
    for line_, other, report in zip(lines, lines_of(tmp_path / "called.jsonl"), reports[1::2]):
        assert line_ | {"time": 0, "rows_per_second": 0} == other | {"time": 0, "rows_per_second": 0}
        assert line_["weight_norm"] == report.weight_norm


def test_gradients_without_a_loss_are_reported_without_one(tmp_path):
    _, accumulator = own_loop(2)
    reporter, path = StepReporter(accumulator), tmp_path / "run.jsonl"
    logger = MetricsLogger(path, train_step=accumulator)
    losses, known = [], []
    for loss in (None, None, 3.0, None, 3.0, 5.0):
        output = accumulator((Tensor([[1.0]]),), 2, loss)
        known.append(output.loss is not None and output[0] is not None)
        logger.log(output)
        losses += [report.loss for report in [reporter.report(output)] if report is not None]
    assert losses == [None, None, 4.0] and known == [False, False, True, False, True, True]
    assert ["loss" in record for record in lines_of(path)] == [False, False, True]
    assert [record["update"] for record in read_run(path)] == [1, 2, 3]
    accumulator((Tensor([[1.0]]),), 2, np.nan)
    report = reporter.report(accumulator((Tensor([[1.0]]),), 2, 1.0))
    assert np.isnan(report.loss) and report.updated  # a loss that is no number is one all the same


def test_numbers_of_ones_own_may_be_of_any_kind_and_inf_and_nan_are_null_in_the_lines_alone(tmp_path):
    calls = []
    logger = MetricsLogger(tmp_path / "run.jsonl", lambda numbers, step: calls.append(numbers), weight_norm=True)
    output = output_of(updated=False, loss=np.inf, grad_norm=np.nan)
    logger.log(output, count=3, share=np.float32(0.5), score=Tensor(2.0), none=np.float64(np.nan))
    (line_,) = lines_of(tmp_path / "run.jsonl")
    assert [line_[name] for name in ("count", "share", "score", "none")] == [3, 0.5, 2.0, None]
    assert (line_["loss"], line_["grad_norm"], line_["overflow"], line_["updated"]) == (None, None, True, False)
    assert calls[0]["loss"] == np.inf and np.isnan(calls[0]["grad_norm"])
    assert "weight_norm" not in line_  # It needs the training step.
    for value, got in (([1, 2], "[1, 2] of type list"), ("3", "'3' of type str")):
        with refuses(TypeError, "For 'MetricsLogger'", "'scores'", got):
            logger.log(output_of(), scores=value)
    assert len(lines_of(tmp_path / "run.jsonl")) == 1


def test_a_file_with_lines_is_continued_and_its_last_run_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    first = MetricsLogger(path)
    for loss in (1.0, 2.0, 3.0):
        first.log(output_of(loss=loss))
    path.write_bytes(path.read_bytes() + b'{"loss": 2.0, "upd')  # what a killed program leaves
    second = MetricsLogger(path)
    for loss in (4.0, 5.0):
        second.log(output_of(loss=loss))
    *_, torn, fourth, last = path.read_text().splitlines()
    assert (torn, json.loads(fourth)["loss"], json.loads(last)["loss"]) == ('{"loss": 2.0, "upd', 4.0, 5.0)
    assert [record["loss"] for record in read_run(path)] == [4.0, 5.0]


def test_a_program_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = MetricsLogger("run.jsonl")
    logger.log(output_of(loss=1.0))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    logger.log(output_of(loss=2.0))
    assert [line["loss"] for line in lines_of(tmp_path / "run.jsonl")] == [1.0, 2.0]
    assert list(Path.cwd().iterdir()) == []


def test_the_lines_may_go_into_a_pipe():
    reader, writer = os.pipe()
    logger = MetricsLogger(f"/dev/fd/{writer}")
    logger.log(output_of(loss=1.0))
    assert json.loads(os.read(reader, 10000))["loss"] == 1.0
    os.close(reader)
    os.close(writer)


def test_a_place_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    place = tmp_path / "file" / "deeper" / "still"
    with pytest.raises(NotADirectoryError, match=f"Not a directory: '{place.parent}"):
        MetricsLogger(place)


def test_a_disk_that_is_full_for_a_while_costs_one_warning_and_the_lines_of_this_time(tmp_path):
    """It has no more room in the middle of a line."""
    path = tmp_path / "run.jsonl"
    logger = MetricsLogger(path)
    logger.log(output_of(loss=1.0))
    with no_file_larger_than(path.stat().st_size + 40), warns("reports are missing") as caught:
        logger.log(output_of(loss=2.0))
        logger.log(output_of(loss=3.0))
    assert [warning.category for warning in caught].count(GradAccumulationWarning) == 1
    logger.log(output_of(loss=4.0))
    # The start of a line is a line of its own.
    assert path.read_text().count("\n") == 3
    assert [record["loss"] for record in read_run(path)] == [1.0, 4.0]


def test_a_model_of_mindspore_with_our_step_logs_or_is_refused(tmp_path):
    network = line()
    model = ms.Model(network, nn.MSELoss(), sgd(network))
    with refuses(TypeError, "TrainOneStepCell of ms_gradaccum"):
        model.train(1, batches(2), callbacks=MetricsLogger(tmp_path / "run.jsonl"))
    _, step = toy_step()
    logger = MetricsLogger(tmp_path / "run.jsonl")
    with refuses(ValueError, "train_step.add_callback(logger)"):
        ms.Model(step).train(1, batches(4), callbacks=logger)
    step.add_callback(logger)
    ms.Model(step).train(1, batches(4), callbacks=logger)
    Model(step).train(1, batches(4), callbacks=logger)  # which it hears once, too
    assert [line["update"] for line in lines_of(tmp_path / "run.jsonl")] == [1, 2, 3, 4]
