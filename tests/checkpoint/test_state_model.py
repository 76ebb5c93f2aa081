"""A Model that is stopped anywhere and goes on from its last state trains as the one that was never stopped."""

import json
import os
import signal
from contextlib import suppress

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from linear_toy import AtStep, line, momentum, mse, sgd, toy
from mindspore import nn, train
from mindspore.dataset import vision
from refusal import refuses
from state_probe import INPUTS, LABELS

from ms_gradaccum import GradAccumulation, Model, StateCheckpoint, load_state, save_state
from ms_gradaccum.checkpoint.files import signed

pytestmark = pytest.mark.usefixtures("eager")


def in_memory():
    return ds.NumpySlicesDataset((INPUTS[:20], LABELS[:20]), ["x", "y"], shuffle=True).batch(4)


def from_python():
    return ds.GeneratorDataset(list(zip(INPUTS[:20], LABELS[:20])), ["x", "y"], shuffle=True).batch(4)


def with_noise():
    """Noise of NumPy's in the program's own threads, and a random operation of MindSpore's."""
    data = ds.NumpySlicesDataset((INPUTS[:20], LABELS[:20]), ["x", "y"], shuffle=True)
    data = data.map(lambda x: x + np.random.normal(size=3).astype(np.float32), "x", num_parallel_workers=1)
    flip = [lambda x: x.reshape(1, 3, 1), vision.RandomHorizontalFlip(), lambda x: x.reshape(3)]
    return data.map(flip, "x", num_parallel_workers=1).batch(4)


class Log(train.Callback):
    """The inputs of the training, with a random number of the program for each step; it stops at a given step."""

    def __init__(self, crash_at=None, draws=True):
        super().__init__()
        self.crash_at, self.draws, self.steps = crash_at, draws, []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        x, loss = params.train_dataset_element[0], params.net_outputs.loss
        draw = float(np.random.rand()) if self.draws else None
        step = [params.cur_epoch_num, params.cur_step_num, x.asnumpy().tolist(), float(loss.asnumpy()), draw]
        self.steps.append(step)
        if params.cur_step_num == self.crash_at:
            raise KeyboardInterrupt


def build(**settings):
    ms.set_seed(3)
    network = nn.Dense(3, 1)
    optimizer = momentum(network, [0.05, 0.04, 0.03, 0.02] * 9)
    loss_cell = GradAccumulation(mse(network), 2)
    return network, Model(loss_cell, optimizer=optimizer, accumulation_steps=3, check_loss=False, **settings)


def bytes_of(model):
    return [item.asnumpy().tobytes() for item in model.train_network.get_parameters()]


def fit(make_data, epochs, callbacks, **settings):
    _, model = build(**settings)
    with suppress(KeyboardInterrupt):
        model.train(epochs, make_data(), callbacks=callbacks, resume=True)
    return bytes_of(model)


@pytest.mark.parametrize(
    "make_data,crash_at", [(in_memory, 2), (in_memory, 5), (in_memory, 9), (from_python, 5), (with_noise, 9)]
)
def test_a_training_that_was_killed_goes_on_bit_for_bit(make_data, crash_at, tmp_path):
    # Where the pipeline draws in its threads, what the program draws beside it changes what these get.
    draws = make_data is in_memory
    straight, first, second = Log(draws=draws), Log(crash_at, draws=draws), Log(draws=draws)
    end = fit(make_data, 3, [straight, StateCheckpoint(tmp_path / "straight")])
    fit(make_data, 3, [first, StateCheckpoint(tmp_path / "states", save_checkpoint_steps=2)])
    # Of the step that has crashed nothing is saved.
    saved = {2: 0, 5: 4, 9: 8}[crash_at]
    assert saved == 0 or load_state(build()[1], tmp_path / "states").batches == saved
    assert fit(make_data, 3, [second, StateCheckpoint(tmp_path / "states")]) == end
    assert first.steps == straight.steps[: len(first.steps)]
    assert second.steps == straight.steps[saved:]
    assert straight.steps[0][2] != straight.steps[5][2]  # each pass has its own order


@pytest.mark.parametrize("last_window", ["apply", "drop", "carry"])
def test_a_pass_that_ends_in_mid_window_is_resumed_after_it(last_window, tmp_path):
    end = fit(in_memory, 3, [StateCheckpoint(tmp_path / "straight")], last_window=last_window)
    fit(in_memory, 1, [StateCheckpoint(tmp_path / "states")], last_window=last_window)
    assert fit(in_memory, 3, [StateCheckpoint(tmp_path / "states")], last_window=last_window) == end


def test_data_without_a_seed_is_resumed_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr(ms, "set_seed", lambda seed: None)
    before = ds.config.get_seed()
    ds.core.config._config.set_seed(5489)  # what is not set by anybody
    try:
        straight, first, second = Log(), Log(7), Log()
        save = {"save_checkpoint_steps": 1}
        fit(in_memory, 3, [first, StateCheckpoint(tmp_path / "states", **save)])
        fit(in_memory, 3, [second, StateCheckpoint(tmp_path / "states", **save)])
        fit(in_memory, 3, [straight, StateCheckpoint(tmp_path / "other", **save)])
    finally:
        ds.core.config._config.set_seed(before)
    passes = [[step[2] for step in [*first.steps[:6], *second.steps] if step[0] == epoch] for epoch in (1, 2, 3)]
    rows = [sorted(row for x in each for row in x) for each in passes]
    assert rows[0] == rows[1] == rows[2] == sorted(INPUTS[:20].tolist())
    assert [step[2] for step in straight.steps] != [x for each in passes for x in each]  # it is random indeed


