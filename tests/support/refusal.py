"""Helpers of the tests of errors: sentences, compared word by word."""

import re

import pytest
from linear_toy import line, sgd
from mindspore import nn

from ms_gradaccum import TrainOneStepCell

AXIS = "Give batch_axis one axis for all inputs, or one entry per input, None for one that is not split."
FOREIGN_TRAIN_CELL = "the train cell around it is not one of ms_gradaccum"
# A loss that the compiler has left to the Python interpreter.
NO_TENSOR = (
    "For 'GradAccumulation', the argument 'network' must return its mean loss, a floating-point scalar, first, "
    "but got no tensor but a Python object, which has no gradient. Return a tensor, alone or first in a tuple, "
    "that is computed from tensors. In GRAPH mode these turn it into a Python object: an attribute of a cell that "
    "construct sets (a count, an average: make it a Parameter), asnumpy(), float(), Tensor(), dict(zip()), getattr() "
    "with a default, and classes that are not Cells. MindSpore's own step runs with it, but does not train the weights."
)


def raises(error, sentence):
    """Expect exactly this sentence, with nothing before or after it."""
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")


def loss_cell():
    return nn.WithLossCell(line(), nn.MSELoss())


def typed(value):
    return f"{value!r} of type {type(value).__name__}"


def new_step(network=None, optimizer=None, **settings):
    cell = loss_cell()
    return TrainOneStepCell(network or cell, sgd(cell) if optimizer is None else optimizer, **settings)
