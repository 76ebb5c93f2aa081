"""Plots of the files of a MetricsLogger."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ms_gradaccum._checks import counted, warn

_PANELS = {
    "loss": ("loss",),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm", "clipped_grad_norm"),
    "weight norm": ("weight_norm",),
}
# A broad pale line with a thin one on it, so that both are seen where they coincide.
_STYLES: dict[str, dict[str, float]] = {"before clipping": {"linewidth": 4, "alpha": 0.35}, "after clipping": {}}
# A range as wide as this is easier to see on a logarithmic axis.
_WIDE = 20


def read_run(path: Any) -> list[dict[str, Any]]:
    """Return the last report on each update, in order of the updates: a resumed training makes some of them again.

    A line that a killed program has left unfinished is skipped with a warning. ValueError: no report.
    """
    reports: dict[int, dict[str, Any]] = {}
    torn = 0
    for line in filter(str.strip, Path(path).read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            torn += 1
            continue
        if isinstance(record, dict) and record.keys() & {"loss", "grad_norm"} and isinstance(record.get("update"), int):
            reports[record["update"]] = record
    if not reports:
        raise ValueError(f"There is no report in {path}. Give a file that MetricsLogger has written.")
    if torn:
        warn(f"Skipped {counted(torn, 'line')} of {path} that cannot be read as JSON.")
    return [reports[update] for update in sorted(reports)]


def draw(paths: Iterable[Any], output: Any) -> None:
    """Draw the loss over the updates of some runs into a PNG, and of learning rate and norms those that vary."""
    try:
        # pyplot is not used because it keeps global state and may open a window.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Drawing takes the package matplotlib, but got: {error}. "
            f"Install it with: pip install 'ms_gradaccum[plot]'."
        ) from None
    runs = {str(path): read_run(path) for path in paths}
    panels = {}
    for title, names in _PANELS.items():
        curves = [[_columns(run, name) for name in names] for run in runs.values()]
        # A gradient that is never clipped has one norm.
        if all(np.array_equal(each[0], each[-1], equal_nan=True) or np.isnan(each[-1]).all() for each in curves):
            curves = [each[:1] for each in curves]
        lines = [line[np.isfinite(line)] for each in curves for columns in each for line in columns.T]
        if title == "loss" or any(len(np.unique(line)) > 1 for line in lines):
            panels[title] = curves, np.concatenate(lines)
    figure = Figure(figsize=(10, 4 * len(panels)), dpi=100, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, (curves, values)) in zip(all_axes, panels.items()):
        for number, (path, run) in enumerate(runs.items()):
            for kind, columns in zip(_STYLES if len(curves[number]) > 1 else [""], curves[number]):
                _plot(axes, run, columns, number, ", ".join(filter(None, [path * (len(runs) > 1), kind])), kind)
        if values.size and values.min() > 0 and values.max() / values.min() > _WIDE:
            axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(True, alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    all_axes[-1].set_xlabel("update")
    figure.savefig(output, format="png")


def _plot(axes: Any, run: list[dict[str, Any]], columns: Any, number: int, label: str, kind: str) -> None:
    # A dot too, or a single report would be invisible.
    style = {"marker": "." if len(run) < 50 else "", "color": f"C{number}", **_STYLES.get(kind, {})}
    # What a run does not have gets no line, and no name beside them.
    known = [values for values in columns.T if not np.isnan(values).all()]
    for i, values in enumerate(known):
        axes.plot([report["update"] for report in run], values, label=label if label and not i else None, **style)


def _columns(run: list[dict[str, Any]], name: str) -> Any:
    """Return an item as a row per report, with a column per different learning rate and NaN where there is none."""
    rows = [np.ravel(np.array(report.get(name), float)) for report in run]
    width = max(map(len, rows))
    return np.unique(np.stack([np.resize(row, width) for row in rows]), axis=1)
