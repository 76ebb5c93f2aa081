"""StepOutput: three items as of MindSpore's steps, eight fields, and its loss where a number is wanted."""

import copy
import math
import pickle

import numpy as np
import pytest
import step_probe
from linear_toy import X, line, mse, sgd, toy_step, weight_of
from mindspore import Tensor, amp, nn
from refusal import refuses
from step_probe import number, tensors

from ms_gradaccum import MixedPrecision, StepOutput, TrainOneStepCell

FIELDS = ("loss", "overflow", "loss_scale", "updated", "grad_norm", "clipped_grad_norm", "learning_rate", "weight")


def output_of(loss=2.5):
    """An output whose other fields are far from its loss, so that a mean over them would show."""
    others = {"loss_scale": 1024.0, "grad_norm": 70.0, "clipped_grad_norm": 1.0, "learning_rate": 0.02}
    return step_probe.output_of(loss=loss, weight=800.0, **others)


def test_a_step_unpacks_as_mindspores_step_with_a_loss_scale(mode):
    theirs = line()
    stock = nn.TrainOneStepWithLossScaleCell(mse(theirs), sgd(theirs), Tensor(4.0))
    _, step = toy_step(mixed_precision=amp.FixedLossScaleManager(4.0, False))
    assert number(step.scale_sense) == number(stock.scale_sense) == 4 and number(toy_step()[1].scale_sense) == 1
    loss, overflow, scale = output = step(*tensors(X, 2 * X))
    assert (number(loss), number(overflow), number(scale)) == (pytest.approx(102), False, 4.0)
    assert len(output) == 3 and output[-1] is scale and output.loss is loss and output.overflow is overflow
    assert number(output.weight) == 8 and output.is_updated


def test_the_scale_of_the_step_follows_its_changes(eager):
    _, step = toy_step(mixed_precision=MixedPrecision(init_scale=64.0, growth_interval=1))
    assert number(step.scale_sense) == 64
    used = step(*tensors(X, 2 * X)).loss_scale
    assert (number(used), number(step.scale_sense)) == (64, 128)


def test_the_numbers_of_several_outputs_are_those_of_their_losses():
    """A tuple of eight would have a mean of all that it holds."""
    outputs = [output_of(2.5), output_of(0.5)]
    assert np.mean(outputs) == 1.5 and np.array(outputs).shape == (2,)
    assert sum(outputs) == 3.0 and max(outputs) is outputs[0] and min(outputs) is outputs[1]
    assert sorted(outputs)[0] is outputs[1]
    total = 0.0
    for output in outputs:
        total += output
    assert total / len(outputs) == 1.5
    assert np.isfinite(output_of()) and not np.isfinite(output_of(math.nan)) and math.isnan(output_of(math.nan))


@pytest.mark.parametrize(
    ("of_output", "of_loss"),
    [
        (lambda it: it + 1, 3.5),
        (lambda it: 5 / it, 2.0),
        (lambda it: np.float32(1) + it, 3.5),
        (lambda it: np.ones(2) @ (np.ones(2) * it), 5.0),
        (lambda it: it < 3, True),
        (lambda it: it > Tensor(2.0), True),
        (lambda it: it == 2.5, True),
        (lambda it: float(it), 2.5),
        (lambda it: it.item(), 2.5),
        (lambda it: it.asnumpy(), 2.5),
        (lambda it: np.asarray(it), 2.5),
        (lambda it: float(Tensor(it)), 2.5),
        (lambda it: f"{it:.3f}", "2.500"),
        (lambda it: str(it), "2.5"),
    ],
)
def test_an_output_is_its_loss_where_a_number_is_wanted(of_output, of_loss):
    assert of_output(output_of()) == of_loss


def test_a_tensor_on_the_left_is_refused_rather_than_added_to_three_items():
    with pytest.raises(TypeError):
        Tensor(1.0) + output_of()


def test_an_output_has_the_methods_of_a_named_tuple():
    output = output_of()
    assert StepOutput._fields == FIELDS == tuple(output._asdict())
    assert output == tuple(output) and output != output_of(1.0) and output != 1.0 and output != "2.5"
    changed = output._replace(weight=Tensor(3.0))
    assert number(changed.weight) == 3 and number(output.weight) == 800 and changed.loss is output.loss
    with pytest.raises(TypeError):
        output._replace(lr=Tensor(0.1))
    in_order = StepOutput(*output._asdict().values())
    for same in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output)), in_order):
        assert isinstance(same, StepOutput) and hash(output) == hash(tuple(output))
        assert [number(item) for item in same._asdict().values()] == [2.5, 0, 1024, 1, 70, 1, pytest.approx(0.02), 800]
    assert repr(output) == (
        "StepOutput(loss=2.5, overflow=False, loss_scale=1024.0, updated=True, grad_norm=70.0, clipped_grad_norm=1.0, "
        "learning_rate=0.02, weight=800.0)"
    )


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_read_alone_and_is_an_attribute_of_the_class(field):
    """A value that was assigned would not be that of the items."""
    with pytest.raises(AttributeError):
        setattr(output_of(), field, Tensor(3.0))
    assert hasattr(StepOutput, field)


@pytest.mark.parametrize("sens", [None, 1, 1.0])
def test_arguments_of_mindspores_cell_that_ask_for_nothing_are_taken(sens, eager):
    network = line()
    step = TrainOneStepCell(mse(network), sgd(network), sens, False)
    step(*tensors(X, 2 * X))
    assert weight_of(network) == pytest.approx(2.04)


@pytest.mark.parametrize(
    ("sens", "return_grad", "error", "name"),
    [
        (1024.0, False, ValueError, "'sens'"),
        ("2", False, TypeError, "'sens'"),
        (None, True, ValueError, "'return_grad'"),
        (None, 1, TypeError, "'return_grad'"),
    ],
)
def test_arguments_of_mindspores_cell_that_ask_for_more_are_refused(sens, return_grad, error, name):
    network = line()
    with refuses(error, "For 'TrainOneStepCell'", name):
        TrainOneStepCell(mse(network), sgd(network), sens=sens, return_grad=return_grad)