def test_a_finished_training_is_left_alone_and_a_longer_one_goes_on(tmp_path):
    log = Log()
    end = fit(in_memory, 2, [StateCheckpoint(tmp_path)])
    fit(in_memory, 2, [log, StateCheckpoint(tmp_path)])
    assert log.steps == []
    assert fit(in_memory, 3, [log, StateCheckpoint(tmp_path)]) != end
    assert [step[:2] for step in log.steps] == [[3, step] for step in range(11, 16)]


class Signals(train.Callback):
    """Sends the program a signal in step 7; keeps what has been said by then."""

    def __init__(self, number, capfd):
        self.number, self.capfd, self.said = number, capfd, ""

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 7:
            os.kill(os.getpid(), self.number)
            self.said += self.capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_program(number, tmp_path, capfd):
    before = signal.getsignal(number)
    straight, first, second, signals = Log(), Log(), Log(), Signals(number, capfd)
    end = fit(in_memory, 3, [straight, StateCheckpoint(tmp_path / "straight")])
    # Once a graph has run in this process, MindSpore turns a Ctrl-C into a SIGTERM.
    with pytest.raises(SystemExit) if number == signal.SIGTERM else suppress(SystemExit) as exit_status:
        fit(in_memory, 3, [first, signals, StateCheckpoint(tmp_path / "states")])
    if number == signal.SIGTERM:
        assert exit_status.value.code == 143
    else:
        assert (
            f"StateCheckpoint: the training saves its state into {tmp_path}/states, and ends." == signals.said.strip()
        )
    assert len(first.steps) == 7 and signal.getsignal(number) == before
    assert fit(in_memory, 3, [second, StateCheckpoint(tmp_path / "states")]) == end
    assert first.steps + second.steps == straight.steps


def test_ctrl_c_is_left_to_a_program_that_ignores_it(tmp_path, capfd):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    log, ignored = Log(), Signals(signal.SIGINT, capfd)
    try:
        fit(in_memory, 2, [log, ignored, StateCheckpoint(tmp_path)])
        assert ignored.said == "" and len(log.steps) == 10
    finally:
        signal.signal(signal.SIGINT, before)


def test_evaluation_between_the_passes_changes_nothing(tmp_path):
    def run(epochs, folder, **settings):
        ms.set_seed(3)
        network = nn.Dense(3, 1)
        model = Model(network, nn.MSELoss(), momentum(network, 0.05), metrics={"mse"})
        model.fit(epochs, in_memory(), in_memory(), callbacks=[StateCheckpoint(folder)], resume=True)
        return network.weight.asnumpy().tobytes()

    straight = run(3, tmp_path / "straight")
    run(1, tmp_path / "states")
    assert run(3, tmp_path / "states") == straight


def test_states_are_saved_when_asked_for(tmp_path):
    def numbers(**settings):
        folder = tmp_path / str(settings)
        _, model = build()
        model.train(2, in_memory(), callbacks=[StateCheckpoint(folder, keep_checkpoint_max=99, **settings)])
        found = sorted(folder.glob("state-*"))
        return [load_state(build()[1], state).batches for state in found]

    assert numbers() == [5, 10]
    assert numbers(save_checkpoint_steps=4) == [4, 5, 8, 10]
    assert numbers(save_checkpoint_seconds=1e-9) == list(range(1, 11))
    assert numbers(save_checkpoint_seconds=1e9) == [5, 10]


def saving_at_7(model, folder):
    return AtStep(lambda context: context.original_args().cur_step_num == 7 and save_state(model, folder))


def test_a_state_that_is_saved_and_loaded_by_hand_has_its_place_in_the_data(tmp_path):
    straight, log = Log(), Log()
    _, model = build()
    model.train(2, in_memory(), callbacks=[saving_at_7(model, tmp_path), straight])
    end = bytes_of(model)
    _, model = build()
    load_state(model, tmp_path)
    # As a program does that is ended before it trains.
    save_state(model, tmp_path / "again")
    _, model = build()
    load_state(model, tmp_path / "again")
    model.train(2, in_memory(), callbacks=log, resume=True)
    assert [step[:-1] for step in log.steps] == [step[:-1] for step in straight.steps[7:]]
    assert bytes_of(model) == end
    save_state(model, tmp_path / "after")


@pytest.mark.parametrize("place", [5, {}, {"epoch": "0", "batches": 2}])
def test_a_step_takes_a_models_state_unless_its_place_is_damaged(place, tmp_path):
    _, model = build()
    model.train(2, in_memory(), callbacks=saving_at_7(model, tmp_path))
    _, model = build()
    assert load_state(model.train_network, tmp_path).epoch == 1
    manifest = tmp_path / "state-000001" / "manifest.json"
    known = json.loads(manifest.read_text())
    known["ranks"][0]["data"] = [place]
    manifest.write_text(json.dumps(signed(known)))
    with pytest.raises(ValueError, match="Nothing was changed."):
        load_state(model.train_network, tmp_path)


def test_what_cannot_be_resumed_is_told(tmp_path):
    _, model = toy()
    data = in_memory()
    with refuses(ValueError, "'callbacks'"):
        model.train(1, data, resume=True)
    with refuses(ValueError, "'initial_epoch'"):
        model.train(2, data, callbacks=[StateCheckpoint(tmp_path)], initial_epoch=1, resume=True)
    with refuses(TypeError, "'resume'"):
        model.train(2, data, resume=1)
    network = line()
    stock = ms.Model(mse(network), optimizer=sgd(network))
    with refuses(ValueError, "'model'"):
        stock.train(1, data, callbacks=StateCheckpoint(tmp_path))
    fit(in_memory, 1, [StateCheckpoint(tmp_path)])
    with refuses(ValueError, "data with 5 batches on each of 1 processes"):
        fit(lambda: in_memory().take(3), 2, [StateCheckpoint(tmp_path)])
