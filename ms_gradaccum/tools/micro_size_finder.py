"""The smallest number of micro batches that fits into a given memory. A process measures each candidate."""

import os
import re
import resource
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import psutil
from mindspore import nn

from ms_gradaccum._checks import check_float, check_int, counted, typed
from ms_gradaccum.backend.compiled import return_memory
from ms_gradaccum.backend.device import is_host, is_out_of_memory
from ms_gradaccum.batch.arguments import Batch, as_call
from ms_gradaccum.batch.split import split_batch
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.semi_auto import is_semi_auto
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import IN_JOB, EndedError, Job, RankError
from ms_gradaccum.training.grad_accumulation import GradAccumulation, as_grad_accumulation

_OWNER = "find_micro_size"
# The polling interval of a process's memory. A process fills 1 to 3 GB in a second. Unit: seconds.
_LOOK = 0.01
# Single rows may exceed the limit by at least this many bytes, so that the error can state their memory.
_LEAST_EXCESS = 2**30
# After the second update the optimizer has all its state. A loss scale that starts too high skips some windows.
_UPDATES = 2
_MOST_WINDOWS = 20
_TEXT = re.compile(r"(?i)\s*(\d+(?:\.\d*)?)\s*(?:([kmgt])(i?))?b?\s*")
# The results of the user's function: network, optimizer, batch, and perhaps settings of the training step.
_Built = tuple[nn.Cell, nn.Cell, Batch] | tuple[nn.Cell, nn.Cell, Batch, dict[str, object]]


class Probe(NamedTuple):
    """One measurement of `find_micro_size`. Its text is a line of a table."""

    micro_size: int
    rows: int
    peak: int | None
    fits: bool
    seconds: float

    def __str__(self) -> str:
        peak = "ended" if self.peak is None else size_text(self.peak)
        rows = counted(self.rows, "row")
        verdict = "fits" if self.fits else "too much"
        return (
            f"micro_size {self.micro_size:5}  {rows:>10}  {peak:>11}  {verdict:8}  "
            f"{self.seconds:5.1f} s"
        )


class _OverCap(Exception):
    """Raised if a measured process exceeds its memory cap."""


class Measured(NamedTuple):
    """The memory of a training, in bytes. An item is None if the process ended before it was measured."""

    rows: int | None = None
    # Memory before the first window, and the peak from then on.
    loaded: int | None = None
    peak: int | None = None
    # The process is killed above this limit. None if device memory is measured.
    cap: int | None = None
    is_killed: bool = False


