"""Items of a report that cost time: the norm of the parameters, the time of the messages, the peak of the memory."""

import resource
import time
from collections.abc import Sequence

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.compiled import NOTHING, Compiled
from ms_gradaccum.backend.tensors import Done, chunks_of
from ms_gradaccum.gradients.clipping import global_norm
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.micro_step import EmptyStep


class WeightNorm(nn.Cell):
    """The L2 norm of all trained parameters, taken as one vector. They are whole on each rank."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameter for reducer in reducers for parameter in reducer.replicas())
        self.chunks = chunks_of([parameter.size for parameter in self.parameters])

    def construct(self, nothing: Tensor) -> Tensor:
        return global_norm(tuple(self.parameters), self.chunks) + nothing


class UpdateMessages(nn.Cell):
    """The messages of an update without the update, for an empty buffer."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        super().__init__(auto_prefix=False)
        self.reducers = nn.CellList(reducers, auto_prefix=False)

    def construct(self, nothing: Tensor) -> Tensor:
        done: Done = nothing
        for reducer in self.reducers:
            done = reducer.send_again(done)
        return ops.depend(nothing + 0.0, done)


class MicroBatchMessages(EmptyStep):
    """The messages of a micro batch without the micro batch."""

    def construct(self, nothing: Tensor) -> Tensor:
        return ops.depend(nothing + 0.0, super().construct(nothing))


class CommunicationTime:
    """The time of a window's messages, measured by sending them again with empty buffers. Collective."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self.most = reducers[0].most
        cells = [UpdateMessages(reducers)] if reducers[0].several else []
        cells += [MicroBatchMessages(reducers)] if reducers[0].every_batch else []
        self.runs = [compiled(cell, "the messages") for cell in cells]
        self.is_warm = False

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds for a window with ``micro_batches`` micro batches on this rank. One process sends none."""
        if not self.runs:
            return 0.0
        if not self.is_warm:  # The first run compiles, and opens connections.
            self.is_warm = True
            self.seconds(1)
        # This synchronizes all ranks, so that waiting for a late rank is not measured.
        times = 1, self.most(micro_batches)
        return sum(count * _seconds_of(run) for count, run in zip(times, self.runs))


def compiled(cell: nn.Cell, name: str) -> Compiled:
    """Return a function that runs a cell as a graph."""
    return Compiled(lambda: cell, "StepReporter", name)


def _seconds_of(run: Compiled) -> float:
    start = time.perf_counter()
    run(NOTHING).asnumpy()
    return time.perf_counter() - start


def peak_memory() -> int:
    """Return the peak in bytes of the device memory of tensors; on CPU that of the process's resident memory."""
    if ms.get_context("device_target") == "CPU":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(ms.runtime.max_memory_allocated())
