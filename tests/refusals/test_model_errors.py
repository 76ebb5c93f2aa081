"""What Model refuses, in whole sentences, and that a refusal leaves nothing behind."""

import mindspore as ms
import pytest
from linear_toy import batches, hsdp, line, sgd, toy, weight_of, whole
from mindspore import nn

from ms_gradaccum import GradAccumulation, Model, TrainOneStepCell

LAST_WINDOW = "'apply' makes one more update, 'drop' none, and 'carry' goes on with the next pass."
WRONG_SETTINGS = [
    (
        {"amp_level": "O4"},
        ValueError,
        "For 'Model', the argument 'amp_level' must be one of 'O0', 'O1', 'O2', 'O3', 'auto', but got 'O4'. "
        "mixed_precision has more names and settings.",
    ),
    (
        {"boost_level": "O1"},
        ValueError,
        "For 'Model', the argument 'boost_level' must be one of 'O0', but got 'O1'. "
        "Boost has an accumulation of its own.",
    ),
    (
        {"keep_batchnorm_fp32": None, "acc_level": "O0"},
        ValueError,
        "For 'Model', the arguments acc_level, keep_batchnorm_fp32 are unknown or do not work with accumulation.",
    ),
    (
        {"last_window": "keep"},
        ValueError,
        f"For 'Model', the argument 'last_window' must be one of 'apply', 'drop', 'carry', but got 'keep'. "
        f"{LAST_WINDOW}",
    ),
    (
        {"last_window": True},
        TypeError,
        f"For 'Model', the argument 'last_window' must be one of 'apply', 'drop', 'carry', but got True of type bool. "
        f"{LAST_WINDOW}",
    ),
    (
        {"accumulation_steps": 0},
        ValueError,
        "For 'TrainOneStepCell', the argument 'accumulation_steps' must be a positive int, but got 0. "
        "It counts the batches of one update; 1 means an update per batch.",
    ),
    (
        {"clip": 1.0},
        TypeError,
        "For 'TrainOneStepCell', the argument 'clip' must be a ClipByGlobalNorm, a ClipByGroupNorm, a ClipByValue "
        "or None, but got 1.0. For example clip=ClipByGlobalNorm(1.0).",
    ),
]


@pytest.mark.parametrize("settings, error, text", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_in_a_sentence(settings, error, text):
    with pytest.raises(error, match=whole(text)):
        toy(**settings)


def test_a_second_model_with_the_same_optimizer_is_refused():
    network = line()
    optimizer = sgd(network)
    model = Model(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer)
    text = (
        "For 'TrainOneStepCell', the argument 'optimizer' must be one that nothing else trains with, but got the "
        "optimizer of another TrainOneStepCell. Two training cells would divide its windows between them: use the "
        "first one, or delete it."
    )
    with pytest.raises(ValueError, match=whole(text)):
        Model(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer)
    model.train(1, batches(8))
    assert weight_of(network) == pytest.approx(2.04)


def test_a_training_step_together_with_what_it_already_has_is_refused():
    network = line()
    train_step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), sgd(network))
    text = (
        "For 'Model', the argument 'network' must be a loss cell, but got a TrainOneStepCell together with a loss_fn "
        "or an optimizer. Give Model(train_step), or the cell inside it with the optimizer."
    )
    for more in ({"optimizer": sgd(network)}, {"loss_fn": nn.MSELoss()}):
        with pytest.raises(ValueError, match=whole(text)):
            Model(train_step, **more)
    text = (
        "For 'Model', the argument 'network' must be a loss cell, but got a TrainOneStepCell with its own settings. "
        "Give accumulation_steps, clip and the like to the TrainOneStepCell."
    )
    with pytest.raises(ValueError, match=whole(text)):
        Model(train_step, accumulation_steps=2)


STRANGER = (
    "For 'TrainOneStepCell', the argument 'optimizer' must be one over parameters of the network, but got 1 "
    "parameters that it does not have, first 'weight'. Build it from network.trainable_params()."
)


def test_the_optimizer_of_another_network_is_refused():
    with pytest.raises(ValueError, match=whole(STRANGER)):
        Model(GradAccumulation(line(), 2), nn.MSELoss(), sgd(line()))


def test_a_refused_model_leaves_the_parallel_context_as_it_was():
    names = ("parallel_mode", "enable_parallel_optimizer", "dataset_strategy", "gradients_mean")

    def context():
        return {name: ms.get_auto_parallel_context(name) for name in names}

    before = context()
    network = hsdp(GradAccumulation(nn.WithLossCell(line(), nn.MSELoss()), 2))
    try:
        # Stock Model sets it first and does not come to setting it back.
        with pytest.raises(TypeError):
            ms.Model(network, optimizer="none")
        assert context() != before
    finally:
        ms.reset_auto_parallel_context()
    assert context() == before
    with pytest.raises(ValueError, match=whole(STRANGER)):
        Model(network, optimizer=sgd(line()))
    assert context() == before
