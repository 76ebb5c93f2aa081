"""Cells for the tests of `python -m ms_gradaccum test`: in a broken build, op by op, and some that go wrong."""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import mindspore as ms
import numpy as np
import quick_mindspore
from mindspore import Tensor

from ms_gradaccum.checkpoint import state as states
from ms_gradaccum.gradients import buffer
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.parallel.collectives import AllReduce
from ms_gradaccum.tools.self_test import trials
from ms_gradaccum.tools.self_test.training import Cell, Found

# In the name of a cell, before the way in which the build is broken.
IN_BUILD = ", in a broken build: "

quick_mindspore.install()


def tried(cell, fault=""):
    """The cell, with a fault of the package. In PYNATIVE mode nothing is compiled for it."""
    name = f"{cell.name}{IN_BUILD}{fault}" if fault else cell.name
    return replace(cell, name=name, function=f"{__name__}:{cell.function.partition(':')[2]}__{fault}")


def __getattr__(name):
    """The function of a cell that is tried: that of the package and its fault, with two low lines between them."""
    function, separator, fault = name.partition("__")
    if not function or not separator:
        raise AttributeError(name)
    return partial(run, getattr(trials, function), fault)


def run(function, fault, cell):
    with ExitStack() as stack:
        if ms.get_context("mode") == ms.PYNATIVE_MODE:
            stack.enter_context(mock.patch.dict(os.environ, MS_JIT="0"))
        for change in FAULTS[fault]() if fault else ():
            stack.enter_context(change)
        return function(cell)


def everywhere(original, other):
    """Put another function in the place of one, wherever it has been imported."""
    name = original.__name__
    modules = [module for module in list(sys.modules.values()) if vars(module).get(name) is original]
    return [mock.patch.object(module, name, other) for module in modules]


def division():
    """The gradients are divided by half the count."""
    original = buffer.reciprocal

    def twice(weight):
        return original(weight) * 2.0

    return everywhere(original, twice)


def clip():
    """The norm is that of the sums, and not of the means."""

    original = ClipByGlobalNorm.factor

    def factor(self, norm, max_norm=None):
        return original(self, norm * 26.0, max_norm)

    return [mock.patch.object(ClipByGlobalNorm, "factor", factor)]


def reduction():
    """Nothing is added up over the ranks."""

    def own(self, values):
        return values

    return [mock.patch.object(AllReduce, "construct", own)]


def state():
    """A state is loaded without the sums of its window."""
    original = states.load_state

    def without_sums(step, directory):
        original(step, directory)
        for total in step.body.buffer.get_parameters():
            if ".window_" not in total.name and total.dtype == ms.float32:
                total.set_data(Tensor(np.zeros(total.shape, np.float32)))

    return everywhere(original, without_sums)


FAULTS = {fault.__name__: fault for fault in (division, clip, reduction, state)}


def going(name):
    """A cell that goes as a function below does."""
    return Cell(name, f"self_test_cells:{name}")


def well(cell):
    return Found(0.0, 1.0, "nothing")


def hangs(cell):
    """The last process does not come back."""
    if cell.rank == cell.size - 1:
        time.sleep(600)
    return Found(0.0, 1.0, "nothing")


def dies(cell):
    os._exit(3)


def raises(cell):
    raise OSError("no such data\nand more")
