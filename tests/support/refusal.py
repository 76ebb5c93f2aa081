"""Helpers of the tests of errors and warnings: they compare a class, an argument's name and a key, not sentences.

`tests/refusals/test_sentences.py` reads the sentences.
"""

import re

import pytest
from linear_toy import line, sgd
from mindspore import nn

from ms_gradaccum import GradAccumulationWarning, TrainOneStepCell


def refuses(error, *keys):
    """Expect an error of this class that contains each key: the name of an argument, or a few words."""
    return pytest.raises(error, match=_containing(keys))


def warns(*keys):
    """Expect a warning of this package that contains each key."""
    return pytest.warns(GradAccumulationWarning, match=_containing(keys))


def _containing(keys):
    return "(?s)" + "".join(f"(?=.*{re.escape(key)})" for key in keys)


def loss_cell():
    return nn.WithLossCell(line(), nn.MSELoss())


def typed(value):
    return f"{value!r} of type {type(value).__name__}"


def new_step(network=None, optimizer=None, **settings):
    cell = loss_cell()
    return TrainOneStepCell(network or cell, sgd(cell) if optimizer is None else optimizer, **settings)