def find_micro_size(
    build: Callable[[], _Built] | str,
    memory_limit: int | str,
    *,
    timeout: float = 600.0,
    report: Callable[[Probe], object] | None = None,
) -> int:
    r"""Return the smallest `micro_size` with which the training of a batch fits into a memory limit.

    Each measurement is a new process that imports and calls `build` and makes two updates with a
    :class:`TrainOneStepCell`. The process is ended as soon as it exceeds the limit. docs/tools.md has the details.

    On CPU the memory is the peak of the process's resident memory from the first window on, including 400 MiB of
    MindSpore itself. On Ascend and GPU it is the memory that MindSpore has allocated on the device.

    Args:
        build (Union[Callable, str]): A function without arguments at the top level of a file, or its place:
            ``"train.py:build"`` or ``"package.module:build"``. It returns `(network, optimizer, batch)` or
            `(network, optimizer, batch, settings)`: the arguments of :class:`TrainOneStepCell`, the inputs of
            `network` (in their order, by name, or the only one), and a dict of keyword arguments of
            :class:`TrainOneStepCell`. A program that defines the function itself must call `find_micro_size` under ``if
            __name__ == "__main__":``, since the new process imports the program.
        memory_limit (Union[int, str]): Bytes, as a number or a text: ``"4GiB"`` (of 1024) or ``"500MB"`` (of 1000).

    Keyword Args:
        timeout (float): Seconds that one measurement may take. Default: ``600.0``.
        report (Union[Callable, None]): Called after each measurement with its `micro_size`, `rows` (of the largest
            micro batch), `peak` (in bytes, ``None`` if the process was ended), `fits` and `seconds`; ``print`` makes a
            table of them. Default: ``None``.

    Returns:
        int, the smallest `micro_size` that fits.

    Raises:
        TypeError: If an argument, or something that `build` returns, has the wrong type.
        ValueError: If an argument, or something that `build` returns, has a wrong value, or if a new process cannot
            import `build`: a lambda, a function inside another one, or one of a notebook or an interactive session.
        MemoryError: If not even single rows fit.
        TimeoutError: If a measurement takes longer than `timeout`.
        RuntimeError: If the training fails for another reason than memory, in a job of several processes, or if a new
            process that imports the program gets to this call.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import find_micro_size
        >>> micro_size = find_micro_size("train.py:build", "4GiB", report=print)  # doctest: +SKIP
    """
    if IN_JOB in os.environ:
        raise RuntimeError(
            f"For '{_OWNER}', the program must not call it when a new process imports the program, "
            f"but it does. Put the call under: if __name__ == '__main__':"
        )
    size = current_world(_OWNER).size
    if size > 1:
        raise RuntimeError(
            f"For '{_OWNER}', the search must run in one process, but got a job of {size}. Search "
            f"before the job, for example with python -m ms_gradaccum micro-size, and give all "
            f"ranks the answer."
        )
    limit = _check_memory_limit(memory_limit)
    check_float(_OWNER, "timeout", timeout, "It is the time of one measurement, in seconds.")
    if report is not None and not callable(report):
        raise TypeError(
            f"For '{_OWNER}', the argument 'report' must be a function or None, but got "
            f"{typed(report)}. For example report=print."
        )
    builder = Builder.of(build)
    last = Measured()

    def fits(micro_size: int) -> bool:
        nonlocal last
        begin = time.monotonic()
        last = measure(builder, micro_size, limit, timeout)
        is_small = last.peak is not None and last.peak <= limit
        if report is not None and last.rows is not None:
            rows = -(-last.rows // micro_size)
            report(Probe(micro_size, rows, last.peak, is_small, time.monotonic() - begin))
        return is_small

    # The whole batch first: it may fit, and its process reports the number of rows.
    if fits(1):
        return 1
    found = _search(last.rows or 1, fits)
    if found is None:
        raise MemoryError(_too_little(last, limit))
    return found


def _search(rows: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest micro_size above 1 that fits, or None."""
    # The rows of the largest micro batch determine the memory: for each number of rows, the smallest micro_size.
    counts = sorted({-(-rows // largest) for largest in range(1, rows + 1)})
    # Double until one fits, then bisect: the answer is mostly among the first.
    begin = 1
    place = 1
    while begin < len(counts) and not fits(counts[place]):
        begin = place + 1
        place = min(2 * place + 1, len(counts) - 1)
    if begin >= len(counts):
        return None
    return counts[bisect_left(counts, True, begin, place, key=fits)]


def _too_little(single: Measured, limit: int) -> str:
    """Return the error message for a limit that is too small, from the measurement of single rows."""
    takes = f"more than the {size_text(single.cap or 0)}"
    if single.peak:
        takes = f"at least the {size_text(single.peak)}"
    elif not single.is_killed:
        return (
            f"For '{_OWNER}', network, optimizer and single rows must fit into this machine, but "
            f"got no memory for them. Make them smaller."
        )
    return (
        f"For '{_OWNER}', the argument 'memory_limit' must be {takes} that single rows "
        f"(micro_size={single.rows}) take, but got {size_text(limit)}. "
        f"{size_text(single.loaded or 0)} of it are in use before the first row: shrink network, "
        f"optimizer or batch."
    )


def measure(builder: Builder, micro_size: int, limit: int, timeout: float) -> Measured:
    """Train in ``micro_size`` micro batches in a new process. Raise if it fails for another reason than memory."""
    must_run = f"For '{_OWNER}', the training must run, but with micro_size={micro_size}"
    found = Measured()
    with Job(1, work, builder, micro_size, limit, os.getcwd()) as job:

        def watch() -> None:
            with suppress(psutil.NoSuchProcess):
                if (
                    found.cap is not None
                    and psutil.Process(job.process.pid).memory_info().rss > found.cap
                ):
                    raise _OverCap

        try:
            (found,) = job.wait(timeout, moment=_LOOK)
            (found,) = job.wait(timeout, watch, _LOOK)
        except _OverCap:
            return found._replace(is_killed=True)
        except TimeoutError:
            raise TimeoutError(
                f"For '{_OWNER}', the argument 'timeout' must be more than what two windows of "
                f"micro_size={micro_size} take, but got {timeout:g} s. Give it more time."
            ) from None
        except RankError as error:
            if not is_out_of_memory(error.kind, error.text):
                raise error.here(must_run) from error
        except EndedError:
            status = job.process.returncode
            said = job.last_words() or "none"
            # SIGKILL comes only from the system, when memory runs out.
            if status != -signal.SIGKILL and not is_out_of_memory("RuntimeError", said):
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                raise RuntimeError(
                    f"{must_run} its process ended with {how}. Its last words: {said}"
                ) from None
    return found


def _check_memory_limit(limit: int | str) -> int:
    """Return a number of bytes, given as an int or a text such as '4GiB' (of 1024) or '500MB' (of 1000)."""
    remedy = "For example 4 * 2**30, '4GiB' or '500MB'."
    if isinstance(limit, str):
        match = _TEXT.fullmatch(limit)
        if match is None:
            raise ValueError(
                f"For '{_OWNER}', the argument 'memory_limit' must be a number of bytes, but got "
                f"{limit!r}. {remedy}"
            )
        number, prefix, is_binary = match.groups()
        base = 1024 if is_binary else 1000
        limit = int(float(number) * base ** " kmgt".index((prefix or " ").lower()))
    return check_int(_OWNER, "memory_limit", limit, remedy, most=2**63 - 1)


def work(builder: Builder, micro_size: int, limit: int, home: str) -> Iterator[Measured]:
    """Build a training in the folder ``home`` and train it in ``micro_size`` micro batches.

    Yield the memory before the first window, then the peak, too.
    """
    os.chdir(home)
    # Make the system kill this process first when memory runs out, without a core dump.
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    training = Training(builder.call(), micro_size)
    on_host = is_host()
    # Return memory gaps that building has left, which the training would fill first.
    return_memory()
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    if on_host:
        excess = max(limit, _LEAST_EXCESS) if training.rows <= micro_size else 0
        found = Measured(training.rows, psutil.Process().memory_info().rss, cap=limit + excess)
    else:
        found = Measured(training.rows, ms.runtime.memory_allocated())
    yield found
    training.run()
    yield found._replace(peak=_resident_peak() if on_host else ms.runtime.max_memory_allocated())


def _resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    _, _, found = Path("/proc/self/status").read_text().partition("VmHWM:")
    return int(found.split()[0]) * 1024


def size_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    if count < 2**20:
        return f"{count} bytes"
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"


class WithFixedNumber(GradAccumulation):
    """Micro batches whose number stays as it is when memory runs out, because it is measured."""

    def split_more(self, rows: int) -> bool:
        return False


class Training:
    """The training that a function has built: its step with ``micro_size`` micro batches, its batch, and the rows."""

    def __init__(self, made: Any, micro_size: int) -> None:
        network, optimizer, batch, settings = _parts_of(made)
        if is_semi_auto(network):
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must be a loss cell of one process, but "
                f"got one that the compiler partitions, which one process cannot measure. Give the "
                f"cell inside."
            )
        whole = as_grad_accumulation(_OWNER, network)
        if whole.token_limit is not None:
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must have no micro_tokens, but got "
                f"{whole.token_limit.micro_tokens}. With it, no micro_size is needed."
            )
        self.inputs = whole.positional(*as_call(_OWNER, batch))
        whole.bind(self.inputs, {})
        network = whole.network
        axis = whole.batch_axis
        parts = WithFixedNumber(
            network, micro_size, weighted=whole.weighted, batch_axis=axis, losses=whole.losses
        )
        self.step = TrainOneStepCell(parts, optimizer, **settings)
        self.rows = split_batch(self.inputs, 1, axis).micro_batches[0].rows
        # Cells start in evaluation mode, in which Dropout and BatchNorm take less memory than in training.
        if not any(cell.training for _, cell in network.cells_and_names()):
            self.step.set_train()

    def run(self) -> None:
        """Train windows of one batch until the optimizer has run twice."""
        updates = 0
        for _ in range(_MOST_WINDOWS):
            output = self.step(*self.inputs)
            # With accumulation_steps, the window is still open.
            output = self.step.flush() or output
            updates += output.is_updated
            if updates == _UPDATES:
                return


def _parts_of(made: Any) -> tuple[nn.Cell, nn.Cell, Batch, dict[str, Any]]:
    """Return what the user's function has built. Raise if it is something else."""
    if isinstance(made, tuple) and len(made) == 3:
        return (*made, {})
    if isinstance(made, tuple) and len(made) == 4 and isinstance(made[3], dict):
        return made
    got = type(made).__name__
    if isinstance(made, tuple):
        got += f" of {len(made)}"
    raise TypeError(
        f"For '{_OWNER}', the argument 'build' must be a function that returns (network, "
        f"optimizer, batch) or (network, optimizer, batch, dict), but got {got}. The dict has "
        f"settings of TrainOneStepCell."
    )
