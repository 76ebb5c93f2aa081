"""StepReport and StepReporter: the numbers of an update, against NumPy and the outputs."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, line, mse, sgd
from loop_toy import adjustable_sgd, own_loop
from mindspore import Tensor, nn, ops
from refusal import refuses
from step_probe import output_of
from verify_probe import Line, total

from ms_gradaccum import Accumulator, GradAccumulation, StepOutput, StepReporter, TrainOneStepCell
from ms_gradaccum.tools.reporting import step_report

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(step_report, "time", clock)
    return clock


def run(accumulator, reporter, data):
    """The reports of one pass over ``data``; None where there is none."""
    reports = []
    for x in accumulator.prepare([Tensor(np.array(part, np.float32).reshape(-1, 1)) for part in data]):
        with accumulator.accumulate():
            accumulator.backward(x, 2 * x)
            reports.append(reporter.report(accumulator.step()))
            accumulator.zero_grad()
    return reports


class Uncounted(nn.Optimizer):
    """An optimizer as the one in MindSpore's documentation, whose `global_step` stays 0."""

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], self.learning_rate * gradients[0])


@pytest.mark.parametrize("make", [lambda network: Uncounted(0.02, network.trainable_params()), adjustable_sgd])
def test_updates_are_counted_for_an_optimizer_that_does_not_count(make):
    _, accumulator = own_loop(make_optimizer=make)
    reports = run(accumulator, StepReporter(accumulator), [[1], [np.nan], [2]])
    assert [report.update for report in reports] == [1, 1, 2]
    assert [report.update for report in run(accumulator, StepReporter(accumulator), [[3]])] == [3]


def test_skipped_updates_are_counted_and_are_no_updates():
    _, pairs = own_loop(2)
    reporter = StepReporter(pairs)
    reports = run(pairs, reporter, [[1], [2], [3], [np.nan], [5], [6]])[1::2]
    found = [(each.update, each.updated, each.overflow, each.skipped_updates) for each in reports]
    assert found == [(1, True, False, 0), (1, False, True, 1), (2, True, False, 1)]
    assert np.isnan(reports[1].grad_norm) and np.isfinite(reports[2].grad_norm)
    # So is a window without weight.
    report = StepReporter().report(output_of(updated=False, overflow=False, weight=0.0, grad_norm=0.0))
    assert (report.update, report.updated, report.overflow, report.skipped_updates) == (0, False, False, 1)


def test_inside_a_window_nothing_is_read_but_what_the_host_has():
    # What cannot be read.
    unread, unknown, no = object(), Tensor(np.nan, ms.float32), Tensor(False)
    inside = StepOutput(unread, no, unread, no, unknown, unread, unread, unread)
    assert StepReporter().report(inside) is None


def test_the_norm_of_the_weights_is_that_of_all_of_them_together_but_for_frozen_ones():
    generator = np.random.default_rng(0)
    network = nn.SequentialCell(nn.Dense(3, 4), nn.Dense(4, 2), nn.Dense(2, 2))
    network[1].weight.requires_grad = network[1].bias.requires_grad = False
    for weight in network.trainable_params():
        weight.set_data(Tensor(generator.normal(size=weight.shape).astype(np.float32)))
    step = TrainOneStepCell(mse(network), sgd(network, 0.1))
    reporter = StepReporter(step, weight_norm=True)
    for _ in range(2):
        x, y = (Tensor(generator.normal(size=(4, columns)).astype(np.float32)) for columns in (3, 2))
        report = reporter.report(step(x, y))
        flat = np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()])
        np.testing.assert_allclose(report.weight_norm, np.linalg.norm(flat.astype(np.float64)), 1e-6)


def test_a_rate_leaves_out_what_reports_and_evaluations_take(clock, monkeypatch):
    def slow(tensor):
        clock.now += 1000.0
        return plain(tensor)

    plain = step_report._plain
    monkeypatch.setattr(step_report, "_plain", slow)
    reporter = StepReporter(every=2)
    reporter.restart()  # before the first report there is nothing to leave out
    for weight in (1, 1, 100):  # the rows of the third, too
        reporter.report(output_of(weight=weight))
    clock.now += 500.0
    reporter.restart()
    clock.now += 2.0
    assert reporter.report(output_of(weight=8)).rows_per_second == 4.0


def test_there_is_no_rate_if_updates_were_missed(clock):
    """As those of a sink, of which the last one alone is seen. Also not by the updates of an earlier training."""
    _, pairs = own_loop(2)
    step = pairs.windows[0].optimizers[0].global_step
    reporter = StepReporter(pairs)
    rates = []
    for made, rows in ((41, 8), (42, 8), (43, 6), (47, 8), (51, 8), (52, 8)):
        step.set_data(Tensor([made], ms.int32))
        clock.now += 2.0
        rates.append(reporter.report(output_of(weight=rows)).rows_per_second)
    # The first time is that of compiling.
    assert rates == [None, 4.0, 3.0, None, None, 4.0]


def test_every_reports_some_windows_with_the_rate_of_all(clock):
    reporter = StepReporter(every=3)
    reports = []
    for number in range(1, 8):
        clock.now += 1.0
        skipped = number == 2
        reports.append(reporter.report(output_of(updated=not skipped, overflow=skipped, weight=number)))
    assert [number for number, report in enumerate(reports, 1) if report] == [3, 6]
    assert (reports[5].update, reports[5].skipped_updates, reports[5].weight) == (5, 1, 6)
    assert reports[5].rows_per_second == (4 + 5 + 6) / 3


def tokens_of_rows(output, y):
    """A loss that counts three tokens for each row."""
    return total(output, y), 3 * y.shape[0]


def test_a_network_that_counts_tokens_has_a_rate_of_tokens(clock):
    network = Line(tokens_of_rows)
    accumulator = Accumulator(GradAccumulation(network, 1, weighted=True), sgd(network))
    reporter = StepReporter(accumulator)
    run(accumulator, reporter, [[1, 2]])
    clock.now += 2.0
    (report,) = run(accumulator, reporter, [[1, 2]])
    assert (report.tokens_per_second, report.rows_per_second, report.weight) == (3.0, None, 6.0)


def test_groups_have_several_learning_rates():
    report = StepReporter().report(output_of(learning_rate=[0.5, 0.25, 0.5]))
    assert report.learning_rate == (0.5, 0.25, 0.5)
    scalars = report.as_dict()
    assert (scalars["learning_rate_min"], scalars["learning_rate_max"]) == (0.25, 0.5)
    assert "learning_rate" not in scalars and scalars["updated"] == 1
    assert all(type(value) in (int, float) for value in scalars.values())


def test_of_several_networks_each_has_a_reporter():
    cells = [mse(line()) for _ in range(2)]
    accumulator = Accumulator(cells, [sgd(cell, rate) for cell, rate in zip(cells, (0.02, 0.01))])
    reporters = [StepReporter(accumulator, weight_norm=True, network=cell) for cell in cells]
    x = Tensor(X)
    with accumulator.accumulate():
        for cell in cells:
            accumulator.backward(x, 2 * x, network=cell)
        outputs = accumulator.step()
    reports = [reporter.report(output) for reporter, output in zip(reporters, outputs)]
    np.testing.assert_allclose([report.weight_norm for report in reports], [2.04, 1.02], 1e-6)
    with refuses(ValueError, "'network'", "2 networks, but got None"):
        StepReporter(accumulator)
    with refuses(TypeError, "'output'", "but got tuple", "With several networks"):
        reporters[0].report(outputs)
