"""The cost of measuring the loss: time of the first two windows, and peak memory, with and without it.

Each run is a process of its own, since compilations share what an earlier one has left; the two take turns, and the
medians are compared. ``python benchmarks/first_window.py``
"""

import argparse
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from windows import TokenLoss, in_child, make_batch, make_network, run_window

from ms_gradaccum import GradAccumulation, TrainOneStepCell

sys.path.append(str(Path(__file__).resolve().parents[1] / "sample_code" / "transformer_lm"))
from transformer import Transformer  # noqa: E402

PARTS, WINDOWS = 4, 6
WIDTHS = {"MLP, 6 x 512": 512, "MLP, 6 x 2048": 2048}


def run(kind: str, mode: str, check_loss: bool) -> tuple[float, float, float]:
    """Train a few windows. Return the seconds of the first and of the second, and the peak memory."""
    ms.set_context(mode=getattr(ms, f"{mode}_MODE"))
    if kind in WIDTHS:
        sizes = argparse.Namespace(width=WIDTHS[kind], layers=6, batch=1024)
        network, batch = make_network(sizes), make_batch(sizes)
    else:
        network = TokenLoss(Transformer(500, 64, width=128, layers=4))
        batch = (Tensor(np.random.default_rng(0).integers(0, 500, (32, 64)).astype(np.int32)),) * 2
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    step = TrainOneStepCell(GradAccumulation(network, PARTS), optimizer, check_loss=check_loss).set_train()
    seconds = [run_window(step, network, batch) for _ in range(WINDOWS)]
    return seconds[0], seconds[1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(kind: str, mode: str, turns: int) -> None:
    """Print one row."""
    runs = [[in_child(run, kind, mode, check) for check in (False, True)] for _ in range(turns)]
    without, with_it = (statistics.median(turn[i][0] for turn in runs) for i in (0, 1))
    ratios: list[Any] = [statistics.median(b[i] / a[i] for a, b in runs) for i in range(3)]
    print(f"| {kind} | {mode} | {without:.2f} | {with_it:.2f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    print("| network | mode | first window, s: without | with | ratio | second, ratio | peak memory, ratio |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for kind in (*WIDTHS, "transformer"):
        for mode in ("GRAPH", "PYNATIVE"):
            measure(kind, mode, turns)


if __name__ == "__main__":
    main()
