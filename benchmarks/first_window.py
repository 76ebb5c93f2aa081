"""The cost of measuring the loss: time to the end of the first window, and peak memory, with and without it.

Each run is a process of its own, since compilations share what an earlier one has left; the two take turns, and the
medians are compared. ``python benchmarks/first_window.py``
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS, WINDOWS = 4, 6


def network(kind: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a loss cell and a batch."""
    import numpy as np
    from mindspore import Tensor, nn

    numbers = np.random.default_rng(0)
    if kind == "MLP":
        layers = [layer for _ in range(6) for layer in (nn.Dense(512, 512), nn.GELU())]
        x = Tensor(numbers.normal(size=(1024, 512)).astype(np.float32))
        return nn.WithLossCell(nn.SequentialCell(layers), nn.MSELoss()), (x, x)

    sys.path.insert(0, str(Path(__file__).parents[1] / "sample_code" / "transformer_lm"))
    from transformer import Transformer

    class TokenLoss(nn.Cell):
        def __init__(self, net: nn.Cell) -> None:
            super().__init__()
            self.net, self.loss_fn = net, nn.CrossEntropyLoss()

        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.net(x)
            return self.loss_fn(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    tokens = Tensor(numbers.integers(0, 500, (32, 64)).astype(np.int32))
    return TokenLoss(Transformer(500, 64, width=128, layers=4)), (tokens, tokens)


def run(kind: str, mode: str, check_loss: bool) -> None:
    """Train a few windows and print the seconds of each and the peak memory in MB."""
    import mindspore as ms
    from mindspore import nn

    from ms_gradaccum import GradAccumulation, TrainOneStepCell

    ms.set_context(mode=getattr(ms, f"{mode}_MODE"))
    cell, batch = network(kind)
    optimizer = nn.Adam(cell.trainable_params(), 1e-4)
    step = TrainOneStepCell(GradAccumulation(cell, PARTS), optimizer, check_loss=check_loss).set_train()
    seconds = []
    for _ in range(WINDOWS):
        begin = time.perf_counter()
        step(*batch).loss.asnumpy()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def measured(kind: str, mode: str, check_loss: bool) -> dict[str, Any]:
    """Return what a process of its own prints."""
    command = [sys.executable, __file__, "--run", kind, mode, str(int(check_loss))]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def main() -> None:
    """Print one row per network and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.run:
        kind, mode, check_loss = arguments.run
        run(kind, mode, check_loss == "1")
        return
    print("| network | mode | first window, s: without | with | ratio | window 6, ratio | peak memory, ratio |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for kind in ("MLP", "transformer"):
        for mode in ("GRAPH", "PYNATIVE"):
            turns = [[measured(kind, mode, check) for check in (False, True)] for _ in range(arguments.turns)]
            first, last, peak = ([[read(each) for each in turn] for turn in turns] for read in READS)
            without, with_it = (statistics.median(turn[i] for turn in first) for i in (0, 1))
            ratios = [statistics.median(turn[1] / turn[0] for turn in pairs) for pairs in (first, last, peak)]
            row = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {kind} | {mode} | {without:.2f} | {with_it:.2f} | {row} |", flush=True)


READS = (lambda each: each["seconds"][0], lambda each: each["seconds"][-1], lambda each: each["peak"])

if __name__ == "__main__":
    main()
