"""The reports of a comparison, parameter by parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.tools.verification.experiment import Experiment
from ms_gradaccum.tools.whole_batch import Run, difference, norm_of, parameter_differences, relative

_SHOWN = 20


@dataclass(frozen=True)
class ParameterDifference:
    """The difference of one parameter between a window and the whole batch.

    Attributes:
        name: Name of the parameter.
        kind: ``"gradient"``: its mean gradient. ``"state"``: its value after the forward passes, for a parameter that
            these change, such as a moving average.
        max_difference: Largest absolute difference of an element.
        relative_difference: L2 norm of the difference, divided by the larger L2 norm of the two. For a gradient the
            divisor is at least 1% of the whole gradient's norm, so that rounding of a zero counts little.
        norm_ratio: L2 norm of the window's value, divided by that of the whole batch's value.
        differs: Whether the relative difference is above the report's `rtol`.
    """

    name: str
    kind: str
    max_difference: float
    relative_difference: float
    norm_ratio: float
    differs: bool


@dataclass(frozen=True)
class CompileReport:
    """The results of ``verify(..., compile=True)``: one window op by op and compiled, from the same start.

    Attributes:
        equal: Whether neither the loss nor a parameter differs.
        parameters: As in a :class:`VerifyReport`; `norm_ratio` is compiled / op by op. Empty if one of the two could
            not run.
        eager_loss: Weighted mean loss of the window op by op.
        compiled_loss: Weighted mean loss of the compiled window.
        causes: Reason why nothing could be compared, or the usual cause of such a difference. Empty without one.
        speedup: Time op by op divided by time compiled, without compilation. NaN if one of them cannot run.
    """

    equal: bool
    parameters: tuple[ParameterDifference, ...] = ()
    eager_loss: float = math.nan
    compiled_loss: float = math.nan
    causes: tuple[str, ...] = ()
    speedup: float = math.nan

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "not equal"
        faster = "" if math.isnan(self.speedup) else f", {self.speedup:.2g} times as fast"
        lines = [f"Compiled: {verdict}{faster}."]
        lines += _table(self.parameters, "compiled / op by op")
        if not self.equal and self.parameters:
            lines.append(
                f"Loss: {self.compiled_loss:.8g} compiled, {self.eager_loss:.8g} op by op."
            )
        lines += [f"- {cause}" for cause in self.causes]
        return "\n".join(lines)


@dataclass(frozen=True)
class VerifyReport:
    """The results of :func:`verify`. ``str(report)`` is a table with the worst parameter first, and the causes.

    Attributes:
        equal: Whether no parameter differs.
        parameters: One entry per trainable parameter and per parameter that the forward pass changes, the worst first.
        window_loss: Weighted mean loss of the window.
        whole_loss: Loss of the whole batch.
        micro_batches: The rows of each micro batch.
        rtol: The relative difference up to which two gradients are equal.
        causes: One sentence or two per cause: the finding and the remedy. Empty if nothing differs.
        compiled: The differences between op by op and compiled, a :class:`CompileReport`. None without `compile`.
    """

    equal: bool
    parameters: tuple[ParameterDifference, ...]
    window_loss: float
    whole_loss: float
    micro_batches: tuple[int, ...]
    rtol: float
    causes: tuple[str, ...]
    compiled: CompileReport | None = None

    def __str__(self) -> str:
        total = len(self.parameters)
        differing = sum(entry.differs for entry in self.parameters)
        count = f"{differing} of {total} differ" if differing else f"All {total} equal"
        lines = _table(self.parameters, "window / whole")
        lines.append(
            f"{count} (rtol {self.rtol:g}). Micro batches of "
            f"{', '.join(map(str, self.micro_batches))} rows."
        )
        lines.append(
            f"Loss: {self.window_loss:.8g} in the window, {self.whole_loss:.8g} in the whole batch."
        )
        if self.causes:
            lines.append("Probable cause:" if len(self.causes) == 1 else "Probable causes:")
        lines += [f"- {cause}" for cause in self.causes]
        if self.compiled is not None:
            lines.append(str(self.compiled))
        return "\n".join(lines)


def differences(
    experiment: Experiment, window: Run, whole: Run, rtol: float
) -> list[ParameterDifference]:
    """Compare two runs parameter by parameter, and return the worst first."""
    start = experiment.start.tensors
    misfits = parameter_differences(window, whole)
    entries = []
    for parameter, a, b, misfit in zip(
        experiment.parameters, window.changes, whole.changes, misfits
    ):
        entries.append(_entry(parameter.name, "gradient", a, b, misfit, rtol))
    for place in sorted(window.state.keys() | whole.state.keys()):
        a = window.state.get(place, start.values[place]).astype(np.float64)
        b = whole.state.get(place, start.values[place]).astype(np.float64)
        entries.append(_entry(start.tensors[place].name, "state", a, b, difference(a, b), rtol))
    return sorted(entries, key=lambda entry: (not entry.differs, -entry.relative_difference))


def _entry(
    name: str, kind: str, window: Array, whole: Array, misfit: float, rtol: float
) -> ParameterDifference:
    largest = float(np.abs(window.astype(float) - whole).max(initial=0.0))
    ratio = 1.0
    if norm_of(window) != norm_of(whole):
        ratio = relative(norm_of(window), norm_of(whole))
    return ParameterDifference(name, kind, largest, misfit, ratio, misfit > rtol)


def _table(entries: Sequence[ParameterDifference], ratio: str) -> list[str]:
    """Return the lines of a table of the entries that differ, which come first."""
    differing = [entry for entry in entries if entry.differs]
    if not differing:
        return []
    width = max(len("parameter"), *(len(entry.name) for entry in differing[:_SHOWN]))
    lines = [f"{'parameter':{width}}  kind      max difference  relative  {ratio}"]
    for entry in differing[:_SHOWN]:
        numbers = (
            f"{entry.max_difference:14.3g}  {entry.relative_difference:8.3g}  "
            f"{entry.norm_ratio:{len(ratio)}.6g}"
        )
        lines.append(f"{entry.name:{width}}  {entry.kind:8}  {numbers}")
    if len(differing) > _SHOWN:
        lines.append(f"... and {len(differing) - _SHOWN} more")
    return lines
