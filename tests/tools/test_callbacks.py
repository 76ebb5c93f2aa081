"""ProgressBar: what it shows, where, and that it leaves everything else alone."""

import functools
import io
import re
import sys
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
import tqdm
from linear_toy import AtStep, batches, line, mse, sgd, toy, toy_with_metrics
from mindspore import nn

from ms_gradaccum import Model, ProgressBar, StateCheckpoint
from ms_gradaccum.tools.reporting import progress_bar

pytestmark = pytest.mark.usefixtures("eager")
# What tqdm writes; on a slow machine it has seconds per batch.
TIMES = r"\[00:\d\d<[\d:?]+, +[\d.?]+(s/batch|batch/s)"


def train(*train_callbacks, epochs=2, accumulation_steps=None, **options):
    """Four batches an epoch; the loss is (w - 2)^2 for a weight that starts at 0.

    Without accumulation_steps this is MindSpore's own Model.
    """
    if accumulation_steps is None:
        network = line()
        model = ms.Model(mse(network), optimizer=sgd(network, 0.1))
    else:
        _, model = toy(2, 0.1, accumulation_steps=accumulation_steps)
    model.train(epochs, batches(2, np.ones((8, 1), np.float32)), callbacks=list(train_callbacks), **options)


def open_terminal(monkeypatch):
    """Make one stream of standard output and error, as on a terminal."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that a test moves by hand, or that stands still: lines and numbers do not depend on the machine."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tqdm.std, "time", lambda: clock.now)
    return clock


def test_one_line_at_the_end_of_each_short_training_without_a_terminal(capsys):
    progress = ProgressBar()
    train(progress, epochs=1)
    train(progress, accumulation_steps=1)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"epoch 1/1: 4/4 {TIMES}, loss 1\.049\]", first)
    assert re.fullmatch(rf"epoch 2/2: 8/8 {TIMES}, 8 updates, loss 0\.1759, lr 0\.1, norm 0\.8389\]", second)


def test_lines_come_when_their_time_has_come(capsys, clock):
    def five_seconds_later(step):
        clock.now += 5.0

    train(AtStep(five_seconds_later), ProgressBar())
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r" (\d)/8 ", line) for line in lines] == [[n] for n in "2468"]
    assert "[00:10<00:30,  5.00s/batch, loss " in lines[0]


def test_the_training_goes_on_to_be_shown_after_an_evaluation_of_fit(capsys):
    _, model = toy_with_metrics(accumulation_steps=2)
    model.fit(3, batches(4), batches(4), callbacks=ProgressBar())
    assert re.match(rf"epoch 3/3: 6/6 {TIMES}, 3 updates, ", capsys.readouterr().out)


def stop_at_6(run_context):
    if run_context.original_args().cur_step_num == 6:
        run_context.request_stop()


def no_outputs(run_context):
    run_context.original_args().net_outputs = None


@pytest.mark.parametrize(
    "at_step, options, beginning",
    [
        (stop_at_6, {"epochs": 4}, "epoch 2/4: 6/16 ["),
        (no_outputs, {"epochs": 2}, "epoch 2/2: 8/8 ["),
        (lambda _: None, {"epochs": 5, "initial_epoch": 3}, "epoch 5/5: 20/20 ["),
    ],
)
def test_the_last_step_is_shown_whatever_the_training_does(at_step, options, beginning, capsys):
    train(AtStep(at_step), ProgressBar(), **options)
    assert capsys.readouterr().out.startswith(beginning)


def test_a_resumed_training_is_counted_from_its_first_batch(capsys, tmp_path):
    train(AtStep(stop_at_6), StateCheckpoint(tmp_path), epochs=3, accumulation_steps=1, resume=True)
    train(ProgressBar(), StateCheckpoint(tmp_path), epochs=3, accumulation_steps=1, resume=True)
    shown = capsys.readouterr().out
    assert shown.startswith("epoch 3/3: 12/12 [") and ", 6 updates, " in shown


def test_the_bar_ends_complete_with_updates_and_loss(monkeypatch):
    terminal, bar = open_terminal(monkeypatch), ProgressBar()
    train(bar, bar, accumulation_steps=1)  # It is one bar, if it is given twice, too.
    *_, last = terminal.getvalue().split("\r")
    assert re.match(r"epoch 2/2: 100%\|.*\| 8/8 .*, 8 updates, loss 0\.1759, lr 0\.1, norm 0\.8389\] *\n$", last)


def test_a_bar_is_closed_after_an_error(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        train(AtStep(lambda _: 1 // 0), ProgressBar())
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("live", [True, False])
def test_a_bar_that_the_environment_disables_is_not_drawn_and_lines_are(live, monkeypatch):
    # As with TQDM_DISABLE=1, which tqdm reads when it is imported.
    disabled = functools.partial(progress_bar._Bar, disable=True)
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(progress_bar, "_Bar", disabled)
    train(ProgressBar(live=live))
    assert sys.stdout is terminal and "\r" not in terminal.getvalue()
    assert terminal.getvalue().startswith("" if live else "epoch 2/2: 8/8 [") and bool(terminal.getvalue()) != live


def test_the_environment_asks_for_the_bar_in_a_log(monkeypatch, capsys):
    monkeypatch.setenv("MS_GRADACCUM_LIVE_BAR", "1")
    train(ProgressBar())
    output = capsys.readouterr()
    assert "epoch 2/2: 100%|" in output.err and output.out == ""


def test_groups_show_their_least_and_largest_learning_rate(capsys):
    network = nn.Dense(1, 1)
    groups = [{"params": [network.weight], "lr": 0.25}, {"params": [network.bias], "lr": 0.5}]
    Model(network, nn.MSELoss(), nn.SGD(groups, 0.1)).train(1, batches(8), callbacks=ProgressBar())
    assert ", lr 0.25-0.5, norm " in capsys.readouterr().out
