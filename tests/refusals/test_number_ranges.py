"""Numbers that MindSpore's float32 and int32 cannot hold: refused, where they would have become Inf, 0 or another."""

import numpy as np
import pytest
from linear_toy import line
from mindspore import Tensor, nn
from modelled_window import plan
from refusal import new_step, raises

from ms_gradaccum import (
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    MetricsLogger,
    MixedPrecision,
    TokenMeanLoss,
    TrainOneStepCell,
)

RANGE = "a positive number in the range of float32, 1.18e-38 to 3.4e+38"
INT32 = "a positive int of at most 2147483647"
FLOATS = {
    "max_norm": (ClipByGlobalNorm, "For 'ClipByGlobalNorm', the argument 'max_norm'", "Typical norms are 0.5 to 5."),
    "limit": (ClipByValue, "For 'ClipByValue', the argument 'limit'", "Typical limits are 0.1 to 10."),
    "limits": (
        lambda value: ClipByGroupNorm({"*": value}),
        "For 'ClipByGroupNorm', the argument 'limits['*']'",
        "It is a norm.",
    ),
    "init_scale": (
        lambda value: MixedPrecision(init_scale=value),
        "For 'MixedPrecision', the argument 'init_scale'",
        "The default is 65536.",
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_limit_that_is_infinite_or_zero_as_a_float32(name):
    make, begin, remedy = FLOATS[name]
    for value in (1e39, 1e-39):
        with raises(ValueError, f"{begin} must be {RANGE}, but got {value}. {remedy}"):
            make(value)
    # Python's own floats cannot hold it either.
    with raises(ValueError, f"{begin} must be a positive number, but got {10**400}. {remedy}"):
        make(10**400)
    make(3e38), make(10**38)


def test_the_largest_limit_leaves_the_gradient_alone():
    (grad,) = ClipByGlobalNorm(3.4e38)((Tensor([3.0, 4.0]),), Tensor(5.0))
    np.testing.assert_array_equal(grad.asnumpy(), [3, 4])


def test_a_count_is_an_int32():
    # As an int32 it would be 0, and the scale would grow after each window.
    sentence = f"For 'MixedPrecision', the argument 'growth_interval' must be {INT32}, but got {2**32}. "
    with raises(ValueError, sentence + "It counts windows without overflow."):
        MixedPrecision(growth_interval=2**32)
    sentence = f"For 'TrainOneStepCell', the argument 'accumulation_steps' must be {INT32}, but got {2**31}. "
    with raises(ValueError, sentence + "It counts the batches of one update; 1 means an update per batch."):
        new_step(accumulation_steps=2**31)


def test_the_label_of_padding_is_an_int32():
    # As an int32 it would be class 0.
    sentence = (
        "For 'TokenMeanLoss', the argument 'ignore_index' must be an int from -2147483648 to 2147483647, but got "
    )
    with raises(ValueError, f"{sentence}{2**32}. It is the label of padding."):
        TokenMeanLoss(line(), 2**32)


PLANS = [
    (
        {"dataset_size": 10**12},
        "a training must have at most 100000000 batches on each rank, but got 125000000000. Plan fewer epochs, or "
        "larger batches.",
    ),
    (
        {"epochs": 2**31 - 1},
        f"a training must have at most 100000000 batches on each rank, but got {13 * (2**31 - 1)}. Plan fewer epochs, "
        "or larger batches.",
    ),
    (
        {"ranks": 10**9},
        "the argument 'ranks' must be a positive int of at most 1000000, but got 1000000000. It counts the processes; "
        "1 is a single one.",
    ),
    (
        {"dataset_size": 10**15, "batch_size": 10**9, "epochs": 10**4 - 1, "ranks": 10},
        None,
    ),
    (
        {"learning_rate": [float("nan")] * 13},
        "the argument 'learning_rate[0]' must be a number of at least 0, but got nan. It is the rate of an update.",
    ),
]


@pytest.mark.parametrize("settings, rest", PLANS, ids=[next(reversed(settings)) for settings, _ in PLANS])
def test_a_plan_is_counted_in_the_memory_that_there_is(settings, rest):
    if rest is None:
        many = plan(**{**settings, "epochs": 1})
        assert many.batches == 10**5 and sum(many.update_rows) == 10**15
        return
    with raises(ValueError, f"For 'TrainingPlan', {rest}"):
        plan(**settings)


def test_what_a_function_of_the_rate_returns():
    sentence = "For 'TrainingPlan', the argument 'learning_rate(0)' must be a number, but got None of type NoneType. "
    with raises(TypeError, sentence + "It is the rate of an update."):
        print(plan(learning_rate=lambda update: None).learning_rates)


def test_what_is_logged_is_a_float(tmp_path):
    cell = nn.WithLossCell(line(), nn.MSELoss())
    output = TrainOneStepCell(cell, nn.SGD(cell.trainable_params(), 0.1))(Tensor([[1.0]]), Tensor([[1.0]]))
    logger = MetricsLogger(tmp_path / "run.jsonl")
    sentence = f"For 'MetricsLogger', the argument 'large' must be a number, but got {10**400} of type int. "
    with raises(TypeError, sentence + "Metrics of several values take a name for each."):
        logger.log(output, large=10**400)
    assert (tmp_path / "run.jsonl").read_text() == ""
    logger.close()


def test_labels_are_integers(mode):
    loss = TokenMeanLoss(nn.Dense(1, 2))
    sentence = (
        "For 'TokenMeanLoss', the labels, its last input, must be a tensor of integers, but got a tensor of Float32. "
        "Give the class of each token."
    )
    with pytest.raises(TypeError) as caught:
        loss(Tensor(np.ones((4, 1), np.float32)), Tensor(np.ones(4, np.float32)))
    assert str(caught.value).splitlines()[0] == sentence


class Returns(nn.Cell):
    """A backbone that returns something of its input."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def construct(self, x):
        return self.form(x)


def no_items(x):
    return ()


def a_dict(x):
    return {"logits": x}


def a_number(x):
    return x.sum()


@pytest.mark.parametrize("form", [no_items, a_dict, a_number], ids=lambda form: form.__name__)
def test_a_backbone_returns_logits(form, eager):
    labels = Tensor(1) if form is a_number else Tensor(np.ones(4, np.int32))
    sentence = (
        "For 'TokenMeanLoss', the backbone must return a tensor of logits, alone or before other outputs, but got no "
        "tensor. Give the network that returns logits."
    )
    if form is a_number:
        sentence = (
            "For 'TokenMeanLoss', the backbone must return logits with an axis of classes, but got a scalar. A model "
            "that computes its loss itself goes into GradAccumulation without it: let it return (loss_sum, tokens), in "
            "mindformers with calculate_per_token_loss=True, and set weighted=True."
        )
    with raises(ValueError, sentence):
        TokenMeanLoss(Returns(form))(Tensor(np.ones((4, 1), np.float32)), labels)
