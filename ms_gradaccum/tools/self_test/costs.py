"""Time and memory of a window over its bare parts. They are reported, and nothing fails by them."""

import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.compiled import graph_mode, return_memory
from ms_gradaccum.tools.probing import memory
from ms_gradaccum.tools.self_test.training import Found, Place
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

_WIDTH, _LAYERS, _ROWS, _PARTS = 64, 12, 32768, 4
_TIMES = 5
# Holds the bytes that bare parts take.
_BARE = "bare_parts"


class DroppingGrads(nn.Cell):
    """The gradient of one micro batch, computed and dropped."""

    def __init__(self, network: nn.Cell, parameters: Any) -> None:
        super().__init__(auto_prefix=False)
        self.value_and_grad = ops.value_and_grad(network, None, parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.value_and_grad(x, y)
        return ops.depend(loss, gradients)


class UpdateFromGiven(nn.Cell):
    """The optimizer alone, from gradients that are given."""

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients: Tensor) -> Any:
        return self.optimizer(gradients)


def loop_of_bare_parts(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Callable[..., None]:
    """Return the parts of a window and nothing between them: nothing is split or added, no loss is kept.

    What is returned takes one batch, and the same one in later calls.
    """
    forward_backward, update = DroppingGrads(network, optimizer.parameters), UpdateFromGiven(optimizer)
    zeros = [Tensor(np.zeros(parameter.shape, np.float32)) for parameter in optimizer.parameters]
    micro_batches: list[Any] = []

    def run(*batch: Tensor) -> None:
        if not micro_batches:
            pieces = (np.split(tensor.asnumpy(), micro_size) for tensor in batch)
            micro_batches.extend(tuple(map(Tensor, each)) for each in zip(*pieces))
        for micro_batch in micro_batches:
            forward_backward(*micro_batch).asnumpy()
        update(*zeros)

    return run


class _Parts:
    """A network, and a window of it in two ways. Each takes no argument and waits for its end."""

    def __init__(self) -> None:
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Dense(_WIDTH, _WIDTH), nn.ReLU())]
        network = nn.WithLossCell(nn.SequentialCell(layers), nn.MSELoss())
        self.optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        rng = np.random.default_rng(0)
        self.batch = [Tensor(rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32)) for _ in range(2)]
        self.bare_loop = loop_of_bare_parts(network, self.optimizer, _PARTS)
        self.step = TrainOneStepCell(GradAccumulation(network, _PARTS), self.optimizer)

    def bare(self) -> None:
        """Run the backward passes of the micro batches, and the optimizer: nothing is added or reported."""
        self.bare_loop(*self.batch)
        self.optimizer.parameters[0].asnumpy()

    def window(self) -> None:
        """Run the step."""
        self.step(*self.batch).loss.asnumpy()
        self.optimizer.parameters[0].asnumpy()


def bare_parts(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """Measure the memory of the bare parts, for `ratios`. On CPU graphs do not return it, so it is another process."""
    with graph_mode():
        taken = _memory_of(_Parts().bare, place.device)
    (place.folder / _BARE).write_text(str(taken))
    return Found(figures={"MiB": round(taken / 2**20, 1)})


def ratios(place: Place, mode: str, parallel: str, dtype: str) -> Found:
    """Measure a window beside its bare parts."""
    with graph_mode():
        parts = _Parts()
        taken = _memory_of(parts.window, place.device)
        parts.bare()
        bare_seconds, seconds = _fastest(parts.bare, parts.window)
    figures = {"time": seconds / bare_seconds}
    if (place.folder / _BARE).exists():
        figures["memory"] = taken / int((place.folder / _BARE).read_text())
    return Found(figures={name: round(figure, 3) for name, figure in figures.items()})


def _fastest(*runs: Callable[[], None]) -> list[float]:
    """Return the shortest time of each of what runs in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_TIMES):
        for run, taken in zip(runs, times):
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
    return [min(taken) for taken in times]


def _memory_of(run: Callable[[], None], device: str) -> int:
    """Return the most bytes that are taken by the first run and a second one beyond what is taken now."""
    on_cpu = device == "CPU"
    if on_cpu:
        return_memory()
        memory.reset_peak()
    else:
        ms.runtime.reset_max_memory_allocated()
    begin = memory.resident() if on_cpu else int(ms.runtime.memory_allocated())
    run()
    run()
    return (memory.peak() if on_cpu else int(ms.runtime.max_memory_allocated())) - begin
