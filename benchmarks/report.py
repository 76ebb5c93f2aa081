"""What observing a training costs: the time of each item of a report beside that of a window.

python benchmarks/report.py
msrun --worker_num=2 --local_worker_num=2 --join=True benchmarks/report.py    # with messages to measure
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from windows import versions

from ms_gradaccum import GradAccumulation, MetricsLogger, ProgressBar, StepOutput, StepReporter, TrainOneStepCell
from ms_gradaccum.training.events import Events

Observer = Callable[[Any], Any]


class Listener:
    """Listens to everything and does nothing."""

    def on_micro_batch_begin(self, event: Any) -> None: ...

    def on_micro_batch_end(self, event: Any) -> None: ...

    def on_update_begin(self, event: Any) -> None: ...

    def on_update_end(self, event: Any) -> None: ...


def telling(micro_size: int) -> Observer:
    """Return what tells a listener of all events of a window, which a step does on its way."""
    events = Events("benchmark")
    events.add(Listener())

    def tell(output: StepOutput) -> None:
        for index in range(micro_size):
            events.micro_batch_begin(index, 1)
            events.micro_batch_end(index, 1)
        events.update_begin()
        events.update_end(output)

    return tell


def observers(step: TrainOneStepCell, folder: Path, micro_size: int) -> dict[str, Observer]:
    """Return what each row does with the output of a window."""
    events = MetricsLogger(folder / "events.jsonl", folder / "events", train_step=step)
    return {
        "a listener to all events": telling(micro_size),
        "StepReporter": StepReporter(step).report,
        "  with weight_norm": StepReporter(step, weight_norm=True).report,
        "  with peak_memory": StepReporter(step, peak_memory=True).report,
        "  with communication_time": StepReporter(step, communication_time=True).report,
        "MetricsLogger": MetricsLogger(folder / "lines.jsonl", train_step=step).log,
        "  with an event file": events.log,
        "ProgressBar, nothing shown": ProgressBar(live=False, seconds_per_line=1e6).update,
        "ProgressBar, a line printed": ProgressBar(live=False, seconds_per_line=1e-9).update,
    }


def build(args: argparse.Namespace) -> tuple[TrainOneStepCell, tuple[ms.Tensor, ...]]:
    ms.set_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Dense(args.width, args.width), nn.GELU())]
    network = nn.SequentialCell(*layers)
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), args.micro_size)
    step = TrainOneStepCell(loss_cell, nn.Adam(network.trainable_params(), 1e-4))
    random = np.random.default_rng(0)
    shape = (args.batch, args.width)
    return step, tuple(ms.Tensor(random.standard_normal(shape, np.float32)) for _ in range(2))


def measure(args: argparse.Namespace, folder: Path) -> tuple[float, dict[str, float]]:
    """Return the median seconds of a window and of each row, each of which has windows of its own in turn."""
    step, batch = build(args)
    rows = observers(step, folder, args.micro_size)
    windows: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(2 + args.repeat):  # two to warm up
        for name, observe in rows.items():
            start = time.perf_counter()
            output = step(*batch)
            step.weights[0].asnumpy()  # waits for the update
            middle = time.perf_counter()
            observe(output)
            if round_ >= 2:
                windows.append(middle - start)
                seconds[name].append(time.perf_counter() - middle)
    return statistics.median(windows), {name: statistics.median(runs) for name, runs in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for key, default in {"width": 256, "layers": 6, "batch": 256, "micro-size": 4, "repeat": 50}.items():
        parser.add_argument(f"--{key}", type=int, default=default, help=f"default: {default}")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    rank, size = 0, 1
    if os.getenv("MS_ROLE"):  # of msrun, whose scheduler ends here
        init()
        rank, size = get_rank(), get_group_size()
    # The lines of ProgressBar go nowhere.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        window, medians = measure(args, Path(folder))
    if rank:
        return
    print(f"{args.layers} x (Dense({args.width}), GELU), batch {args.batch} in {args.micro_size} micro batches, Adam")
    print(f"{size} process(es); {versions()}")
    print(f"{'a window':28}{window * 1e6:9.0f} us")
    for name, seconds in medians.items():
        print(f"{name:28}{seconds * 1e6:9.0f} us{seconds / window:9.2%}")


if __name__ == "__main__":
    main()
