"""Who runs a graph on CPU: the thread that calls it, or MindSpore's threads."""

from collections.abc import Generator
from statistics import median

import mindspore as ms
from mindspore import Tensor

from ms_gradaccum.kernels import cores

# MindSpore's limits: the calling thread runs graphs of at most so many kernels on machines of less cores than these.
_MOST_KERNELS = 100
_CORES = 12
# In its first runs a kernel of MindSpore tries how many threads it is fastest with.
WARM_UP = 30
# Pairs of batches that are compared.
PAIRS = 15
# The condition takes 0.3 to 1 ms: in seconds, a micro step that cannot gain from it.
SHORT = 0.003


def may_help(parameters: int) -> bool:
    """Return whether MindSpore's threads may be faster for the micro steps of so many parameters."""
    # Each parameter has a kernel for its gradient and one for its sum.
    is_small = 2 * parameters <= _MOST_KERNELS
    return is_small and ms.get_context("device_target") == "CPU" and 1 < cores() < _CORES


def with_condition(number: Tensor) -> Tensor:
    """Return a number that is not negative, after a condition, whose graph MindSpore's threads run."""
    if number < 0.0:
        number = number + 0.0
    return number


class ThreadPoolTrial:
    """Finds out who is faster by trying both with the batches of a training, as MindSpore does on larger machines.

    The calling thread has no part in a kernel of several threads, but looks all the time whether it has ended: one
    thread more than there are cores. The results are the same, bit for bit.

    Args:
        possible: Whether MindSpore's threads may be faster.

    Attributes:
        pooled: Whether they shall run the next batch.
    """

    def __init__(self, possible: bool) -> None:
        self._trial: Generator[bool, tuple[float, int], bool] | None = _try_both() if possible else None
        self.pooled = next(self._trial) if self._trial else False

    @property
    def is_open(self) -> bool:
        """Whether it is not decided yet."""
        return self._trial is not None

    def took(self, seconds: float, micro_batches: int) -> None:
        """Take note of how long the micro batches of a batch took."""
        if self._trial is None or not micro_batches:
            return
        try:
            self.pooled = self._trial.send((seconds, micro_batches))
        except StopIteration as result:
            self.end(result.value)

    def end(self, pooled: bool) -> None:
        """Leave it at that."""
        self._trial = None
        self.pooled = pooled


def _try_both() -> Generator[bool, tuple[float, int], bool]:
    """Yield who shall run the next batch, be sent its time and number of micro batches, and return who is faster."""
    if (yield from _warm_up(False)) < SHORT:
        return False
    yield from _warm_up(True)
    ratios = []
    for _ in range(PAIRS):
        times = []
        for pooled in (False, True):
            seconds, micro_batches = yield pooled
            times.append(seconds / micro_batches)
        # Of neighbours, since the machine may have other things to do.
        ratios.append(times[1] / times[0])
    return median(ratios) < 1.0


def _warm_up(pooled: bool) -> Generator[bool, tuple[float, int], float]:
    """Return the least time of a micro batch, in seconds; the first batch has a graph to compile."""
    least, batches, runs = float("inf"), 0, 0
    while runs < WARM_UP or batches < 2:
        seconds, micro_batches = yield pooled
        least = min(least, seconds / micro_batches)
        batches += 1
        runs += micro_batches
    return least
