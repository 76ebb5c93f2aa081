"""Pictures of what a MetricsLogger has written."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ms_gradaccum._checks import warn
from ms_gradaccum.tools.reporting.figures import new_figure

_PANELS = {
    "loss": ("loss",),
    "learning rate": ("learning_rate",),
    "norm": ("grad_norm", "clipped_grad_norm", "weight_norm"),
}
_STYLES = ("-", "--", ":")
# A range as wide as this is easier to see on a logarithmic axis.
_WIDE = 20


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
        if isinstance(record, dict) and "loss" in record and isinstance(record.get("update"), int):
            reports[record["update"]] = record
    if not reports:
        raise ValueError(f"There is no report in {path}. Give a file that MetricsLogger has written.")
    if torn:
        what = "1 line that is" if torn == 1 else f"{torn} lines that are"
        warn(f"{path} has {what} no JSON and left out.")
    return [reports[update] for update in sorted(reports)]


def draw(paths: Iterable[Any], output: Any) -> None:
    """Draw loss, learning rate and norms over the updates of one or more runs.

    The picture is a PNG of 1000 x 1200 pixels.

    Args:
        paths (Iterable[Union[str, os.PathLike]]): Files of a :class:`MetricsLogger`.
        output (Union[str, os.PathLike]): The PNG.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be read or written.
        ValueError: If there is no report in a file.
    """
    runs = {str(path): read_run(path) for path in paths}
    figure = new_figure(10, 12)
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (title, names) in zip(panels, _PANELS.items()):
        _draw_panel(axes, title, names, runs)
    panels[-1].set_xlabel("update")
    figure.savefig(output, format="png")


def _draw_panel(axes: Any, title: str, names: tuple[str, ...], runs: dict[str, list[dict[str, Any]]]) -> None:
    shown: list[float] = []
    for number, (path, reports) in enumerate(runs.items()):
        updates = [report["update"] for report in reports]
        for name, style in zip(names, _STYLES):
            for values in _columns(reports, name):
                if all(math.isnan(value) for value in values):
                    continue
                label = ", ".join([path] * (len(runs) > 1) + [name] * (len(names) > 1))
                # A dot too, or a single report would be invisible.
                dot = "." if len(values) < 50 else ""
                axes.plot(updates, values, style, marker=dot, color=f"C{number}", label=label or None)
                shown += [value for value in values if math.isfinite(value)]
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
