"""The noise scale of the gradient: from the gradients of micro batches, near a truth that is known."""

import json

import mindspore as ms
import numpy as np
import pytest
from linear_toy import whole
from mindspore import Tensor, nn
from step_probe import Weights, changed, values_of

from ms_gradaccum import (
    Accumulator,
    GradAccumulation,
    GradCacheLoss,
    MetricsLogger,
    MixedPrecision,
    StepReporter,
    TrainOneStepCell,
)
from ms_gradaccum.backend import kernels
from ms_gradaccum.tools.reporting.run_plot import draw

COLUMNS, MEAN, DEVIATION = 20, 0.4, 1.3
TRUTH = DEVIATION**2 / MEAN**2


def rows_of(number):
    """Rows, whose gradients are the rows: with a mean and a covariance that are known. Not as many in each batch."""
    random = np.random.default_rng(number)
    return random.normal(MEAN, DEVIATION, (17 + 6 * (number % 2), COLUMNS)).astype(np.float32)


def new_step(**settings):
    cell = Weights(COLUMNS)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    return TrainOneStepCell(GradAccumulation(cell, 4), optimizer, **{"noise_scale": True, **settings})


def squares_of(*batches):
    """What a window notes, in NumPy."""
    parts = [part for rows in batches for part in np.array_split(rows.astype(np.float64), 4)]
    return sum(np.square(part.sum(0)).sum() / len(part) for part in parts), len(parts)


@pytest.fixture(params=["kernel", "operators"])
def way(request, monkeypatch):
    if request.param == "operators":
        monkeypatch.setattr(kernels, "has_kernels", lambda: False)


def estimate(number):
    """What one window says of the trace and of the square of the gradient, in NumPy."""
    rows = rows_of(number).astype(np.float64)
    squares, count = squares_of(rows)
    square = np.square(rows.mean(0)).sum()
    trace = (squares - len(rows) * square) / (count - 1)
    return trace, square - trace / len(rows)


def test_the_truth_is_found_over_500_windows():
    ms.set_context(mode=ms.GRAPH_MODE)
    step = new_step()
    reporter = StepReporter(step)
    found = [reporter.report(step(Tensor(rows_of(number)))).noise_scale for number in range(500)]
    assert found[:9] == [None] * 9
    assert 0.95 * TRUTH < found[-1] < 1.05 * TRUTH
    traces, squares = np.transpose([estimate(number) for number in range(200)])
    np.testing.assert_allclose(found[199], traces.mean() / squares.mean(), rtol=1e-4)
    # The known wrong answers: the mean of ratios, and the square of the gradient with its noise.
    assert abs(np.mean(traces / squares) / TRUTH - 1) > 0.05
    noisy = np.mean([np.square(rows_of(number).mean(0)).sum() for number in range(200)])
    assert abs(traces.mean() / noisy / TRUTH - 1) > 0.05


@pytest.mark.usefixtures("eager", "way")
@pytest.mark.parametrize("scale", [None, MixedPrecision(level="O0", init_scale=1024.0)], ids=["plain", "scaled"])
def test_squares_are_those_of_the_micro_batches(scale):
    step = new_step(accumulation_steps=2, mixed_precision=scale)
    for number in (0, 1, 2, 3):
        output = step(Tensor(rows_of(number)))
        if number % 2:
            np.testing.assert_allclose(output.noise, squares_of(rows_of(number - 1), rows_of(number)), rtol=1e-6)
    # It is a report: the training is the same bit for bit.
    plain = new_step(accumulation_steps=2, mixed_precision=scale, noise_scale=False)
    for number in (0, 1, 2, 3):
        last = plain(Tensor(rows_of(number)))
    assert last.noise is None
    assert changed(values_of(plain), {name: values_of(step)[name] for name in values_of(plain)}) == set()


@pytest.mark.usefixtures("eager")
def test_a_loop_notes_them_too_and_a_window_left_empty_none():
    cell = Weights(COLUMNS)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    accumulator = Accumulator(GradAccumulation(cell, 4), optimizer, noise_scale=True)
    accumulator.backward(Tensor(rows_of(0)))
    np.testing.assert_allclose(accumulator.step().noise, squares_of(rows_of(0)), rtol=1e-6)
    bad = rows_of(1)
    bad[:5] = np.nan
    step = new_step(bad_micro_batch="drop")
    # Micro batches of 6, 6, 6 and 5 rows, without the first one.
    parts = [bad[6:12], bad[12:18], bad[18:]]
    expected = sum(np.square(part.astype(np.float64).sum(0)).sum() / len(part) for part in parts)
    np.testing.assert_allclose(step(Tensor(bad)).noise, (expected, 3), rtol=1e-6)


@pytest.mark.usefixtures("eager")
def test_it_is_logged_and_drawn(tmp_path):
    step = new_step()
    logger = MetricsLogger(tmp_path / "run.jsonl", train_step=step)
    reports = [logger.log(step(Tensor(rows_of(number)))) for number in range(12)]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line.get("noise_scale") for line in lines] == [report.noise_scale for report in reports]
    assert reports[-1].noise_scale is not None
    assert reports[-1].scalars()["noise_scale"] == reports[-1].noise_scale
    draw([tmp_path / "run.jsonl"], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10000


REMEDY = "but got True. Leave noise_scale out."


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (lambda: GradCacheLoss(Weights(3), nn.MAELoss()), "for a GradCacheLoss, whose rows depend on each other"),
        (lambda: GradAccumulation(Weights(3), 2, weighted=True, terms=2), "for several terms"),
    ],
    ids=["GradCacheLoss", "terms"],
)
def test_what_it_says_nothing_about_is_refused(network, reason):
    network = network()
    sentence = f"For 'TrainOneStepCell', the argument 'noise_scale' must be False {reason}, {REMEDY}"
    with pytest.raises(ValueError, match=whole(sentence)):
        TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1), noise_scale=True)
