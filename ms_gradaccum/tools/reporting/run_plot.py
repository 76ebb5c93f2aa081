"""Plots of the files of a MetricsLogger."""

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ms_gradaccum.backend.tensors import Array

# The items of each panel, and what they are called where a panel has several.
_PANELS = {
    "loss": {"loss": ""},
    "learning rate": {"learning_rate": "", "learning_rate_min": "smallest", "learning_rate_max": "largest"},
    "gradient norm": {"grad_norm": "before clipping", "clipped_grad_norm": "after clipping"},
    "weight norm": {"weight_norm": ""},
}
# A wide, pale line below a thin one, so that both are visible where they coincide.
_WIDE_LINE = {"linewidth": 4, "alpha": 0.35}
_FEW_REPORTS = 50  # Of fewer ones each is a dot, too, or a single report would be invisible.
_WIDE_RANGE = 20  # From this range on, the axis is logarithmic.

Run = Sequence[Mapping[str, Any]]


def read_run(path: str | PathLike[str]) -> Run:
    """Return the reports of the last run, and of the runs that it has resumed, in the order of the updates."""
    reports: dict[int, Mapping[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # A killed program has left it unfinished.
        if isinstance(record, dict) and record.keys() & {"loss", "grad_norm"} and isinstance(record.get("update"), int):
            while reports and next(reversed(reports)) >= record["update"]:
                reports.popitem()  # A resumed training repeats some updates, a new training all.
            reports[record["update"]] = record
    if not reports:
        raise ValueError(f"There is no report in {path}. Give a file that MetricsLogger has written.")
    return list(reports.values())


def draw(paths: Iterable[str | PathLike[str]], output: str | PathLike[str]) -> None:
    """Draw the loss over the updates of some runs into a PNG, and the learning rate and norms if they vary."""
    try:
        # pyplot is not used because it keeps global state and may open a window.
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "Install it with: pip install 'ms_gradaccum[plot]'."
        raise ImportError(f"Drawing takes the package matplotlib, but got: {error}. {remedy}") from None
    runs = {str(path): read_run(path) for path in paths}
    panels = {}
    for title, kinds in _PANELS.items():
        curves = _curves(runs, kinds)
        if title == "loss" or any(curve.varies for curve in curves):
            panels[title] = curves
    figure = Figure(figsize=(10, 4 * len(panels)), dpi=100, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, curves) in zip(all_axes, panels.items()):
        for curve in curves:
            axes.plot(curve.updates, curve.values, **curve.style)
        low, high = axes.dataLim.intervaly
        if 0 < low < high / _WIDE_RANGE:
            axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(True, alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    all_axes[-1].set_xlabel("update")
    figure.savefig(output, format="png")


class _Curve(NamedTuple):
    updates: list[int]
    values: Array
    style: dict[str, Any]

    @property
    def varies(self) -> bool:
        return bool(np.nanmin(self.values) < np.nanmax(self.values))


def _curves(runs: Mapping[str, Run], kinds: Mapping[str, str]) -> list[_Curve]:
    """Return the curves of a panel."""
    if "grad_norm" in kinds and not any(map(_is_clipped, runs.values())):
        kinds = {"grad_norm": ""}
    curves = []
    for number, (path, run) in enumerate(runs.items()):
        for name, kind in kinds.items():
            # Files of version 0.2.0 have a list of several learning rates.
            values = np.array([np.max(np.array(report.get(name), float)) for report in run])
            if np.isnan(values).all():
                continue
            names = [path, kind] if len(runs) > 1 else [kind]
            style: dict[str, Any] = {"color": f"C{number}", "label": ", ".join(filter(None, names)) or None}
            if len(run) < _FEW_REPORTS:
                style["marker"] = "."
            if kind == "before clipping":
                style |= _WIDE_LINE
            curves.append(_Curve([report["update"] for report in run], values, style))
    return curves


def _is_clipped(run: Run) -> bool:
    return any(report.get("clipped_grad_norm") not in (None, report.get("grad_norm")) for report in run)
