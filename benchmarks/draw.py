"""Draw the pictures of docs/benchmarks anew from the figures recorded there: ``python benchmarks/draw.py``.

Blue is ms_gradaccum, orange MindSpore alone; kinds of parallelism have the other colours. Linear axes begin at 0.
"""

import json
import statistics
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
OURS = {"color": "tab:blue", "marker": "o", "label": "ms_gradaccum"}
ALONE = {"color": "tab:orange", "linestyle": ":", "marker": "x", "label": "MindSpore alone, nothing accumulated"}
WHOLE = {"color": "tab:orange", "linestyle": "--", "label": "MindSpore, whole batch at once"}
KINDS = {"ours, data parallel": "tab:green", "ours, HSDP level1": "tab:purple", "ours, HSDP level2": "tab:brown"}


def panels(number):
    """Return a figure with a row of axes."""
    figure = Figure(figsize=(4.2 * number, 3.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, number)


def save(figure, axes, name):
    """Write the picture, with one legend below all axes and a grid below all lines."""
    for each in axes:
        each.grid(alpha=0.3)
        if each.get_yscale() == "linear":
            each.set_ylim(bottom=0)
    lines = {line.get_label(): line for each in axes for line in each.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(FOLDER / f"{name}.png", format="png")


def micro_size(rows):
    whole, *ours = rows
    sizes = [row["micro_size"] for row in ours]
    figure, axes = panels(2)
    for axis, key, title in zip(axes, ("megabytes", "seconds"), ("peak memory above start, MB", "time of a window, s")):
        axis.axhline(whole[key], **WHOLE)
        axis.plot(sizes, [row[key] for row in ours], **OURS)
        axis.set(xscale="log", xlabel="micro_size: micro batches of the same batch", ylabel=title)
        axis.set_xticks(sizes, sizes, minor=False)
        axis.minorticks_off()
    axes[1].plot(sizes, [row["bare_seconds"] for row in ours], **ALONE)
    save(figure, axes, "micro_size")


def growth(rows, name, against, keys):
    figure, axes = panels(len(keys))
    for axis, (key, other, style, title) in zip(axes, keys):
        axis.plot([row[name] for row in rows], [row[key] for row in rows], **OURS)
        axis.plot([row[name] for row in rows], [row[other] for row in rows], **style)
        axis.set(xscale="log", yscale="log", xlabel=f"{against} (log)", ylabel=f"{title} (log)")
    save(figure, axes, name)


def ranks(rows):
    figure, axes = panels(2)
    for kind, color in KINDS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        numbers = [row["ranks"] for row in chosen]
        held = [(row["weights"] + row["sums"] + row["state"]) / 1e6 for row in chosen]
        style = {"color": color, "marker": "o", "label": kind.removeprefix("ours, ")}
        axes[0].plot(numbers, [row["sent"] / 1e6 for row in chosen], **style)
        axes[1].plot(numbers, held, **style)
    axes[0].set(ylabel="MB passed to messages per rank\nand update of 4 micro batches")
    axes[1].set(ylabel="MB held per rank:\nparameters, sums, Adam's state")
    for axis in axes:
        axis.set(xlabel="ranks")
        axis.set_xticks(numbers)
    save(figure, axes, "ranks")


def long_run(rows):
    """Draw the median of the memory of all seeds, with a band from the least to the largest."""
    windows = sorted({row["windows"] for row in rows})
    seeds = [[row["mb"] for row in rows if row["windows"] == window] for window in windows]
    figure, axis = panels(1)
    axis.fill_between(windows, list(map(min, seeds)), list(map(max, seeds)), color="tab:blue", alpha=0.25)
    label = f"ms_gradaccum: median and range of {len(seeds[0])} seeds"
    axis.plot(windows, list(map(statistics.median, seeds)), color="tab:blue", label=label)
    # The line is level: without room above it, it would lie on the frame.
    axis.set(xlabel="windows", ylabel="resident memory, MB", ylim=(0, 1.1 * max(row["mb"] for row in rows)))
    save(figure, [axis], "long_run")


def language_model(rows):
    styles = {
        "MindSpore's own step": {"color": "tab:orange", "marker": "x"},
        "TokenMeanLoss": {"color": "tab:blue", "marker": "s"},
        "TokenMeanLoss, head": {"color": "tab:green", "marker": "o"},
    }
    figure, axes = panels(2)
    for axis, mode in zip(axes, ("GRAPH", "PYNATIVE")):
        for row, style in styles.items():
            chosen = [each for each in rows if (each["row"], each["mode"]) == (row, mode)]
            sizes = [each["classes"] for each in chosen]
            axis.plot(sizes, [each["mb"] for each in chosen], label=row, **style)
        axis.set(xscale="log", yscale="log", xlabel="words of the vocabulary (log)")
        axis.set(ylabel=f"{mode}: peak memory above start, MB (log)")
        axis.set_xticks(sizes, [f"{size // 1024} k" for size in sizes], minor=False)
        axis.minorticks_off()
    save(figure, axes, "language_model")


STEP = ("micro_step_s", "bare_micro_step_s", ALONE, "time of a micro batch, s")
END = ("end_s", "bare_end_s", ALONE, "time of the end of a window, s")
MEMORY = ("peak_mb", "full_peak_mb", WHOLE, "peak memory above start, MB")
COMPILE = ("compile_s", "bare_compile_s", ALONE, "compile time, s")

if __name__ == "__main__":
    found = {file.stem: json.loads(file.read_text())["rows"] for file in FOLDER.glob("*.json")}
    micro_size(found["micro_size"])
    growth(found["parameters"], "parameters", "parameters, in 10 tensors", (STEP, END, MEMORY))
    growth(found["tensors"], "tensors", "tensors, of a million parameters", (STEP, END, COMPILE))
    ranks(found["ranks"])
    long_run(found["long_run"])
    language_model(found["language_model"])
