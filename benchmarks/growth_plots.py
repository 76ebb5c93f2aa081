"""The pictures of docs/benchmarks, from the rows that growth.py keeps beside them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
MB = 2**20


def draw(theme: str, rows: Rows, path: Path) -> None:
    """Draw the picture of a theme, 800 pixels wide."""
    # Without pyplot: no window, and no state that outlives the picture.
    figure = Figure(figsize=(8, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    DRAWINGS[theme](figure, rows)
    figure.savefig(path, format="png")


def draw_micro_size(figure: Figure, rows: Rows) -> None:
    full, ours = rows[0], rows[1:]
    sizes = [row["micro_size"] for row in ours]
    panels = zip(
        figure.subplots(1, 2),
        ("megabytes", "seconds"),
        ("peak memory above start (MB)", "time of a window (s)"),
    )
    for axes, key, label in panels:
        axes.axhline(full[key], color="C1", linestyle="--", label="full batch, MindSpore's own step")
        axes.plot(sizes, [row[key] for row in ours], "o-", color="C0", label="ms_gradaccum")
        if key == "seconds":
            bare = [row["bare_seconds"] for row in ours]
            axes.plot(sizes, bare, "x:", color="gray", label="bare micro batches, MindSpore alone")
        _finish(axes, "micro_size (micro batches per window)", label, sizes, 2)
        axes.set_ylim(0, 1.4 * max(row[key] for row in rows))
        axes.legend(loc="upper right")


def draw_parameters(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    counts = [row["parameters"] for row in rows]
    _lines(left, rows, counts, _parts())
    _finish(left, "parameters", "time (s)", None, 10)
    left.set_yscale("log")
    left.legend(fontsize="small")
    for key, name, style in (("peak_mb", "ms_gradaccum", "o-C0"), ("full_peak_mb", "MindSpore's own step", "s--C1")):
        copies = [MB * row[key] / 4 / count for row, count in zip(rows, counts)]
        # Below this the megabytes of the compiler are more than the parameters.
        shown = [(count, copy) for count, copy in zip(counts, copies) if count > 5e5]
        right.plot(*zip(*shown), style, label=name)
    right.axhline(4, color="gray", linestyle=":", label="weights, state, sums, gradients")
    _finish(right, "parameters", "peak memory / (parameters x 4 bytes)", None, 10)
    right.set_ylim(0)
    right.legend(fontsize="small")


def draw_tensors(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    counts = [row["tensors"] for row in rows]
    _lines(left, rows, counts, _parts())
    compiling = (("compile_s", "first window", "o-C0"), ("bare_compile_s", "the same by MindSpore alone", "s--C1"))
    _lines(right, rows, counts, compiling)
    for axes, label in ((left, "time (s)"), (right, "time to compile (s)")):
        _finish(axes, "parameter tensors", label, None, 10)
        axes.set_yscale("log")
        axes.legend(fontsize="small")


def draw_ranks(figure: Figure, rows: Rows) -> None:
    panels = figure.subplots(1, 3)
    figure.set_size_inches(8, 3.2)
    ranks = sorted({row["ranks"] for row in rows})
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figures = (
        ("sent", MB, "handed to messages in a window (MB)"),
        ("sums", MB, "sums that a rank keeps (MB)"),
        ("end_s", 1, "end of a window (s)"),
    )
    for axes, (key, unit, label) in zip(panels, figures):
        for kind, style in zip(kinds, ("o-C0", "s--C1", "^:C2")):
            axes.plot(ranks, [row[key] / unit for row in rows if row["kind"] == kind], style, label=kind[6:])
        _finish(axes, "ranks", label, ranks, 2)
        axes.set_ylim(0)
    panels[0].legend(fontsize="small")


def draw_memory(figure: Figure, rows: Rows) -> None:
    figure.set_size_inches(8, 3.8)
    axes = figure.subplots()
    places = range(len(rows))
    below = [0.0] * len(rows)
    for key, label, color in (
        ("weights", "parameters", "#4c72b0"),
        ("state", "optimizer state", "#7f9fd0"),
        ("buffer", "float32 sums", "#55a868"),
        ("bare", "gradients and activations of one micro batch, by MindSpore alone", "#c9b26b"),
    ):
        values = [row[key] for row in rows]
        axes.bar(places, values, 0.6, below, label=label, color=color)
        below = [low + value for low, value in zip(below, values)]
    axes.plot(places, [row["peak"] for row in rows], "ok", label="measured, with the ratio to the sum")
    for place, row in zip(places, rows):
        axes.annotate(f"{row['ratio']:.2f}", (place, row["peak"]), (0, 6), textcoords="offset points", ha="center")
    axes.set_xticks(places, [str(row["micro_size"]) for row in rows])
    axes.set(xlabel="micro_size (micro batches per window)", ylabel="memory (MB)", ylim=(0, 1.6 * max(below)))
    axes.legend(fontsize="small")


DRAWINGS: dict[str, Callable[[Figure, Rows], None]] = {
    "micro_size": draw_micro_size,
    "parameters": draw_parameters,
    "tensors": draw_tensors,
    "ranks": draw_ranks,
    "memory": draw_memory,
}


def _parts() -> Iterable[tuple[str, str, str]]:
    return (
        ("micro_step_s", "micro step", "o-C0"),
        ("bare_micro_step_s", "forward and backward by MindSpore alone", "o--C1"),
        ("end_s", "end of a window", "^-C0"),
        ("bare_end_s", "optimizer by MindSpore alone", "^--C1"),
    )


def _lines(axes: Axes, rows: Rows, places: list[int], lines: Iterable[tuple[str, str, str]]) -> None:
    for key, label, style in lines:
        shown = [(place, row[key]) for place, row in zip(places, rows) if row[key] is not None]
        axes.plot(*zip(*shown), style, label=label)


def _finish(axes: Axes, x: str, y: str, ticks: list[int] | None, base: int) -> None:
    axes.set_xscale("log", base=base)
    if ticks is not None:
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
