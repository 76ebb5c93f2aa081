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
from open_window import buffer_of

from ms_gradaccum import ClipByGlobalNorm
from ms_gradaccum.checkpoint import state as states
from ms_gradaccum.gradients import buffer
from ms_gradaccum.parallel.collectives import AllReduce
from ms_gradaccum.parallel.world import RanksDiffer
from ms_gradaccum.tools.self_test.training import Outcome

# In the line about a cell, before what is said of a broken build.
IN_BUILD = "; in a broken build, "

quick_mindspore.install()


def tried(cell, *faults):
    """The cell, and in its processes after it the same in builds with a fault of the package each."""
    return replace(cell, function=partial(run_and_break, cell.function, faults))


def run_and_break(function, faults, cell):
    """Run a cell, and say of each fault whether it fails with it; that is tried op by op where it can be."""
    result = run(function, "", cell)
    for fault in faults:
        with quick_mindspore.eagerly():
            try:
                outcome = run(function, fault, cell).outcome
            except RanksDiffer:  # The ranks have found it themselves.
                outcome = "failed"
        result = result._replace(said=f"{result.said}{IN_BUILD}{fault}: {outcome}")
    return result


def run(function, fault, cell):
    """Run a cell, in a build with a fault if there is one. In PYNATIVE mode nothing is compiled for it."""
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
    return everywhere(original, lambda weight: original(weight) * 2.0)


def clip():
    """The norm is that of the sums, and not of the means."""
    original = ClipByGlobalNorm.factor

    def factor(self, norm, max_norm=None):
        return original(self, norm * 26.0, max_norm)

    return [mock.patch.object(ClipByGlobalNorm, "factor", factor)]


def reduction():
    """Nothing is added up over the ranks."""
    return [mock.patch.object(AllReduce, "construct", lambda self, values: values)]


def state():
    """A state is loaded without the sums of its window."""
    original = states.load_state

    def without_sums(step, directory):
        original(step, directory)
        for total in buffer_of(step).get_parameters():
            if ".window_" not in total.name and total.dtype == ms.float32:
                total.set_data(Tensor(np.zeros(total.shape, np.float32)))

    return everywhere(original, without_sums)


FAULTS = {fault.__name__: fault for fault in (division, clip, reduction, state)}


def well(cell):
    return Outcome("passed", "nothing differs")


def late(cell):
    """The first process takes longer than the others."""
    if cell.rank == 0:
        time.sleep(3)
    return well(cell)


def dies(cell):
    """The last process ends, and the others wait."""
    if cell.rank == cell.size - 1:
        os._exit(3)
    time.sleep(600)


def raises(cell):
    raise OSError("no such data\nand more")
