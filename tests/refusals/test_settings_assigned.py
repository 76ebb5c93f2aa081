"""A setting that is assigned after its object was built is obeyed or refused."""

import inspect

import pytest
from linear_toy import X, batches, descend, line, toy, toy_step, weight_of
from loop_toy import optimizer_of, toy_loop
from mindspore import Tensor, nn
from refusal import refuses

import ms_gradaccum
from ms_gradaccum import GradAccumulation

pytestmark = pytest.mark.usefixtures("eager")


OBJECTS = {
    "Accumulator": lambda: toy_loop(2)[1],
    "TrainOneStepCell": lambda: toy_step()[1],
    "GradAccumulation": lambda: GradAccumulation(line(), 2),
    "Model": lambda: toy(accumulation_steps=3)[1],
    "ClipByGlobalNorm": lambda: ms_gradaccum.ClipByGlobalNorm(1.0),
    "ClipByValue": lambda: ms_gradaccum.ClipByValue(1.0),
    "ClipByGroupNorm": lambda: ms_gradaccum.ClipByGroupNorm({"weight": 1.0}),
    "MixedPrecision": lambda: ms_gradaccum.MixedPrecision("float16"),
    "AccumulationConfig": lambda: ms_gradaccum.AccumulationConfig(2),
    "DataParallel": ms_gradaccum.DataParallel,
    "HSDP": ms_gradaccum.HSDP,
    "Reduced": ms_gradaccum.Reduced,
    "EMA": ms_gradaccum.EMA,
    "StateCheckpoint": lambda: ms_gradaccum.StateCheckpoint("folder"),
    "ProgressBar": ms_gradaccum.ProgressBar,
    "MetricsLogger": lambda: ms_gradaccum.MetricsLogger("folder"),
    "TokenMeanLoss": lambda: ms_gradaccum.TokenMeanLoss(line()),
    "GradCacheLoss": lambda: ms_gradaccum.GradCacheLoss(line(), nn.MSELoss()),
    "ContrastiveLoss": ms_gradaccum.ContrastiveLoss,
    "ReplayDropout": ms_gradaccum.ReplayDropout,
}
SYNONYMS = (
    "accumulation_steps gradient_accumulation_steps grad_accumulation_steps accum_steps micro_size num_microbatches "
    "max_grad_norm clip_grad grad_clip clip_value amp_level loss_scale_manager grad_scaler drop_remainder use_jit"
)
OBEYED = {("GradAccumulation", "micro_size"), ("Model", "last_window")}


@pytest.mark.parametrize("name", OBJECTS)
def test_each_setting_of_each_object_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built = OBJECTS[name]()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    settings = [each.name for each in inspect.signature(type(built)).parameters.values() if each.kind in kinds]
    assert settings
    for setting in settings:
        if (name, setting) not in OBEYED:
            with pytest.raises((ValueError, AttributeError), match=setting):
                setattr(built, setting, object())


def test_settings_of_another_object_are_refused_too():
    for built in (toy_loop(2)[1], toy_step()[1]):
        for name in SYNONYMS.split():
            with refuses(ValueError, f"'{name}'", "cannot be changed"):
                setattr(built, name, 8)


def test_a_setting_that_is_the_same_and_other_attributes_are_taken():
    accumulator = toy_loop(2)[1]
    accumulator.config, accumulator.note = accumulator.config, "mine"
    assert accumulator.note == "mine" and optimizer_of(accumulator) is not None


def test_another_micro_size_is_obeyed_if_it_is_one():
    network, train_step = toy_step(2)
    train_step.network.micro_size = 4
    with refuses(ValueError, "'micro_size'"):
        train_step.network.micro_size = 0
    train_step(*map(Tensor, (X, 2 * X)))
    assert weight_of(network) == pytest.approx(2.04)


def test_another_last_window_is_obeyed_if_it_is_one():
    network, model = toy(accumulation_steps=3)
    with refuses(ValueError, "'last_window'"):
        model.last_window = "keep"
    model.last_window = "drop"
    model.train(1, batches(2))
    assert model.train_network.open_batches() == 0
    assert weight_of(network) == pytest.approx(descend(range(1, 7)))
