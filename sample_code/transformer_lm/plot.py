"""Check that runs of the sample have the same loss at every update, and draw them in one plot.

    python plot.py FOLDER PLOT.png

FOLDER holds a file of losses per run, written by train.py, whose name says how 32 lines were cut: processes x
accumulation steps x rows per batch, as in 2x4x4.jsonl. Runs called "mean of means ..." are shown and not checked. The
plot needs matplotlib.
"""

import json
import sys
from pathlib import Path

# Of the loss, in nats per token. What float32 rounds off differs between runs, and training passes it on.
TOLERANCE = 1e-5
WRONG = "mean of means"


def read_runs(folder):
    """The updates of each run by its name: dicts with the keys update, loss and weight."""
    runs = {file.stem: [json.loads(line) for line in file.open()] for file in sorted(folder.glob("*.jsonl"))}
    return dict(sorted(runs.items(), key=lambda run: run[0].startswith(WRONG)))


def differences(run, reference):
    return [abs(a["loss"] - b["loss"]) for a, b in zip(run, reference)]


def check_runs(runs):
    """Say how far each run is from the first one; raise if one of them is not the same training."""
    name, *others = runs
    reference = runs[name]
    for other in others:
        largest = max(differences(runs[other], reference))
        print(f"{other} against {name}: {len(runs[other])} updates, losses differ by at most {largest:.1e}")
        if not other.startswith(WRONG):
            assert [u["weight"] for u in runs[other]] == [u["weight"] for u in reference], "other lines in an update"
            assert largest <= TOLERANCE, f"{other} is not the training of {name}"


def draw_runs(runs, file, title="processes × accumulation steps × rows", tolerance=TOLERANCE):
    """Draw the losses of all runs, one line on the other, and below them how far they are from the first one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    name, *others = runs
    for i, run in enumerate(runs.values()):
        # The first one below and widest, so that all can be seen.
        top.plot([update["loss"] for update in run], color=f"C{i}", linewidth=2 * (len(runs) - i) - 1)
    for i, other in enumerate(others, 1):
        # Equal losses have no place on a logarithmic axis: they are drawn at its lower end.
        shown = [max(difference, 1e-8) for difference in differences(runs[other], runs[name])]
        bottom.semilogy(shown, ".", color=f"C{i}", markersize=3)
    if tolerance is not None:
        bottom.axhline(tolerance, color="grey", linewidth=0.8)
    labels = [run.replace("x", " × ") for run in runs]
    top.legend(labels, title=title)
    top.set(ylabel="loss")
    bottom.set(xlabel="update", ylabel=f"difference from {labels[0]}")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    runs = read_runs(Path(sys.argv[1]))
    check_runs(runs)
    draw_runs(runs, sys.argv[2])
    print(f"All losses are equal to {TOLERANCE:g} to the end. Plot: {sys.argv[2]}")
