"""Plots of the files of a MetricsLogger."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ms_gradaccum.backend.tensors import Array

# The items of each panel, and the kind of each curve.
_PANELS = {
    "loss": {"loss": ""},
    "learning rate": {"learning_rate": "", "learning_rate_min": "smallest", "learning_rate_max": "largest"},
    "gradient norm": {"grad_norm": "before clipping", "clipped_grad_norm": "after clipping"},
    "weight norm": {"weight_norm": ""},
}
# A wide, pale line below a thin one, so that both are visible where they coincide.
_STYLES = {"before clipping": {"linewidth": 4, "alpha": 0.35}}
# From this range on, the axis is logarithmic.
_WIDE = 20

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
    panels = {title: [*_curves(runs, kinds)] for title, kinds in _PANELS.items()}
    varied = [title for title, curves in panels.items() if any(np.nanmin(y) < np.nanmax(y) for _, y, _ in curves)]
    titles = ["loss", *(title for title in varied if title != "loss")]
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


def _curves(runs: Mapping[str, Run], kinds: Mapping[str, str]) -> Iterator[tuple[list[int], Array, dict[str, Any]]]:
    """Yield the updates, the values and the style of each curve in a panel."""
    norms = {(report.get("grad_norm"), report.get("clipped_grad_norm")) for run in runs.values() for report in run}
    if "grad_norm" in kinds and all(clipped in (None, norm) for norm, clipped in norms):
        kinds = {"grad_norm": ""}  # A gradient that is never clipped has one norm.
    for number, (path, run) in enumerate(runs.items()):
        for name, kind in kinds.items():
            # Files of version 0.2.0 have a list of several learning rates.
            values = np.array([np.max(np.array(report.get(name), float)) for report in run])
            if not np.isnan(values).all():
                label = ", ".join(filter(None, [path * (len(runs) > 1), kind]))
                # A dot too, or a single report would be invisible.
                style = {"marker": "." if len(run) < 50 else "", "color": f"C{number}", "label": label or None}
                yield [report["update"] for report in run], values, {**style, **_STYLES.get(kind, {})}
