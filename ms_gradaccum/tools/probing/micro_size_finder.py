"""The smallest number of micro batches whose training fits into a given memory."""

import re
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any, NamedTuple

from mindspore import nn

from ms_gradaccum._checks import argument_error, check_positive_float, check_positive_int, counted, typed
from ms_gradaccum.batch.nested_inputs import Batch
from ms_gradaccum.parallel.world import current_world, gather_values
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.probing.child import IN_CHILD, OWNER
from ms_gradaccum.tools.probing.measurement import Measured, measure
from ms_gradaccum.tools.processes import error_of, refuse_inside
from ms_gradaccum.tools.text import size_text

# The interval between two messages of the ranks. Unit: seconds.
_MOMENT = 1.0
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
        int, the same on all ranks: the largest of the ranks' own answers.

    Raises:
        TypeError: If an argument, or something that `build` returns, has the wrong type.
        ValueError: If an argument, or something that `build` returns, has a wrong value, or if a new process cannot
            import `build`: a lambda, a function inside another one, or one of a notebook or an interactive session.
        MemoryError: If not even single rows fit.
        TimeoutError: If a measurement takes longer than `timeout`.
        RuntimeError: If the training fails for another reason than memory, or if a new process that imports the
            program gets to this call.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_gradaccum import find_micro_size
        >>> micro_size = find_micro_size("train.py:build", "4GiB", report=print)  # doctest: +SKIP
    """
    refuse_inside(OWNER, IN_CHILD)

    def search(stop: Event) -> int:
        limit = _check_memory_limit(memory_limit)
        check_positive_float(OWNER, "timeout", timeout, "It is the time of one measurement, in seconds.")
        if report is not None and not callable(report):
            rule, remedy = "a function or None", "For example report=print."
            raise TypeError(argument_error(OWNER, "report", rule, typed(report), remedy))
        builder = Builder.of(OWNER, build)
        return _first_that_fits(lambda count: measure(builder, count, limit, timeout, stop), limit, report)

    return search(Event()) if current_world(OWNER).size == 1 else _agreed(search)


def _first_that_fits(
    measured: Callable[[int], Measured], limit: int, report: Callable[[Probe], object] | None = None
) -> int:
    """Return the smallest micro_size that fits, or raise."""
    last = Measured()

    def fits(micro_size: int) -> bool:
        nonlocal last
        begin = time.monotonic()
        last = measured(micro_size)
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
    rows, loaded, peak, passed = single
    if rows is None or loaded is None or peak is passed is None:
        what = "network, optimizer and batch" if rows is None else f"single rows (micro_size={rows})"
        return f"For '{OWNER}', {what} must fit into this machine, but got no memory for them. Make them smaller."
    takes = f"at least the {size_text(peak)}" if peak is not None else f"more than the {size_text(passed or 0)}"
    rule = f"{takes} that single rows (micro_size={rows}) take"
    remedy = f"{size_text(loaded)} of it are in use before the first row: shrink network, optimizer or batch."
    return argument_error(OWNER, "memory_limit", rule, size_text(limit), remedy)


def _agreed(search: Callable[[Event], int]) -> int:
    """Return the largest of the ranks' answers, or raise on all of them the error of one. Collective."""
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        # The ranks talk meanwhile: a message that one of them waits for too long (30 s on CPU) would fail.
        answer = pool.submit(search, stop)
        answers: list[Any] = [None]
        try:
            while None in answers and not any(isinstance(each, list) for each in answers):
                answers = gather_values(_state(answer))
        finally:
            stop.set()
    failed = next((rank for rank, each in enumerate(answers) if isinstance(each, list)), None)
    if failed is None:
        largest: int = max(answers)
        return largest
    if isinstance(answers[current_world(OWNER).rank], list):
        answer.result()  # Raises the error of this rank.
    kind, text = answers[failed]
    raise error_of(kind, f"Rank {failed} has failed. {text}")


def _state(answer: "Future[int]") -> Any:
    """Return the message of this rank to the others after a moment: None, its answer, or a list of its error."""
    if not wait([answer], timeout=_MOMENT).done:
        return None
    error = answer.exception()
    return answer.result() if error is None else [type(error).__name__, str(error)]


def _check_memory_limit(limit: Any) -> int:
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
