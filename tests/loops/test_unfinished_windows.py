"""Warnings of what a loop leaves open or changes inside a window: open windows, rates that move, half updates."""

import copy
import gc
import itertools
import pickle
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from linear_toy import X, batches, line, mse, sgd, toy, toy_step, weight_of
from loop_toy import FOUR, adjustable_sgd, optimizer_of, own_loop, toy_loop, train, updates_of
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.experimental.optim.lr_scheduler import StepLR
from refusal import no_warning, refuses, told, warns

from ms_gradaccum import Accumulator, Model, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")


def test_a_window_that_is_left_open_is_named_when_the_next_pass_begins():
    _, accumulator = toy_loop(4)
    prepared = accumulator.prepare(FOUR)
    updates_of(accumulator, itertools.islice(prepared, 3))
    with warns("3 batches was still open when the next pass") as caught:
        updates_of(accumulator, itertools.islice(prepared, 2))
        updates_of(accumulator, itertools.islice(prepared, 2))
    assert len(caught) == 1


@pytest.mark.parametrize(("lengths", "found"), [((4, 4, 4), ""), ((4, 6, 4), 6), ((4, 3, 4), 3)])
def test_a_pass_over_other_data_than_its_size_says_is_named(lengths, found):
    passes = iter(lengths)
    rows = GeneratorDataset(lambda: ((X[0], 2 * X[0]) for _ in range(next(passes))), ["x", "y"], shuffle=False).batch(1)
    rows.get_dataset_size = lambda: 4
    network = line()
    with told("must yield the 4 batches") as said:
        Model(network, nn.MSELoss(), sgd(network), accumulation_steps=2).train(3, rows, dataset_sink_mode=False)
    assert [re.search(r"but got (\d+)", text)[1] for text in said] == ([str(found)] if found else [])


# What follows the backward pass of each batch. A step makes an empty window, which has a warning of its own.
THROWN_AWAY = [
    ([["zero_grad"]] * 4, 1),
    ([["zero_grad", "step"]] * 4, 2),
    ([["zero_grad"], ["step"], ["zero_grad"], ["zero_grad"]], 0),
]


@pytest.mark.parametrize("calls, count", THROWN_AWAY)
def test_a_loop_that_throws_its_windows_away_from_the_beginning_is_named(calls, count):
    _, accumulator = toy_loop(1)
    with told() as said:
        for each, names in zip(FOUR, calls):
            with accumulator.accumulate():
                accumulator.backward(*each)
                for name in names:
                    getattr(accumulator, name)()
    assert len(said) == count and any("nothing has been" in each for each in said) == (count > 0)


PROGRAM = """
import numpy as np
from mindspore import Tensor, nn
from ms_gradaccum import Accumulator, TrainOneStepCell

def parts():
    network = nn.Dense(1, 1)
    return nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1)

accumulator = Accumulator(*parts(), 3)
step = TrainOneStepCell(*parts(), accumulation_steps=3)
x = Tensor(np.ones((2, 1), np.float32))
for _ in range(4):
    step(x, x)
    with accumulator.accumulate():
        accumulator.backward(x, x)
        accumulator.step()
"""


def trained_loop():
    _, accumulator = own_loop(3)
    updates_of(accumulator, FOUR)
    return accumulator


def trained_step():
    _, step = toy_step(accumulation_steps=3)
    for each in FOUR:
        step(*each)
    return step


@pytest.mark.parametrize("make, place", [(trained_loop, "its Accumulator"), (trained_step, "its step")])
def test_a_window_that_nobody_finishes_is_named_once_at_the_end(make, place):
    with told("still open") as said:
        make()
        gc.collect()
    assert len(said) == 1 and f"1 batch was still open at the end of {place}" in said[0]


@pytest.mark.parametrize("make", [trained_loop, trained_step])
@pytest.mark.parametrize("end", ["flush", "drop"])
def test_a_window_that_is_finished_is_not_named(make, end):
    with no_warning():
        getattr(make(), end)()
        gc.collect()


@pytest.mark.parametrize("last_window", ["apply", "drop", "carry"])
def test_a_model_finishes_its_windows_or_was_told_to_carry_them(last_window):
    _, model = toy(accumulation_steps=3, last_window=last_window, check_loss=True)
    with no_warning():
        model.train(1, batches(2))
        del model
        gc.collect()


def test_windows_that_are_left_open_are_named_once_at_the_end_of_the_program():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    for place in ("Accumulator", "step"):
        assert done.stderr.count(f"1 batch was still open at the end of its {place}") == 1


