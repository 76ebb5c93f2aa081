"""Plots of the files of a MetricsLogger."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ms_gradaccum.backend.arrays import Array

# The item of each panel, by its names. Files of version 0.2.0 have a list of several learning rates.
_PANELS = {
    "loss": ("loss",),
    "learning rate": ("learning_rate", "learning_rate_max"),
    "gradient norm": ("grad_norm",),
    "weight norm": ("weight_norm",),
}
# A later line leaves gaps, through which an equal one below it is seen.
_STYLES = ("-", "--", "-.", ":")
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
        if (
            isinstance(record, dict)
            and record.keys() & {"loss", "grad_norm"}
            and isinstance(record.get("update"), int)
        ):
            while reports and next(reversed(reports)) >= record["update"]:
                reports.popitem()  # A resumed training repeats some updates, a new training all.
            reports[record["update"]] = record
    if not reports:
        raise ValueError(
            f"There is no report in {path}. Give a file that MetricsLogger has written."
        )
    return list(reports.values())


def draw(paths: Iterable[str | PathLike[str]], output: str | PathLike[str]) -> None:
    """Draw the loss over the updates of some runs into a PNG, and the learning rate and norms if they vary."""
    try:
        # pyplot is not used because it keeps global state and may open a window.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Drawing takes the package matplotlib, but got: {error}. Install it with: pip install "
            f"matplotlib."
        ) from None
    runs = {str(path): read_run(path) for path in paths}
    panels = {}
    for title, names in _PANELS.items():
        curves = [_values_of(run, names) for run in runs.values()]
        values = np.concatenate(curves)
        if title == "loss" or len(set(values[np.isfinite(values)])) > 1:
            panels[title] = curves
    figure = Figure(figsize=(10, 4 * len(panels)), dpi=100, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, curves) in zip(all_axes, panels.items()):
        for (path, run), values, style in zip(runs.items(), curves, cycle(_STYLES)):
            updates = [report["update"] for report in run]
            marker = "." if len(run) < _FEW_REPORTS else ""
            axes.plot(updates, values, label=path, linestyle=style, marker=marker)
        low, high = axes.dataLim.intervaly
        if 0 < low < high / _WIDE_RANGE:
            axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(True, alpha=0.3)
    if len(runs) > 1:
        all_axes[0].legend(fontsize="small")
    all_axes[-1].set_xlabel("update")
    figure.savefig(output, format="png")


def _values_of(run: Run, names: Sequence[str]) -> Array:
    """Return an item of each report, NaN where it has none, and the largest where it has several."""
    values = []
    for report in run:
        known = [report[name] for name in names if report.get(name) is not None]
        values.append(np.max(np.array(known or math.nan, float)))
    return np.array(values)
