"""Check that runs of the sample have the same loss at every update, and draw them in one plot.

    python plot.py FOLDER PLOT.png

FOLDER holds a file of losses per run, written by train.py, whose name says how 32 lines were cut: processes x
accumulation steps x rows per batch, as in 2x4x4.jsonl. Runs called "mean of means ..." are shown and not checked. Runs
with other seeds are in folders of their own, and become a band. The plot needs matplotlib.
"""

import json
import statistics
import sys
from pathlib import Path

# Of the loss, in nats per token. What float32 rounds off differs between runs, and training passes it on.
TOLERANCE = 1e-5
WRONG = "mean of means"


def read_runs(folder):
    """The runs by name, one per seed. Each is a list of updates: dicts with the keys update, loss and weight."""
    runs = {}
    for file in sorted(folder.rglob("*.jsonl"), key=lambda file: (file.stem.startswith(WRONG), file.stem, file)):
        runs.setdefault(file.stem, []).append([json.loads(line) for line in file.open()])
    return runs


def differences(run, reference):
    return [abs(a["loss"] - b["loss"]) for a, b in zip(run, reference)]


def largest_differences(runs, references):
    """How far runs are from those of the same seeds, update by update."""
    return list(map(max, zip(*map(differences, runs, references))))


def check_runs(runs):
    """Say how far each run is from the first one; raise if one of them is not the same training."""
    name, *others = runs
    for other in others:
        largest = max(largest_differences(runs[other], runs[name]))
        print(f"{other} against {name}: {len(runs[other][0])} updates, losses differ by at most {largest:.1e}")
        if not other.startswith(WRONG):
            weights = ([[update["weight"] for update in run] for run in runs[one]] for one in (name, other))
            assert next(weights) == next(weights), "other lines in an update"
            assert largest <= TOLERANCE, f"{other} is not the training of {name}"


def draw_band(axes, values, color, **style):
    """Draw the median of several runs, with a band from the least to the largest."""
    by_place = list(zip(*values))
    x = range(1, len(by_place) + 1)
    axes.fill_between(x, list(map(min, by_place)), list(map(max, by_place)), color=color, alpha=0.2, linewidth=0)
    return axes.plot(x, list(map(statistics.median, by_place)), color=color, **style)[0]


def draw_runs(runs, file, title="processes × accumulation steps × rows", tolerance=TOLERANCE):
    """Draw the losses of all runs, one line on the other, and below them how far they are from the first one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    name, *others = runs
    lines = []
    for i, seeds in enumerate(runs.values()):
        # The first one below and widest, so that all can be seen.
        losses = [[update["loss"] for update in run] for run in seeds]
        lines.append(draw_band(top, losses, f"C{i}", linewidth=2 * (len(runs) - i) - 1))
    for i, other in enumerate(others, 1):
        # Equal losses have no place on a logarithmic axis: they are drawn at its lower end.
        shown = [max(difference, 1e-8) for difference in largest_differences(runs[other], runs[name])]
        bottom.semilogy(range(1, len(shown) + 1), shown, ".", color=f"C{i}", markersize=3)
    if tolerance is not None:
        bottom.axhline(tolerance, color="grey", linewidth=0.8)
    labels = [run.replace("x", " × ") for run in runs]
    top.legend(lines, labels, title=title)
    seeds = len(runs[name])
    top.set(ylabel="loss")
    top.set_title(f"median and range of {seeds} seeds" if seeds > 1 else "one seed", fontsize="medium")
    bottom.set(xlabel="update", ylabel=f"largest difference from {labels[0]}")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    runs = read_runs(Path(sys.argv[1]))
    check_runs(runs)
    draw_runs(runs, sys.argv[2])
    print(f"All losses are equal to {TOLERANCE:g} to the end. Plot: {sys.argv[2]}")