@pytest.mark.parametrize("end", ["carried", "held open", "evaluated"])
def test_windows_that_are_carried_or_held_open_are_not_named(end):
    _, accumulator = toy_loop(3, sync_with_dataloader=end != "carried")
    prepared, other = accumulator.prepare(FOUR, FOUR)
    with no_warning():
        for _ in range(2):
            if end == "held open":
                with accumulator.no_sync():
                    updates_of(accumulator, prepared)
                continue
            for _ in train(accumulator, prepared if end == "carried" else itertools.islice(prepared, 2)):
                if end == "evaluated":
                    assert len(list(other)) == 4
            if end == "evaluated":
                accumulator.flush()
        accumulator.drop()


def test_a_rate_that_moves_inside_a_window_is_named():
    _, accumulator = own_loop(4, make_optimizer=adjustable_sgd)
    scheduler = StepLR(optimizer_of(accumulator), 1, 0.5)
    with told("rate has changed") as said:
        for _ in train(accumulator, FOUR * 2):
            scheduler.step()
    assert len(said) == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rate_that_moves_between_windows_is_not_named(steps):
    _, accumulator = own_loop(steps, make_optimizer=adjustable_sgd)
    scheduler = accumulator.prepare(StepLR(optimizer_of(accumulator), 1, 0.5))
    with no_warning():
        list(train(accumulator, FOUR * 2, scheduler))


@pytest.mark.parametrize("face", ["steps", "Accumulator", "one batch", "gradients first", "another network"])
def test_a_network_that_another_step_updates_inside_a_window_is_named(face):
    network, follower = line(), line()
    steps = 1 if face == "one batch" else 2
    # As a discriminator follows a generator.
    losses = [mse(follower), mse(network if face == "another network" else nn.SequentialCell(network, follower))]
    optimizers = [sgd(follower), sgd(network)]

    def run():
        if face != "Accumulator" and face != "gradients first":
            both = [TrainOneStepCell(*each, accumulation_steps=steps) for each in zip(losses, optimizers)]
            return [step(*batch) for batch in FOUR for step in both]
        accumulator = Accumulator(losses, optimizers, steps)
        for batch in FOUR:
            with accumulator.accumulate():
                accumulator.backward(*batch, network=losses[0])
                if face == "Accumulator":
                    accumulator.step(network=losses[0])
                accumulator.backward(*batch, network=losses[1])
                accumulator.step()

    with told("the gradient of this window mixes two models") as said:
        run()
    assert len(said) == (face in ("steps", "Accumulator"))


def test_a_step_that_is_freed_inside_a_window_has_updated_nothing_there():
    network = line()
    loss = mse(network)
    before = TrainOneStepCell(loss, sgd(network))
    before(*FOUR[0])
    step = TrainOneStepCell(loss, sgd(network), accumulation_steps=2)
    with no_warning():
        step(*FOUR[1])
        del before
        gc.collect()
        step(*FOUR[2])


def test_an_update_that_fails_after_another_ones_is_named(monkeypatch):
    network = nn.Dense(1, 1, "zeros", "zeros")
    optimizers = [nn.SGD([network.weight], 0.02), nn.SGD([network.bias], 0.02)]
    accumulator = Accumulator(mse(network), optimizers)

    def fails(*args):
        raise OSError

    monkeypatch.setattr(accumulator.windows[0].ends.of_optimizers[1], "finish", fails)
    accumulator.backward(*FOUR[0])
    with warns("update of optimizer"), pytest.raises(OSError):
        accumulator.step()
    assert weight_of(network) != 0


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, pickle.dumps])
def test_what_trains_is_not_copied(make_copy):
    for trained in (toy_step()[1], toy_loop(2)[1]):
        with refuses(TypeError, "training step"):
            make_copy(trained)


def test_a_second_thread_in_a_batch_is_refused():
    network, step = toy_step()
    errors = []

    def called():
        try:
            step(*FOUR[1])
        except RuntimeError as error:
            errors.append(str(error))

    def meanwhile(event):
        thread = threading.Thread(target=called)
        thread.start()
        thread.join()

    with step.events.listening([SimpleNamespace(on_micro_batch_begin=meanwhile)]):
        step(*FOUR[0])
    assert errors and "a batch began while another one was still running" in errors[0]
    assert weight_of(network) == pytest.approx(0.2, rel=1e-5)
