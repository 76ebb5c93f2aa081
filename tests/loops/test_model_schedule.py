"""Windows whose number of batches follows a schedule, in a Model, a step and a loop: next to a loop by hand."""

import mindspore as ms
import pytest
from linear_toy import Recorder, batches, descend, line, mse, sgd, toy, toy_step, weight_of
from loop_toy import FOUR, updates_of
from refusal import refuses
from step_probe import Around, compilations

from ms_gradaccum import Accumulator, BySamples, StateCheckpoint
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.settings import check_step
from ms_gradaccum.training.window_length import WindowLength

pytestmark = pytest.mark.usefixtures("eager")
RATE = 0.005
EPOCHS = 4


def by_updates(updates):
    return 1 + updates // 2


# What is given, and the length of a window by the epoch, the updates and the rows before it.
SCHEDULES = {
    "epochs": ({0: 1, 1: 3, 3: 2}, lambda epoch, updates, rows: [1, 3, 3, 2][epoch]),
    "longer": ({0: 3, 1: 4}, lambda epoch, updates, rows: 3 if epoch == 0 else 4),
    "late": ({2: 2}, lambda epoch, updates, rows: [1, 1, 2, 2][epoch]),
    "updates": (by_updates, lambda epoch, updates, rows: by_updates(updates)),
    "samples": (
        BySamples({0: 2, 7: 3, 20: 1}, batch_size=2),
        lambda epoch, updates, rows: 2 if rows < 7 else 3 if rows < 20 else 1,
    ),
}


def by_hand(length_of, last_window="apply"):
    """The rows of each window, and for each batch whether it has made an update."""
    windows, updated, rows, count, batch = [], [], [], 0, 0
    for epoch in range(EPOCHS):
        for pair in ((1, 2), (3, 4), (5, 6), (7, 8)):
            if count == 0:
                length = length_of(epoch, len(windows), 2 * batch)
            rows = [*rows, *pair]
            count += 1
            batch += 1
            is_last = count == length or (batch % 4 == 0 and last_window == "apply")
            if is_last:
                windows.append(rows)
            if is_last or (batch % 4 == 0 and last_window == "drop"):
                rows, count = [], 0
            updated.append(is_last)
    return windows, updated


def trained(schedule, last_window="apply", callbacks=(), **settings):
    network, model = toy(learning_rate=RATE, accumulation_steps=schedule, last_window=last_window)
    recorder = Recorder()
    model.train(EPOCHS, batches(2), callbacks=[recorder, *callbacks], **settings)
    return network, model, recorder


