"""Is a compiled window what an eager one is, whatever Python decides in between?

Between two runs something is changed that Python code may read: an attribute, a global, the state of a generator.
What changes the eager run and not the compiled one was decided once, when the graph was compiled.
"""

import math
import statistics
from functools import partial
from typing import Any

import mindspore as ms

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.batch.nested_inputs import why_no_graph
from ms_gradaccum.tools.verification import compile_report as words
from ms_gradaccum.tools.verification.comparison import Run, is_finite, misfit, misfits
from ms_gradaccum.tools.verification.compile_report import CompileReport
from ms_gradaccum.tools.verification.eager_and_compiled import EagerAndCompiled
from ms_gradaccum.tools.verification.kept import kept_by_graphs
from ms_gradaccum.tools.verification.other_draws import MINDSPORE, ONCE_IN_A_GRAPH, other_draws
from ms_gradaccum.tools.verification.python_state import changing

_REPEATS, _FEW_REPEATS = 5, 3
# Of an eager window, in seconds: so long that fewer are enough.
_LONG = 1.0
_SHOWN = 5
# What GradAccumulation says of a loss that is no tensor. Op by op this one was a tensor.
_NO_TENSOR = "but got no tensor"


class CompiledSearch:
    """The search for what differs between eager and compiled training.

    Args:
        runs: What is run.
    """

    def __init__(self, runs: EagerAndCompiled) -> None:
        self.runs = runs
        self.state, self.reads, self.rtol = runs.state, runs.reads, runs.rtol
        self.causes: list[str] = []
        # Those that come about only if the program changes what is read.
        self.read: list[str] = []

    def report(self) -> CompileReport:
        """Compare them, and say what was found."""
        kept: tuple[str, ...] = ()
        speedup = math.nan
        with execution_mode(ms.PYNATIVE_MODE):
            first = self._first_runs()
            if first is not None:
                if self._look_at_runs(*first):
                    self._look_at_reads()
                    kept = tuple(kept_by_graphs(self.runs))
                speedup = self._speedup()
        causes = *self.causes, *self.read
        return CompileReport(not causes, not self.causes, causes, kept, speedup)

    def _first_runs(self) -> tuple[Run, Run] | None:
        """Run both once; if one of them cannot, name the reason and return None."""
        try:
            eager = self.runs.window(self.runs.eager)
        except Exception as error:
            self.causes.append(words.NOT_EAGER.format(reason=first_line(error)))
            return None
        reason = self._why_not_compiled()
        if not reason:
            try:
                return eager, self.runs.window(self.runs.compiled)
            except Exception as error:
                reason = words.LEFT_TO_PYTHON if _NO_TENSOR in first_line(error) else first_line(error)
        self.causes.append(words.NOT_COMPILED.format(reason=reason))
        return None

    def _why_not_compiled(self) -> str:
        """Say what is known beforehand to stand in the way of a graph."""
        reason = why_no_graph(self.runs.compiled.structure)
        return f"{reason}. Give a tuple or a dict, or leave compile out." if reason else ""

    def _look_at_runs(self, eager: Run, compiled: Run) -> bool:
        """Compare what runs give and leave. Return whether changes can be tested."""
        if not is_finite(eager):
            self.causes.append(words.NOT_FINITE)
            return False
        runs = self.runs
        ways = runs.eager, runs.compiled
        firsts, left = [], []
        for way in ways:
            firsts.append(runs.part(way))
            left.append(self.state.take())
        self._look_at_left(*left)
        repeats = [runs.same(first, runs.part(way)) for first, way in zip(firsts, ways)]
        if not all(repeats):
            self.causes.append(words.CLOCK if repeats[1] else words.RANDOM)
            return False
        runs.bases = firsts[0], firsts[1]
        every = partial(other_draws, runs.start, (*ONCE_IN_A_GRAPH, MINDSPORE))
        draws = not runs.same(firsts[0], runs.part(runs.eager, every))
        if not (draws and self._draws_once()):
            self._look_at_values(eager, compiled, draws)
        return True

    def _draws_once(self) -> bool:
        """Name the generators that a graph draws from once. Return whether there are any."""
        found = [
            name
            for source, name in ONCE_IN_A_GRAPH.items()
            if self.runs.ignores(partial(other_draws, self.runs.start, (source,)))
        ]
        self.causes.extend(words.ONCE.format(source=name) for name in found)
        return bool(found)

    def _look_at_left(self, eager: Any, compiled: Any) -> None:
        """Name what an eager run leaves in the spaces, and a compiled one does not."""
        moved = self.state.changed(compiled, self.state.start, 0.0)
        for place in self.state.changed(eager, compiled, self.rtol):
            otherwise = "leaves another value" if place in moved else "leaves it as it was"
            self.causes.append(words.LEFT.format(place=_begin(place.text()), otherwise=otherwise))

    def _look_at_values(self, eager: Run, compiled: Run, draws: bool) -> None:
        if self.runs.same(eager, compiled):
            return
        if draws:
            self.causes.append(words.UNLIKE)
            return
        parameters = [parameter.name for parameter in self.runs.eager.parameters]
        gradients = {name: size for name, size in zip(parameters, misfits(eager, compiled)) if not size <= self.rtol}
        states = {
            name: size for name, size in self.runs.state_misfits(eager, compiled).items() if not size <= self.rtol
        }
        what = [f"Gradients ({_listed(gradients)})"] if gradients else []
        what += [f"{'states' if what else 'States'} ({_listed(states)})"] if states else []
        known = ((self.reads.has_gradient_hook(), words.GRADIENT_HOOK), (self.reads.changes_in_place(), words.IN_PLACE))
        likely = " Or: ".join(text for is_there, text in known if is_there) or words.UNKNOWN
        size = max(misfit(eager, compiled), *states.values(), 0.0)
        subject = f"{' and '.join(what) or 'The loss'} differ" + ("" if what else "s")
        self.causes.append(words.VALUES.format(what=subject, size=size, likely=likely))

    def _look_at_reads(self) -> None:
        """Name what the network's own code reads, and a graph read once."""
        for places in self.state.readable(own=True):
            if self.runs.ignores(partial(changing, places)):
                more = f" and {len(places) - 1} more like it" if len(places) > 1 else ""
                self.read.append(words.READ.format(places=_begin(places[0].text()) + more))

    def _speedup(self) -> float:
        times: tuple[list[float], list[float]] = ([], [])
        while len(times[0]) < (_FEW_REPEATS if sum(times[0]) > _LONG else _REPEATS):
            for experiment, seconds in zip((self.runs.eager, self.runs.compiled), times):
                self.state.restore()
                seconds.append(experiment.seconds())
        return statistics.median(times[0]) / statistics.median(times[1])


def _begin(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
