"""The smallest number of micro batches whose training fits into a given memory."""

import os
import re
import signal
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from mindspore import nn

from ms_gradaccum._checks import argument_error, check_positive_float, check_positive_int, counted, typed
from ms_gradaccum.batch.nested_inputs import Batch
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.probing.child import OWNER, Measured, begun, is_out_of_memory, memory_of, work
from ms_gradaccum.tools.processes import EndedError, Job, RankError, refuse_inside
from ms_gradaccum.tools.text import size_text

# The environment variable that marks the child processes, which must not measure in turn.
IN_CHILD = "MS_GRADACCUM_PROBE"
# The polling interval of a child's memory, of which it fills 1 to 3 GB in a second. Unit: seconds.
_LOOK = 0.01
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
# The results of the user's function: network, optimizer, batch, and perhaps settings of the training step.
_Built = tuple[nn.Cell, nn.Cell, Batch] | tuple[nn.Cell, nn.Cell, Batch, dict[str, object]]


class Probe(NamedTuple):
    """One measurement of `find_micro_size`. Its text is a line of a table."""

    micro_size: int
    # The rows of the largest micro batch.
    rows: int
    # The most memory in use, in bytes. None if the process was ended before.
    peak: int | None
    fits: bool
    seconds: float

    def __str__(self) -> str:
        peak = "ended" if self.peak is None else size_text(self.peak)
        verdict = "fits" if self.fits else "too much"
        rows = counted(self.rows, "row")
        return f"micro_size {self.micro_size:5}  {rows:>10}  {peak:>11}  {verdict:8}  {self.seconds:5.1f} s"


def find_micro_size(
    build: Callable[[], _Built] | str,
    memory_limit: int | str,
    *,
    timeout: float = 600.0,
    report: Callable[[Probe], object] | None = None,
) -> int:
    r"""Return the smallest `micro_size` with which the training of a batch fits into a memory limit.

    Each measurement is a new process that imports `build`, calls it and makes two updates with a
    :class:`TrainOneStepCell`. It is ended as soon as it exceeds the limit. `micro_size` doubles until one fits; then
    the interval is bisected. Nothing changes in the calling process. docs/tools.md has the details.

    On CPU the memory is the peak of the process's resident memory from the first window on, including 400 MiB of
    MindSpore itself. On Ascend and GPU it is what MindSpore has allocated on the device.

    Args:
        build (Union[Callable, str]): A function without arguments at the top level of a file, or its place:
            ``"train.py:build"`` or ``"package.module:build"``. It returns `(network, optimizer, batch)` or
            `(network, optimizer, batch, settings)`: the arguments of :class:`TrainOneStepCell`, the inputs of
            `network` (in their order, by name, or the only one), and a dict of keyword arguments of
            :class:`TrainOneStepCell`. A program that has the function itself calls `find_micro_size` under
            ``if __name__ == "__main__":``, since the new process imports it.
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
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import find_micro_size
        >>> micro_size = find_micro_size("train.py:build", "4GiB", report=print)  # doctest: +SKIP
    """
    refuse_inside(OWNER, IN_CHILD)
    if (size := current_world(OWNER).size) > 1:
        raise RuntimeError(
            f"For '{OWNER}', the search must run in one process, but got a job of {size}. Search before the job, for "
            f"example with python -m ms_gradaccum micro-size, and give all ranks the answer."
        )
    limit = _check_memory_limit(memory_limit)
    check_positive_float(OWNER, "timeout", timeout, "It is the time of one measurement, in seconds.")
    if report is not None and not callable(report):
        raise TypeError(
            argument_error(OWNER, "report", "a function or None", typed(report), "For example report=print.")
        )
    return _search(Builder.of(OWNER, build), limit, timeout, report)


