"""A Model obeys its settings, or says that nobody would."""

from contextlib import suppress

import mindspore as ms
import numpy as np
import pytest
from linear_toy import batches, descend, line, mse, sgd, weight_of
from mindspore import nn
from refusal import refuses, told
from step_probe import Around, OwnTrainStep

from ms_gradaccum import ClipByGlobalNorm, DataParallel, GradAccumulation, Model, TrainOneStepCell

pytestmark = pytest.mark.usefixtures("eager")


def parts():
    network = line()
    return network, mse(network), sgd(network)


CELLS = {
    "own": lambda loss, optimizer: OwnTrainStep(loss, optimizer),
    "hidden": lambda loss, optimizer: OwnTrainStep(loss, optimizer, hides=True),
    "stock": lambda loss, optimizer: nn.TrainOneStepCell(loss, optimizer),
    "around ours": lambda loss, optimizer: Around(TrainOneStepCell(loss, optimizer, check_loss=False)),
}


SETTINGS = {
    "accumulation_steps": 4,
    "clip": ClipByGlobalNorm(1.0),
    "mixed_precision": "fp16",
    "parallel": DataParallel(),
    "last_window": "drop",
    "bad_micro_batch": "drop",
    "compile": True,
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_beside_a_training_cell_are_refused(kind, name):
    _, loss, optimizer = parts()
    with refuses(ValueError, name, "loss cell inside"):
        Model(CELLS[kind](loss, optimizer), **{name: SETTINGS[name]})


@pytest.mark.parametrize("kind", CELLS)
def test_a_training_cell_without_settings_trains_as_with_mindspores_model(kind):
    network, loss, optimizer = parts()
    Model(CELLS[kind](loss, optimizer)).train(1, batches(2))
    # An update for each of the four batches of the toy.
    assert weight_of(network) == pytest.approx(descend((1, 2), (3, 4), (5, 6), (7, 8)), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 4}])
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: GradAccumulation(loss, 2)])
def test_a_training_without_an_optimizer_ends_before_anything_runs(wrap, settings):
    network, loss, _ = parts()
    model = Model(wrap(loss), **settings)
    begun = []
    beginning = ms.train.LambdaCallback(on_train_begin=begun.append)
    for train in (model.train, model.fit):
        with refuses(ValueError, "'optimizer'", "given for a training"):
            train(1, batches(2), callbacks=[beginning])
    assert not begun and weight_of(network) == 0.0


def test_a_model_without_an_optimizer_evaluates_whatever_its_settings():
    network = line()
    model = Model(network, nn.MSELoss(), metrics={"mse"}, accumulation_steps=4)
    x = np.arange(1, 9, dtype=np.float32)
    assert model.eval(batches(2))["mse"] == pytest.approx(np.mean((2 * x) ** 2))


@pytest.mark.parametrize("name", ["network", "loss_fn", "eval_network"])
def test_an_optimizer_in_another_place_is_refused(name):
    _, loss, optimizer = parts()
    with refuses(TypeError, f"'{name}'", "Give it as optimizer="):
        Model(**{"network": loss, name: optimizer})


def warned(rates, epochs=2, passes=1, **settings):
    network, loss, _ = parts()
    settings = {"accumulation_steps": 4, "check_loss": False} | settings
    model = Model(loss, optimizer=sgd(network, rates), **settings)
    with told("list of learning rates") as said:
        for _ in range(passes):
            with suppress(RuntimeError):  # MindSpore's own, op by op at the end of a short list.
                model.train(epochs, batches(2))
    return said


def test_a_list_of_rates_for_each_batch_is_said_once():
    """Two epochs of four batches make two updates."""
    (text,) = warned([0.001] * 8, passes=2)
    assert "got 8 for 2 updates of 8 batches" in text


# The rates, the settings of two passes of four batches, and whether they are said.
RATES = [
    ([0.001] * 3, {}, True),  # Neither a list for all batches nor one for all updates.
    ([0.001], {"accumulation_steps": 3, "last_window": "drop"}, True),  # Two updates, one each pass.
    ([0.001] * 2, {"accumulation_steps": 3}, True),  # Four updates, two each pass.
    ([0.001] * 2, {}, False),
    ([0.001] * 8, {"accumulation_steps": 1}, False),
    ([0.001] * 50, {"accumulation_steps": 1}, False),
    ([0.001] * 4, {"accumulation_steps": 3}, False),
    ([0.001] * 2, {"accumulation_steps": 3, "last_window": "drop"}, False),
    ([0.001] * 2, {"accumulation_steps": 3, "last_window": "carry"}, False),
    ([0.001] * 5, {"epochs": 1, "passes": 5}, False),  # For several trainings.
    (0.001, {}, False),
    (nn.CosineDecayLR(0.0, 0.001, 8), {}, False),
]


@pytest.mark.parametrize("rates, settings, said", RATES)
def test_lists_of_other_lengths_than_there_are_updates_are_said(rates, settings, said):
    assert len(warned(rates, **settings)) == said
