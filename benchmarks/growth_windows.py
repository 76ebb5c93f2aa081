"""What windows of one process cost. Each function that `in_child` calls measures in a process of its own."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import nn
from step import BARE, FULL, OURS, Program, build, reset_peak, status
from windows import ForwardBackward, make_batch, make_network

from ms_gradaccum.tools.self_test.costs import DroppingGrads

# A window of it makes MindSpore load what it loads once in a process.
TINY = {"width": 8, "layers": 1, "batch": 4}
BARE_MICRO_BATCH = "bare micro batch"


class Stopwatch:
    """Notes the seconds of each window: of a micro step in the mean, and of the end of the window."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.windows: list[tuple[float, float]] = []
        self.micro_steps: list[float] = []
        self.begun = 0.0
        step.add_callback(self)

    def on_micro_batch_begin(self, event: Any) -> None:
        self.begun = time.perf_counter()

    def on_micro_batch_end(self, event: Any) -> None:
        self.step.body.buffer.weight.asnumpy()  # waits for the micro step
        self.micro_steps.append(time.perf_counter() - self.begun)

    def on_update_begin(self, event: Any) -> None:
        self.begun = time.perf_counter()

    def on_update_end(self, event: Any) -> None:
        self.step.weights[0].asnumpy()  # waits for the update
        end = time.perf_counter() - self.begun
        self.windows.append((sum(self.micro_steps) / len(self.micro_steps), end))
        self.micro_steps = []


def window_seconds(settings: dict[str, int], micro_sizes: list[int], repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each window; all programs take turns, after two windows to warm up.

    They are the full batch and, for each micro_size, ours and its bare parts.
    """
    args = argparse.Namespace(**settings)
    batch = make_batch(args)
    programs = {FULL: build(FULL, 1, args)}
    for micro_size in micro_sizes:
        programs[f"{OURS} {micro_size}"] = build(OURS, micro_size, args)
        programs[f"{BARE} {micro_size}"] = build(BARE, micro_size, args)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2 + repeat):
        for name, program in programs.items():
            seconds[name].append(program.run(batch))
    return {name: runs[2:] for name, runs in seconds.items()}


def part_seconds(settings: dict[str, int], repeat: int) -> dict[str, Any]:
    """Return the best seconds of the parts of a window of two micro batches, and of the same by MindSpore alone.

    None for ours, if it fails: then ``error`` says why.
    """
    args = argparse.Namespace(**settings)
    batch = make_batch(args)
    half = tuple(ms.Tensor(values.asnumpy()[: args.batch // 2].copy()) for values in batch)
    ours = build(OURS, 2, args)
    watch = Stopwatch(ours.step)
    bare = _build_bare(args)
    optimizer = nn.Momentum(bare.network.trainable_params(), 0.1, 0.9)
    windows, alone, error = [], [], ""
    for _ in range(2 + repeat):
        if not error:
            try:
                windows.append(ours.run(batch))
            except RuntimeError as failure:
                error = str(failure).splitlines()[0]
        start = time.perf_counter()
        loss, grads = bare.step(*half)
        loss.asnumpy()
        middle = time.perf_counter()
        optimizer(grads)
        optimizer.parameters[0].asnumpy()
        alone.append((middle - start, time.perf_counter() - middle))
    micro_step, end = (None, None) if error else map(min, zip(*watch.windows[2:]))
    bare_micro_step, bare_end = map(min, zip(*alone[2:]))
    return {
        "parameters": sum(weight.size for weight in optimizer.parameters),
        "tensors": len(optimizer.parameters),
        "micro_step_s": micro_step,
        "bare_micro_step_s": bare_micro_step,
        "end_s": end,
        "bare_end_s": bare_end,
        # The first window takes longer than the next ones by that.
        "compile_s": None if error else windows[0] - min(windows),
        "bare_compile_s": sum(alone[0]) - bare_micro_step - bare_end,
        "error": error,
    }


def peak_memory(name: str, micro_size: int, settings: dict[str, int], warm: bool) -> dict[str, float]:
    """Return the peak of the resident memory over four windows above what is resident before the network exists.

    The batch is there before that. ``warm``: so is what a tiny network's window makes MindSpore load.
    ``BARE_MICRO_BATCH`` is forward and backward of the first micro batch alone, whose gradients are dropped as they
    come. Unit: MB of 2 ** 20 bytes.
    """
    if warm:
        _warm_up()
    args = argparse.Namespace(**settings)
    batch = make_batch(args)
    if name == BARE_MICRO_BATCH:
        batch = tuple(ms.Tensor(values.asnumpy()[: args.batch // micro_size].copy()) for values in batch)
    before = status("VmRSS")
    reset_peak()
    program = _build_bare(args, DroppingGrads) if name == BARE_MICRO_BATCH else build(name, micro_size, args)
    for _ in range(4):
        program.run(batch)
    weights = sum(weight.nbytes for weight in program.network.trainable_params())
    # What MindSpore counts itself.
    counted = ms.runtime.max_memory_allocated()
    return {"peak": status("VmHWM") - before, "weights": weights / 2**20, "counted": counted / 2**20}


def _build_bare(args: argparse.Namespace, forward_backward: type[ForwardBackward] = ForwardBackward) -> Program:
    ms.set_context(mode=ms.GRAPH_MODE)
    network = make_network(args)
    micro_step = forward_backward(network.set_train(), ms.ParameterTuple(network.trainable_params()))
    return Program(ms.GRAPH_MODE, micro_step, network)


def _warm_up() -> None:
    args = argparse.Namespace(**TINY)
    batch = make_batch(args)
    for program in (build(OURS, 2, args), build(FULL, 1, args), _build_bare(args)):
        program.run(batch)


def in_child(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file in a process of its own."""
    command = [sys.executable, __file__, measure.__name__, json.dumps(arguments)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    measure = {each.__name__: each for each in (window_seconds, part_seconds, peak_memory)}[sys.argv[1]]
    print(json.dumps(measure(*json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
