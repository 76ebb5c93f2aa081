"""The cost of measuring the loss: core-seconds of the first windows with and without it, and the slowest window.

Each run is a process of its own, since compilations share what an earlier one has left; the two take turns, and the
medians are compared. ``python benchmarks/first_window.py``
"""

import argparse
import resource
import statistics
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from windows import TokenLoss, in_child, make_batch, make_network, run_window

from ms_gradaccum import GradAccumulation, TrainOneStepCell

SAMPLES = Path(__file__).resolve().parents[1] / "sample_code"
sys.path += [str(SAMPLES / "transformer_lm"), str(SAMPLES / "resnet18")]
from resnet import ResNet18  # noqa: E402
from transformer import Transformer  # noqa: E402

PARTS, WINDOWS = 4, 8
LAYERS = {"transformer, 4 layers": 4, "transformer, 12 layers": 12}
KINDS = ("MLP, 6 x 512", *LAYERS, "ResNet18")


def network_of(kind: str) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """Return a loss cell and a batch."""
    numbers = np.random.default_rng(0)
    if kind in LAYERS:
        tokens = Tensor(numbers.integers(0, 500, (32, 64)).astype(np.int32))
        return TokenLoss(Transformer(500, 64, width=64, layers=LAYERS[kind])), (tokens, tokens)
    if kind == "ResNet18":
        images = numbers.normal(size=(32, 3, 32, 32)).astype(np.float32)
        labels = numbers.integers(0, 10, 32).astype(np.int32)
        return nn.WithLossCell(ResNet18(10), nn.CrossEntropyLoss()), (Tensor(images), Tensor(labels))
    sizes = argparse.Namespace(width=512, layers=6, batch=1024)
    return make_network(sizes), make_batch(sizes)


def core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(kind: str, mode: str, check_loss: bool) -> list[float]:
    """Train the first windows. Return the core-seconds of each, and the peak memory."""
    ms.set_context(mode=getattr(ms, f"{mode}_MODE"))
    network, batch = network_of(kind)
    optimizer = nn.Adam(network.trainable_params(), 1e-4)
    step = TrainOneStepCell(GradAccumulation(network, PARTS), optimizer, check_loss=check_loss).set_train()
    ends = [core_seconds()]
    for _ in range(WINDOWS):
        run_window(step, network, batch)
        ends.append(core_seconds())
    return [*np.diff(ends).tolist(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]


def measure(kind: str, mode: str, turns: int) -> None:
    """Print one row."""
    runs = [[in_child(run, kind, mode, check) for check in (False, True)] for _ in range(turns)]
    without, with_it = (statistics.median(sum(turn[i][:-1]) for turn in runs) for i in (0, 1))
    total = statistics.median(sum(b[:-1]) / sum(a[:-1]) for a, b in runs)
    # Windows that measure are 1, 2, 4 and 8; the first one compiles.
    slowest = statistics.median(max(b[1], b[3], b[7]) / statistics.median([b[2], b[4], b[5], b[6]]) for _, b in runs)
    memory = statistics.median(b[-1] / a[-1] for a, b in runs)
    print(
        f"| {kind} | {mode} | {without:.1f} | {with_it:.1f} | {total:.2f} | {slowest:.1f} | {memory:.2f} |", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    print(
        "| network | mode | core-seconds of 8 windows: without | with | ratio | slowest by a later one | peak memory |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for kind in KINDS:
        for mode in ("GRAPH", "PYNATIVE"):
            measure(kind, mode, turns)


if __name__ == "__main__":
    main()
