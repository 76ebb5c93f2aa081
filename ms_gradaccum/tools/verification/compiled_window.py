"""One window op by op and compiled, from one start."""

import time
from typing import Any

import mindspore as ms

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.tools.verification.comparison import Run, is_finite, misfit
from ms_gradaccum.tools.verification.diagnosis import layers_of
from ms_gradaccum.tools.verification.experiment import Experiment, Start
from ms_gradaccum.tools.verification.report import CompileReport, differences
from ms_gradaccum.training.grad_accumulation import GradAccumulation

# GradAccumulation's words for a loss that is not a tensor. Op by op it was one.
_NO_TENSOR = "but got no tensor"
_DIFFERS = (
    "A graph keeps what Python decided in construct when it was compiled (counters, time, draws of random and NumPy), "
    "does not call HookBackward, and does not change a tensor under its other names (o *= 2). Write this with "
    "operators of MindSpore, or leave compile out."
)
_RANDOM = (
    "A random operator that is no Dropout layer, or something else that Python reads and that differs from run to "
    "run: two runs op by op from one start differ, so nothing can be compared. Turn it off."
)
_NOT_FINITE = "An Inf or NaN in the run op by op: nothing can be compared."
_LEFT_TO_PYTHON = (
    "its loss is not a tensor there, since a graph leaves something in construct to Python, such as asnumpy() or a "
    "count in an attribute. Write it with operators of MindSpore, or leave compile out."
)


def compare_compiled(network: GradAccumulation, inputs: tuple[Any, ...], start: Start, rtol: float) -> CompileReport:
    """Run the window op by op and compiled, without dropout, whose masks cannot be repeated, and compare."""
    dropouts = list(layers_of(network.network, "Dropout").values())
    eager = Experiment(network, inputs, None, start, dropouts)
    compiled = Experiment(network, inputs, None, start, dropouts, compiles=True)
    with execution_mode(ms.PYNATIVE_MODE):
        try:
            (first, _), (again, slow) = _timed(eager), _timed(eager)
        except Exception as error:
            return CompileReport(False, causes=(f"The network cannot be run op by op: {first_line(error)}",))
        try:
            # The first run includes the compilation.
            (other, _), (_, fast) = _timed(compiled), _timed(compiled)
        except Exception as error:
            reason = _LEFT_TO_PYTHON if _NO_TENSOR in first_line(error) else first_line(error)
            return CompileReport(False, causes=(f"The network cannot be compiled: {reason}",))
    if not is_finite(first):
        return CompileReport(False, causes=(_NOT_FINITE,), speedup=slow / fast)
    if misfit(first, again) > rtol:
        return CompileReport(False, causes=(_RANDOM,), speedup=slow / fast)
    entries = differences(eager, other, first, rtol)
    equal = misfit(first, other) <= rtol and not any(entry.differs for entry in entries)
    return CompileReport(equal, tuple(entries), first.loss, other.loss, () if equal else (_DIFFERS,), slow / fast)


def _timed(experiment: Experiment) -> tuple[Run, float]:
    """Run the window from the start, and return it with its seconds."""
    experiment.start.kept.put_back()
    begin = time.perf_counter()
    return experiment.window(), time.perf_counter() - begin
