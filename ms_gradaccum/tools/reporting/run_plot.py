"""Plots of the files of a MetricsLogger."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ms_gradaccum.backend.tensors import Array

_PANELS = {
    "loss": ("loss",),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm", "clipped_grad_norm"),
    "weight norm": ("weight_norm",),
}
# A wide, pale line below a thin one, so that both are seen where they coincide.
_STYLES: dict[str, dict[str, float]] = {"before clipping": {"linewidth": 4, "alpha": 0.35}, "after clipping": {}}
# A range as wide as this is easier to see on a logarithmic axis.
_WIDE = 20

Run = Sequence[Mapping[str, Any]]


def read_run(path: str | PathLike[str]) -> Run:
    """Return the reports of the last run, and of runs that it goes on from, in order of the updates."""
    reports: dict[int, Mapping[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # A killed program has left it unfinished.
        if isinstance(record, dict) and record.keys() & {"loss", "grad_norm"} and isinstance(record.get("update"), int):
            while reports and next(reversed(reports)) >= record["update"]:
                reports.popitem()  # A resumed training makes some updates again, another one all.
            reports[record["update"]] = record
    if not reports:
        raise ValueError(f"There is no report in {path}. Give a file that MetricsLogger has written.")
    return list(reports.values())


def draw(paths: Iterable[str | PathLike[str]], output: str | PathLike[str]) -> None:
    """Draw the loss over the updates of some runs into a PNG, and of learning rate and norms those that vary."""
    try:
        # pyplot is not used because it keeps global state and may open a window.
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "Install it with: pip install 'ms_gradaccum[plot]'."
        raise ImportError(f"Drawing takes the package matplotlib, but got: {error}. {remedy}") from None
    runs = {str(path): read_run(path) for path in paths}
    panels = {title: [*_curves(runs, names)] for title, names in _PANELS.items()}
    titles = [
        title for title in panels if title == "loss" or any(np.nanmin(y) < np.nanmax(y) for _, y, _ in panels[title])
    ]
    figure = Figure(figsize=(10, 4 * len(titles)), dpi=100, layout="constrained")
    all_axes = figure.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0]
    for axes, title in zip(all_axes, titles):
        for updates, values, style in panels[title]:
            axes.plot(updates, values, **style)
        low, high = axes.dataLim.intervaly
        if 0 < low < high / _WIDE:
            axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(True, alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    all_axes[-1].set_xlabel("update")
    figure.savefig(output, format="png")


def _curves(runs: Mapping[str, Run], names: Sequence[str]) -> Iterator[tuple[list[int], Array, dict[str, Any]]]:
    """Yield the updates, the values and the style of each curve in a panel; several if learning rates differ."""
    # A gradient that is never clipped has one norm.
    differ = any(report.get(names[-1]) not in (None, report.get(names[0])) for run in runs.values() for report in run)
    for number, (path, run) in enumerate(runs.items()):
        for name, kind in zip(names, _STYLES if differ else [""]):
            rows = [np.ravel(np.array(report.get(name), float)) for report in run]
            width = max(map(len, rows))
            columns = np.unique(np.stack([np.resize(row, width) for row in rows]), axis=1).T
            label = ", ".join(filter(None, [path * (len(runs) > 1), kind]))
            for values in columns[~np.isnan(columns).all(axis=1)]:
                # A dot too, or a single report would be invisible.
                style = {"marker": "." if len(run) < 50 else "", "color": f"C{number}", "label": label or None}
                yield [report["update"] for report in run], values, {**style, **_STYLES.get(kind, {})}
                label = ""
