"""What is said about compiled and eager runs of the same window."""

import math
import textwrap
from dataclasses import dataclass

_WIDTH = 100

ONCE = (
    "{source} draws once: from another of its states the eager run differs, and the compiled one is the same for ever. "
    "Draw with an operator of MindSpore, such as ops.rand, or make the number an input of the network."
)
CLOCK = (
    "Time, or whatever else Python reads that differs from run to run: eagerly the same batch from the same state "
    "differs, and compiled it does not. Nothing else could be tested. Make what is read an input of the network."
)
RANDOM = (
    "A random operator that is no Dropout layer: two runs of the same batch differ, so that nothing else could be "
    "tested. Turn it off to compare the rest."
)
UNLIKE = (
    "A random operator that is no Dropout layer: the first runs differ, and it may be the draw alone. Turn it off to "
    "compare them."
)
READ = (
    "{places}: compiled, what it is at the first step holds for ever; changed, it changes the eager run alone. "
    "If it changes in training, make it an input of the network, or a Parameter that is assigned to. If it never does, "
    "nothing is lost."
)
LEFT = (
    "{place}: an eager run leaves it changed, and a compiled one {otherwise}. Keep it in a Parameter, return it, or "
    "leave compile out."
)
VALUES = "{what} from the first run on, by {size:.1e}: {likely}"
GRADIENT_HOOK = (
    "what is called in the backward pass (HookBackward, register_hook of a tensor) is not called in a graph. "
    "Write it as a cell with a bprop, or leave compile out."
)
IN_PLACE = (
    "an operator such as *= changes a tensor eagerly, under all its names, and makes a new one in a graph. Write "
    "o = o * 2, or leave compile out."
)
UNKNOWN = "no cause was found in the code. Leave compile out."
NOT_FINITE = "An Inf or NaN in the eager run: nothing can be compared."
NOT_COMPILED = "The network cannot be compiled: {reason}"
NOT_EAGER = "The network cannot be run op by op: {reason}"
LEFT_TO_PYTHON = (
    "its loss is no tensor there, since a graph leaves something in construct to Python, such as asnumpy() or a count "
    "in an attribute. Say it with operators of MindSpore, or leave compile out."
)
KEPT = (
    "A graph keeps, as each of MindSpore's does: {names}. If your program changes one of these in mid-training, leave "
    "compile out, or build a new training step after the change."
)


@dataclass(frozen=True)
class CompileReport:
    """What ``verify(..., compile=True)`` has found: whether compiled training is what eager training is.

    Attributes:
        equal: Whether no cause was found, so that the same came out whatever was changed between two runs.
        equal_if_unchanged: Whether the only causes are values that the network's code reads and that a graph keeps:
            an attribute, a global. Then compiled training is what eager training is, if these never change.
        causes: A few sentences per cause: what was seen, and what to do.
        kept: What any compiled graph keeps from its first run, shown by a change that the eager run followed:
            ``requires_grad``, modes, the cells inside, settings of MindSpore's own layers. None of the network's own
            code, so it does not count as a cause.
        speedup: Seconds of the window op by op, divided by those compiled: medians of runs that take turns, compilation
            not counted. NaN if one of them cannot be run.
    """

    equal: bool
    equal_if_unchanged: bool
    causes: tuple[str, ...]
    kept: tuple[str, ...]
    speedup: float

    def __str__(self) -> str:
        faster = "" if math.isnan(self.speedup) else f", {self.speedup:.2g} times as fast"
        unless = "equal, if nothing that is named here changes in training" if self.equal_if_unchanged else "not equal"
        lines = [f"Compiled: {'equal' if self.equal else unless}{faster}."]
        lines.extend(bullet(cause) for cause in self.causes)
        if self.kept:
            lines.append(bullet(KEPT.format(names="; ".join(self.kept))))
        return "\n".join(lines)


def bullet(text: str) -> str:
    """Return a sentence as an item of a report."""
    return textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")