@pytest.mark.parametrize("last_window", ["apply", "drop", "carry"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_model_trains_the_windows_of_a_schedule(name, last_window):
    schedule, length_of = SCHEDULES[name]
    network, model, recorder = trained(schedule, last_window)
    windows, updated = by_hand(length_of, last_window)
    assert len({len(rows) for rows in windows}) > 1  # otherwise this proves nothing
    assert [output.is_updated for output in recorder.outputs] == updated
    assert weight_of(network) == pytest.approx(descend(*windows, learning_rate=RATE), rel=1e-5)
    assert (model.train_network.events.updates, model.train_network.events.batches) == (len(windows), 16)


@pytest.mark.parametrize("name, mode", [("epochs", ms.GRAPH_MODE), ("samples", ms.PYNATIVE_MODE)], indirect=["mode"])
def test_in_both_modes_and_without_another_compilation(name, mode):
    schedule, length_of = SCHEDULES[name]
    network, model, _ = trained(schedule)
    weight = descend(*by_hand(length_of)[0], learning_rate=RATE)
    assert weight_of(network) == pytest.approx(weight, rel=1e-5)
    with compilations() as compiled:
        model.train(1, batches(2))
    assert compiled == []


class Stop(Recorder):
    def on_train_step_end(self, run_context):
        super().on_train_step_end(run_context)
        if len(self.outputs) == self.stop_after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "name, stop_after, last_window",
    [
        *[(name, stop, "apply") for name, stop in zip(SCHEDULES, (5, 6, 9, 10, 5))],
        *[(name, stop, "carry") for name, stop in zip(SCHEDULES, (9, 10, 6, 5, 10))],
    ],
)
def test_a_training_that_was_stopped_goes_on_with_its_window(stop_after, name, last_window, tmp_path):
    schedule, length_of = SCHEDULES[name]
    states = StateCheckpoint(tmp_path, save_checkpoint_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trained(schedule, last_window, [Stop(stop_after), states], resume=True)
    network, *_ = trained(schedule, last_window, [StateCheckpoint(tmp_path)], resume=True)
    windows, _ = by_hand(length_of, last_window)
    assert weight_of(network) == pytest.approx(descend(*windows, learning_rate=RATE), rel=1e-5)


def test_a_function_is_asked_once_for_a_window():
    coming = iter([2, 3, 1])
    settings = {"accumulation_steps": lambda updates: next(coming), "check_loss": False}
    network, step = toy_step(learning_rate=RATE, **settings)
    assert step.accumulation_steps == 2  # Nor again for the batch that this is asked for.
    assert [step(*(FOUR * 2)[i]).is_updated for i in range(6)] == [False, True, False, False, True, True]
    windows = [(1, 2, 3, 4), (5, 6, 7, 8, 1, 2), (3, 4)]
    assert weight_of(network) == pytest.approx(descend(*windows, learning_rate=RATE), rel=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loop_trains_the_windows_of_a_schedule(name):
    schedule, length_of = SCHEDULES[name]
    windows, expected = by_hand(length_of)
    network = line()
    accumulator = Accumulator(mse(network), sgd(network, RATE), schedule, check_loss=False)
    data = accumulator.prepare(FOUR)
    updated = []
    for _ in range(EPOCHS):
        updated += updates_of(accumulator, data)
    assert updated == expected
    assert weight_of(network) == pytest.approx(descend(*windows, learning_rate=RATE), rel=1e-5)
    assert accumulator.gradient_accumulation_steps == 1


def test_a_step_alone_knows_no_epochs_and_checks_what_a_function_returns():
    for steps, said in (({0: 2}, "counts epochs"), (lambda updates: 0, "'accumulation_steps(0)'")):
        _, step = toy_step(accumulation_steps=steps, check_loss=False)
        with refuses(ValueError, "accumulation_steps", said):
            step(*FOUR[0])
        assert step.events.batches == 0


def test_a_larger_graph_follows_no_schedule(mode):
    _, step = toy_step(accumulation_steps=by_updates, check_loss=False)
    if mode:  # In PYNATIVE mode a cell around it is no graph.
        assert Around(step)(*FOUR[0]).updated
        return
    with refuses(ValueError, "'accumulation_steps'", "number in a larger"):
        Around(step)(*FOUR[0])


def test_a_data_sink_follows_no_schedule(monkeypatch):
    network, model = toy(learning_rate=RATE, accumulation_steps=by_updates)
    model.train(1, batches(2), dataset_sink_mode=True)  # Where there is no sink, its mode changes nothing.
    weight = weight_of(network)
    monkeypatch.setattr("ms_gradaccum.loops.model.has_data_sink", lambda: True)
    with refuses(ValueError, "'accumulation_steps'", "number in a larger"):
        model.train(1, batches(2), dataset_sink_mode=True)
    assert weight_of(network) == weight != 0


@pytest.mark.parametrize(
    "steps, batch_size, name, error",
    [([1], 2, "steps", TypeError), ({0: 1}, 0, "batch_size", ValueError), ({0: 1}, None, "batch_size", TypeError)],
)
def test_wrong_numbers_of_samples_are_refused(steps, batch_size, name, error):
    with refuses(error, f"'{name}'"):
        BySamples(steps, batch_size)


def test_the_compiler_partitions_no_schedule():
    cell = mse(line())
    length = WindowLength("TrainOneStepCell", "accumulation_steps", {0: 1})
    with refuses(ValueError, "'accumulation_steps'"):
        check_step(SemiAuto(None), cell, sgd(cell), window_length=length)