def _search(builder: Builder, limit: int, timeout: float, report: Callable[[Probe], object] | None) -> int:
    """Return the smallest micro_size that fits, or raise."""
    last = Measured()

    def fits(micro_size: int) -> bool:
        nonlocal last
        begin = time.monotonic()
        last = measure(builder, micro_size, limit, timeout)
        is_small = last.peak is not None and last.peak <= limit
        if report is not None and last.rows is not None:
            seconds = time.monotonic() - begin
            report(Probe(micro_size, -(-last.rows // micro_size), last.peak, is_small, seconds))
        return is_small

    # The whole batch first: it may fit, and its process says how many rows there are.
    if fits(1):
        return 1
    rows = last.rows or 1
    # For each number of rows in the largest micro batch, which determine the memory, the smallest micro_size.
    counts = sorted({-(-rows // largest) for largest in range(1, rows + 1)})
    # Go twice as far until one fits, then bisect: the answer is mostly among the first.
    begin, place = 1, 1
    while begin < len(counts) and not fits(counts[place]):
        begin, place = place + 1, min(2 * place + 1, len(counts) - 1)
    if begin >= len(counts):
        raise MemoryError(_too_little(last, limit))
    return counts[bisect_left(counts, True, begin, place, key=fits)]


def _too_little(single: Measured, limit: int) -> str:
    """Return the error message for a limit that is too small, from the measurement of single rows."""
    rows, loaded, peak, cap, is_killed = single
    if rows is None or not (peak or is_killed):
        what = "network, optimizer and batch" if rows is None else f"single rows (micro_size={rows})"
        return f"For '{OWNER}', {what} must fit into this machine, but got no memory for them. Make them smaller."
    takes = f"at least the {size_text(peak)}" if peak else f"more than the {size_text(cap or 0)}"
    rule = f"{takes} that single rows (micro_size={rows}) take"
    remedy = f"{size_text(loaded or 0)} of it are in use before the first row: shrink network, optimizer or batch."
    return argument_error(OWNER, "memory_limit", rule, size_text(limit), remedy)


class _Exceeded(Exception):
    """A child process takes too much memory."""


def measure(builder: Builder, micro_size: int, limit: int, timeout: float) -> Measured:
    """Train in ``micro_size`` micro batches in a new process. Raise if it fails for another reason than memory."""
    must_run = f"For '{OWNER}', the training must run, but with micro_size={micro_size}"
    task = {"builder": builder, "micro_size": micro_size, "limit": limit, "home": os.getcwd()}
    with Job(1, IN_CHILD, f"{work.__module__}:{work.__name__}", task) as job:

        def watch(phase: str) -> None:
            cap = begun(job.folder).cap
            if cap is not None and memory_of(job.process.pid, "VmHWM") > cap:
                raise _Exceeded

        try:
            (report,) = job.wait(timeout, watch, _LOOK)
            return begun(job.folder)._replace(peak=report["peak"])
        except _Exceeded:
            return begun(job.folder)._replace(is_killed=True)
        except TimeoutError:
            rule = f"more than what two windows of micro_size={micro_size} take"
            raise TimeoutError(argument_error(OWNER, "timeout", rule, f"{timeout:g} s", "Give it more time.")) from None
        except RankError as error:
            if not is_out_of_memory(error.kind, error.text):
                raise error.here(must_run) from error
        except EndedError:
            status, said = job.process.returncode, job.last_words()
            # Only the system sends SIGKILL, when memory runs out.
            if status != -signal.SIGKILL and not is_out_of_memory("RuntimeError", said):
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                raise RuntimeError(
                    f"{must_run} its process ended with {how}. Its last words: {said or 'none'}"
                ) from None
        return begun(job.folder)


def _check_memory_limit(limit: int | str) -> int:
    """Return a number of bytes, given as an int or a text such as '4GiB' (of 1024) or '500MB' (of 1000)."""
    rule, remedy = "a number of bytes, as an int or a text", "For example 4 * 2**30, '4GiB' or '500MB'."
    if isinstance(limit, str):
        match = _TEXT.fullmatch(limit)
        if match is None:
            raise ValueError(argument_error(OWNER, "memory_limit", rule, repr(limit), remedy))
        limit = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index((match[2] or " ").lower()))
    elif isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(argument_error(OWNER, "memory_limit", rule, typed(limit), remedy))
    return check_positive_int(OWNER, "memory_limit", limit, remedy, 2**63 - 1)
