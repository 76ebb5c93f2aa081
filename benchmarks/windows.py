"""The network of the benchmarks, the timing of a window, and the loops that are written by hand."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import nn, ops


def make_network(args: argparse.Namespace) -> nn.Cell:
    ms.set_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Dense(args.width, args.width), nn.GELU())]
    # In groups: the compiler takes no cell of a thousand.
    groups = [nn.SequentialCell(*layers[i : i + 40]) for i in range(0, len(layers), 40)]
    return nn.WithLossCell(nn.SequentialCell(*groups), nn.MSELoss())


def make_batch(args: argparse.Namespace) -> tuple[ms.Tensor, ...]:
    random = np.random.default_rng(0)
    shape = (args.batch, args.width)
    return tuple(ms.Tensor.from_numpy(random.standard_normal(shape, np.float32)) for _ in range(2))


def run_window(step: Callable[..., Any], network: nn.Cell, batch: tuple[ms.Tensor, ...]) -> float:
    """Run one window to its end and return the seconds that it took."""
    start = time.perf_counter()
    step(*batch)
    for parameter in network.trainable_params():
        parameter.asnumpy()  # waits for the update
    return time.perf_counter() - start


def loop_by_hand(
    loss_and_grads: Callable[..., Any], update: Callable[[tuple[ms.Tensor, ...]], Any], micro_size: int
) -> Callable[..., Any]:
    """Return what a user writes without this package: gradients come back to Python and are added there."""

    def step(x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss = sums = None
        for part_x, part_y in micro_batches(x, y, micro_size):
            part_loss, grads = loss_and_grads(part_x, part_y)
            loss = part_loss if loss is None else loss + part_loss
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        update(tuple(total / micro_size for total in sums))
        return loss / micro_size

    return step


class TokenLoss(nn.Cell):
    """The mean cross-entropy over all tokens."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.loss = network, nn.CrossEntropyLoss()

    def construct(self, tokens: ms.Tensor, labels: ms.Tensor) -> ms.Tensor:
        logits = self.network(tokens)
        return self.loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def micro_batches(x: ms.Tensor, y: ms.Tensor, micro_size: int) -> Iterable[tuple[ms.Tensor, ms.Tensor]]:
    rows = len(x) // micro_size
    return ((x[begin : begin + rows], y[begin : begin + rows]) for begin in range(0, len(x), rows))


class ForwardBackward(nn.Cell):
    """Forward and backward of one micro batch by MindSpore alone. The gradients are outputs."""

    def __init__(self, network: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.loss_and_grads = ops.value_and_grad(network, None, weights)

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> Any:
        return self.loss_and_grads(x, y)


class DroppingGrads(ForwardBackward):
    """The same, computed and dropped."""

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss, grads = self.loss_and_grads(x, y)
        return ops.depend(loss, grads)


class UpdateFromGiven(nn.Cell):
    """The optimizer alone, from gradients that are given."""

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *grads: ms.Tensor) -> Any:
        return self.optimizer(grads)


def loop_of_bare_parts(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Callable[..., None]:
    """Return the parts of a window and nothing between them: nothing is split or added, no loss is kept.

    What is returned takes one batch, and the same one in later calls.
    """
    forward_backward, update = DroppingGrads(network, optimizer.parameters), UpdateFromGiven(optimizer)
    zeros = [ms.Tensor(np.zeros(parameter.shape, np.float32)) for parameter in optimizer.parameters]
    parts: list[tuple[ms.Tensor, ms.Tensor]] = []

    def run(x: ms.Tensor, y: ms.Tensor) -> None:
        parts[:] = parts or micro_batches(x, y, micro_size)
        for part in parts:
            forward_backward(*part).asnumpy()
        update(*zeros)

    return run


class AddingMicroStep(ForwardBackward):
    """Forward and backward of one micro batch, added into sums in the same graph, by hand.

    ``all_reduce`` is what adds up a gradient over several processes.
    """

    def __init__(self, network: nn.Cell, weights: ms.ParameterTuple, all_reduce: ops.Primitive | None = None) -> None:
        super().__init__(network, weights)
        self.all_reduce = all_reduce
        self.sums = weights.clone("sums", "zeros")

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss, grads = self.loss_and_grads(x, y)
        done = loss
        for total, grad in zip(self.sums, grads):
            # In one order on all ranks, or they would wait for each other for ever.
            part = ops.depend(grad, done)
            if self.all_reduce is not None:
                part = self.all_reduce(part)
            done = ops.assign_add(total, part)
        return ops.depend(loss, done)


class UpdateFromSums(nn.Cell):
    """The update from the sums, which are cleared."""

    def __init__(self, optimizer: nn.Cell, sums: ms.ParameterTuple, parts: int) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.sums, self.parts = optimizer, sums, parts

    def construct(self) -> Any:
        grads = ()
        for total in self.sums:
            grads += (total / self.parts,)
        updated = self.optimizer(grads)
        done = ()
        for total in self.sums:
            done += (ops.assign(total, ops.depend(ops.zeros_like(total), updated)),)
        return done


def adding_loop_by_hand(micro_step: nn.Cell, update: nn.Cell, micro_size: int) -> Callable[..., Any]:
    """Return what a user writes without this package, compiled as far as it goes."""

    def step(x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss = None
        for part_x, part_y in micro_batches(x, y, micro_size):
            part_loss = micro_step(part_x, part_y)
            loss = part_loss if loss is None else loss + part_loss
        update()
        return loss / micro_size

    return step


def versions() -> str:
    return f"MindSpore {ms.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"


def status(key: str) -> float:
    """Return a figure of this process in MB: VmRSS is now, VmHWM the peak. NaN on systems other than Linux."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), math.nan)


def peak_of(run: Callable[[], Any], times: int, warm_up: int = 0) -> tuple[list[Any], float]:
    """Return what calls return, and the peak of the resident memory over them minus what was resident before, in MB."""
    resident = status("VmRSS")
    results = [run() for _ in range(warm_up)]
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # It sets VmHWM back to what is resident now.
    results += [run() for _ in range(times)]
    return results, status("VmHWM") - resident


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a benchmark in a process of its own; arguments and result are what JSON holds."""
    file, name = Path(function.__code__.co_filename), function.__name__
    program = f"import json, sys; sys.path.insert(0, {str(file.parent)!r}); from {file.stem} import {name} as f; "
    program += "print(json.dumps(f(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
