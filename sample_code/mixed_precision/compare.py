"""Check that a run of the sample in half precision is as good as one in float32, and draw both.

    python compare.py FOLDER PLOT.png

FOLDER holds fp32.jsonl and fp16.jsonl of train.py --metrics, or a folder with them per seed. The plot needs matplotlib.
"""

import json
import sys
from pathlib import Path

from ms_gradaccum.tools.reporting.run_plot import read_run

sys.path.append(str(Path(__file__).resolve().parents[1] / "transformer_lm"))
from plot import differences, draw_runs

# Of the accuracy. Half precision rounds each product anew: as with another seed, images at the border between two
# classes change sides. Of 1,000 test images these are 20.
MARGIN = 0.02


def read_accuracy(file):
    """The share of the test images that is right after the last epoch."""
    lines = [json.loads(line) for line in file.open()]
    return [line["eval_accuracy"] for line in lines if "eval_accuracy" in line][-1]


def describe(file):
    """Describe the result of a run in a sentence."""
    reports = read_run(file)
    scales = [report["loss_scale"] for report in reports]
    # Each change once, in order.
    path = [f"{scale:g}" for i, scale in enumerate(scales) if i == 0 or scale != scales[i - 1]]
    return (
        f"{file.stem}: {len(reports)} updates, {reports[-1]['skipped_updates']} skipped, loss scale {', '.join(path)}, "
        f"last loss {reports[-1]['loss']:.4f}, {read_accuracy(file):.1%} of the test images right"
    )


def compare(full, half):
    """Say what both runs have come to; raise if the second one is worse by more than the margin."""
    print(describe(full), describe(half), sep="\n")
    print(f"losses differ by at most {max(differences(read_run(half), read_run(full))):.1e}")
    lost = read_accuracy(full) - read_accuracy(half)
    # Not just below the margin by what a float rounds off.
    assert lost < MARGIN + 1e-6, f"{half.stem} gets {lost:.1%} less of the test images right, more than {MARGIN:.0%}"
    print(f"The accuracy of {half.stem} is within {MARGIN:.0%} of the test images of that of {full.stem}, or better.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    files = {name: sorted(Path(sys.argv[1]).rglob(f"{name}.jsonl")) for name in ("fp32", "fp16")}
    for pair in zip(*files.values()):
        compare(*pair)
    draw_runs({name: list(map(read_run, runs)) for name, runs in files.items()}, sys.argv[2], "precision", None)
    print(f"Plot: {sys.argv[2]}")
