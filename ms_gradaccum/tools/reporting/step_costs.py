"""Items of a report that cost time: the norm of the parameters, the time of the messages, the peak of the memory."""

import resource
import time
from collections.abc import Callable, Sequence

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.compiled import NOTHING, Compiled
from ms_gradaccum.backend.tensors import Done, chunks_of
from ms_gradaccum.gradients.clipping import global_norm
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.micro_step import EmptyStep

_OWNER = "StepReporter"


class WeightNorm(nn.Cell):
    """The L2 norm of all trained parameters, taken as one vector. They are whole on each rank."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameter for reducer in reducers for parameter in reducer.replicas())
        self.chunks = chunks_of([parameter.size for parameter in self.parameters])

    def construct(self, nothing: Tensor) -> Tensor:
        return global_norm(tuple(self.parameters), self.chunks) + nothing


def weight_norm_of(reducers: Sequence[GradientReducer]) -> Callable[[], float]:
    """Return a function that computes the norm."""
    cell = WeightNorm(reducers)
    run = Compiled(lambda: cell, _OWNER, "the norm of the weights")
    return lambda: float(run(NOTHING).asnumpy())


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


class MicroBatchMessages(nn.Cell):
    """The messages of a micro batch without the micro batch."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        super().__init__(auto_prefix=False)
        self.empty_step = EmptyStep(reducers)

    def construct(self, nothing: Tensor) -> Tensor:
        return ops.depend(nothing + 0.0, self.empty_step(nothing))


class CommunicationTime:
    """The time of a window's messages, measured by sending them again with empty buffers. Collective."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        # A single process sends nothing.
        self.several, self.most = reducers[0].several, reducers[0].most
        self.runs = [_compile(UpdateMessages(reducers))] if self.several else []
        if reducers[0].every_batch:
            self.runs.append(_compile(MicroBatchMessages(reducers)))
        self.is_warm = False

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds for a window with ``micro_batches`` micro batches on this rank."""
        if not self.several:
            return 0.0
        if not self.is_warm:  # The first run compiles, and opens connections.
            self._measure(1)
            self.is_warm = True
        return self._measure(micro_batches)

    def _measure(self, micro_batches: int) -> float:
        # This synchronizes all ranks, so that waiting for a late rank is not measured.
        times = 1, self.most(micro_batches)
        return sum(count * _seconds_of(run) for count, run in zip(times, self.runs))


def _compile(cell: nn.Cell) -> Compiled:
    return Compiled(lambda: cell, _OWNER, "the messages")


def _seconds_of(run: Compiled) -> float:
    start = time.perf_counter()
    run(NOTHING).asnumpy()
    return time.perf_counter() - start


def peak_memory() -> int:
    """Return the peak in bytes of the device memory of tensors; on CPU that of the process's resident memory."""
    if ms.get_context("device_target") == "CPU":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(ms.runtime.max_memory_allocated())
