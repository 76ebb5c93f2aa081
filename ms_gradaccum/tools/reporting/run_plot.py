"""Plots of the files of a MetricsLogger."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ms_gradaccum._checks import warn
from ms_gradaccum.tools.reporting.figures import new_figure

# The items of each panel, with their labels where there are several.
_PANELS = {
    "loss": {"loss": ""},
    "learning rate": {"learning_rate": ""},
    "gradient norm": {"grad_norm": "before clipping", "clipped_grad_norm": "after clipping"},
    "weight norm": {"weight_norm": ""},
}
# A broad pale line with a thin one on it, so that both are seen where they coincide.
_STYLES: dict[str, dict[str, float]] = {"before clipping": {"linewidth": 4, "alpha": 0.35}}
# A range as wide as this is easier to see on a logarithmic axis.
_WIDE = 20


class _Curve(NamedTuple):
    """One item of one run over its updates."""

    run: int
    label: str
    updates: list[int]
    values: list[float]

    def varies(self) -> bool:
        """Return whether the values vary."""
        return len({value for value in self.values if math.isfinite(value)}) > 1


def read_run(path: Any) -> list[dict[str, Any]]:
    """Return the last report on each update, in order of the updates: a resumed training makes some of them again.

    A line that a killed program has left unfinished is skipped with a warning.

    Args:
        path (Union[str, os.PathLike]): A file of a :class:`MetricsLogger`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If there is no report in it.
    """
    reports: dict[int, dict[str, Any]] = {}
    torn = 0
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            torn += bool(line.strip())
            continue
        if isinstance(record, dict) and record.keys() & {"loss", "grad_norm"} and isinstance(record.get("update"), int):
            reports[record["update"]] = record
    if not reports:
        raise ValueError(f"There is no report in {path}. Give a file that MetricsLogger has written.")
    if torn:
        what = "1 line that is" if torn == 1 else f"{torn} lines that are"
        warn(f"{path} has {what} no JSON and left out.")
    return [reports[update] for update in sorted(reports)]


def draw(paths: Iterable[Any], output: Any) -> None:
    """Draw the loss over the updates of one or more runs, and of learning rate and norms those that vary.

    The picture is a PNG of 1000 pixels times 400 per panel.

    Args:
        paths (Iterable[Union[str, os.PathLike]]): Files of a :class:`MetricsLogger`.
        output (Union[str, os.PathLike]): The PNG.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be read or written.
        ValueError: If there is no report in a file.
    """
    runs = {str(path): read_run(path) for path in paths}
    found = {title: list(_curves(names, runs)) for title, names in _PANELS.items()}
    shown = {title: curves for title, curves in found.items() if title == "loss" or any(map(_Curve.varies, curves))}
    figure = new_figure(10, 4 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, curves) in zip(panels, shown.items()):
        _draw_panel(axes, title, curves)
    panels[-1].set_xlabel("update")
    figure.savefig(output, format="png")


def _curves(names: dict[str, str], runs: dict[str, list[dict[str, Any]]]) -> Iterator[_Curve]:
    """Yield the curves of a panel. A gradient that is never clipped has one norm."""
    clipped = any(
        "clipped_grad_norm" in report and report["clipped_grad_norm"] != report.get("grad_norm")
        for reports in runs.values()
        for report in reports
    )
    for number, (path, reports) in enumerate(runs.items()):
        updates = [report["update"] for report in reports]
        for name, kind in names.items():
            if kind and not clipped and name == "clipped_grad_norm":
                continue
            label = ", ".join(filter(None, [path if len(runs) > 1 else "", kind if clipped else ""]))
            for values in _columns(reports, name):
                if not all(map(math.isnan, values)):
                    yield _Curve(number, label, updates, values)


def _draw_panel(axes: Any, title: str, curves: list[_Curve]) -> None:
    for curve in curves:
        # A dot too, or a single report would be invisible.
        dot = "." if len(curve.values) < 50 else ""
        style = _STYLES.get(curve.label.rpartition(", ")[2], {})
        color = f"C{curve.run}"
        axes.plot(curve.updates, curve.values, marker=dot, color=color, label=curve.label or None, **style)
    shown = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if shown and min(shown) > 0 and max(shown) / min(shown) > _WIDE:
        axes.set_yscale("log")
    axes.set_ylabel(title)
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")


def _columns(reports: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Return the values of an item, NaN where there is none. Several learning rates make several columns, if they
    differ."""
    rows = [value if isinstance(value := report.get(name), list) else [value] for report in reports]
    width = max(len(row) for row in rows)
    filled = [row + [row[-1]] * (width - len(row)) for row in rows]
    columns = [tuple(math.nan if value is None else float(value) for value in column) for column in zip(*filled)]
    return [list(column) for column in dict.fromkeys(columns)]
