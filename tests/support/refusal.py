"""Helpers of the tests of errors and warnings: they compare a class, an argument's name and a key, not sentences.

`tests/refusals/test_sentences.py` reads the sentences.
"""

import re
import warnings
from contextlib import contextmanager

import pytest
from linear_toy import line, sgd
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import Accumulator, GradAccumulationWarning, Model, TrainOneStepCell


def refuses(error, *keys):
    """Expect an error of this class that contains each key: the name of an argument, or a few words."""
    return pytest.raises(error, match=_containing(keys))


def warns(*keys):
    """Expect a warning of this package that contains each key."""
    return pytest.warns(GradAccumulationWarning, match=_containing(keys))


@contextmanager
def no_warning():
    """Let each warning be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def all_warnings():
    """Yield a list that gets each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextmanager
def told(key=""):
    """Yield a list that has, at the end, the texts of the warnings that contain a key."""
    texts = []
    with all_warnings() as caught:
        yield texts
    texts += [text for each in caught if key in (text := str(each.message))]


def _containing(keys):
    return "(?s)" + "".join(f"(?=.*{re.escape(key)})" for key in keys)


def loss_cell():
    return nn.WithLossCell(line(), nn.MSELoss())


def typed(value):
    return f"{value!r} of type {type(value).__name__}"


def by_step(cell, optimizer, *batch, **settings):
    """A function that trains a batch with a step."""
    step = TrainOneStepCell(cell, optimizer, **settings)
    return lambda: step(*batch)


def by_loop(cell, optimizer, *batch, **settings):
    accumulator = Accumulator(cell, optimizer, **settings)

    def train():
        with accumulator.accumulate():
            accumulator.backward(*batch)
            accumulator.step()

    return train


def by_model(cell, optimizer, *batch, **settings):
    model = Model(cell, optimizer=optimizer, **settings)
    data = NumpySlicesDataset(tuple(each.asnumpy() for each in batch), shuffle=False).batch(len(batch[0]))
    return lambda: model.train(1, data)


FACES = {"TrainOneStepCell": by_step, "Accumulator": by_loop, "Model": by_model}


def new_step(network=None, optimizer=None, **settings):
    cell = loss_cell()
    return TrainOneStepCell(network or cell, sgd(cell) if optimizer is None else optimizer, **settings)
