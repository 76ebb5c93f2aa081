"""The smallest number of micro batches whose training fits into a given memory."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any, NamedTuple

from mindspore import nn

from ms_gradaccum._checks import argument_error, check_positive_float, typed
from ms_gradaccum.batch.nested_inputs import Batch
from ms_gradaccum.parallel.world import current_world, gather_values
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.probing.child import IN_CHILD, OWNER
from ms_gradaccum.tools.probing.memory import as_text, check_memory_limit
from ms_gradaccum.tools.probing.process import Child, Measured
from ms_gradaccum.tools.probing.search import candidates, first_that_fits, largest_part
from ms_gradaccum.tools.processes import error_of, refuse_inside

# The interval between two messages of the ranks. Unit: seconds.
_MOMENT = 1.0


# What the user's function returns: network, optimizer, batch, and perhaps settings of the training step.
_Built = tuple[nn.Cell, nn.Cell, Batch] | tuple[nn.Cell, nn.Cell, Batch, dict[str, object]]


class Probe(NamedTuple):
    """One measurement of `find_micro_size`. Its text is a line of a table."""

    micro_size: int
    # Of the largest micro batch.
    rows: int
    # The most memory in use, in bytes. None if the process was ended before.
    peak: int | None
    fits: bool
    seconds: float

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        peak = "ended" if self.peak is None else as_text(self.peak)
        verdict = "fits" if self.fits else "too much"
        return f"micro_size {self.micro_size:5}  {rows:>10}  {peak:>11}  {verdict:8}  {self.seconds:5.1f} s"


def find_micro_size(
    build: Callable[[], _Built] | str,
    memory_limit: int | str,
    *,
    timeout: float = 600.0,
    report: Callable[[Probe], object] | None = None,
) -> int:
    r"""Return the smallest `micro_size` with which the training of a batch fits into a memory limit.

    .. code-block:: python

        for micro_size in (1, 2, 3, ...):     # by bisection: a few of them
            in a new process:
                network, optimizer, batch = build()
                train two windows and take the largest memory
            if it is at most memory_limit: return micro_size

    Each measurement is a process of its own, which imports `build`, calls it and trains by a
    :class:`TrainOneStepCell`. It is ended as soon as it has more memory than the limit, so that neither the caller nor
    the machine runs out of memory. Nothing of the caller changes.

    On CPU the memory is all that the process has (the peak of its resident memory, from the first window on):
    MindSpore itself, about 400 MiB, the parameters, the optimizer's state, the batch, the float32 sums and the
    activations. On Ascend and GPU it is what MindSpore has allocated on the device.

    Args:
        build (Union[Callable, str]): A function without arguments, which a new process can import: one that is defined
            at the top level of a file; or its place, ``"train.py:build"`` or ``"package.module:build"``. A program
            that has the function itself calls `find_micro_size` under ``if __name__ == "__main__":``, since the new
            process imports it.

            The function returns `(network, optimizer, batch)` or `(network, optimizer, batch, settings)`. The first two
            are those of :class:`TrainOneStepCell`, where the `micro_size` of a :class:`GradAccumulation` does not
            matter. `batch` has the inputs of `network` in their order, by name, or the only one. `settings` is a dict
            of keyword arguments of :class:`TrainOneStepCell`, for example ``{"clip": ClipByGlobalNorm(1.0)}``.
            The function may set mode and device; else they are those of the caller. Cells are measured in training
            mode, unless the function calls ``set_train`` of some.
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

    Note:
        Less memory for smaller micro batches is taken for granted. Of several processes each measures alone;
        docs/tools.md says what a job of several takes more and less than that. Needs Linux.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ms_gradaccum import find_micro_size
        >>> folder = tempfile.TemporaryDirectory()
        >>> program = Path(folder.name) / "train.py"
        >>> length = program.write_text('''
        ... import numpy as np
        ... from mindspore import Tensor, nn
        ...
        ... def build():
        ...     network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
        ...     optimizer = nn.Adam(network.trainable_params())
        ...     return network, optimizer, (Tensor(np.ones((64, 4), "f")), Tensor(np.ones((64, 1), "f")))
        ... ''')
        >>> print(find_micro_size(f"{program}:build", "4GiB"))
        1
    """
    refuse_inside(OWNER, IN_CHILD)

    def prepare() -> _Search:
        limit = check_memory_limit(OWNER, memory_limit)
        check_positive_float(OWNER, "timeout", timeout, "It is the time of one measurement, in seconds.")
        if report is not None and not callable(report):
            raise TypeError(
                argument_error(OWNER, "report", "a function or None", typed(report), "For example report=print.")
            )
        return _Search(Builder.of(OWNER, build), limit, timeout, report)

    return prepare().run() if current_world(OWNER).size == 1 else _agreed(prepare)


class _Search:
    """The measurements of one call."""

    def __init__(self, builder: Builder, limit: int, timeout: float, report: Callable[[Probe], object] | None) -> None:
        # Set from elsewhere when nobody waits for the answer any more.
        self.stop = Event()
        self.builder = builder
        self.limit = limit
        self.timeout = timeout
        self.report = report
        self.last = Measured()

    def run(self) -> int:
        """Return the smallest micro_size that fits, or raise."""
        # The whole batch first: it may fit, and its process says how many rows there are.
        if self._fits(1):
            return 1
        rows = self.last.rows
        found = first_that_fits(candidates(rows), lambda count: count > 1 and self._fits(count)) if rows else None
        if found is None:
            raise MemoryError(self._too_little())
        return found

    def _fits(self, micro_size: int) -> bool:
        begin = time.monotonic()
        with Child(self.builder, micro_size, self.limit, self.timeout) as child:
            self.last = child.watch(self.stop)
        rows, _, peak, _ = self.last
        fits = peak is not None and peak <= self.limit
        if self.report is not None and rows is not None:
            seconds = time.monotonic() - begin
            self.report(Probe(micro_size, largest_part(rows, micro_size), peak, fits, seconds))
        return fits

    def _too_little(self) -> str:
        """Return the error message for a limit that is too small, from the last measurement, that of single rows."""
        rows, loaded, peak, passed = self.last
        if rows is None or loaded is None or peak is passed is None:
            what = "network, optimizer and batch" if rows is None else f"single rows (micro_size={rows})"
            return f"For '{OWNER}', {what} must fit into this machine, but got no memory for them. Use less of it."
        takes = f"at least the {as_text(peak)}" if peak is not None else f"more than the {as_text(passed or 0)}"
        rule = f"{takes} that single rows (micro_size={rows}) take"
        remedy = f"{as_text(loaded)} of it are in use before the first row: shrink network, optimizer or batch."
        return argument_error(OWNER, "memory_limit", rule, as_text(self.limit), remedy)


def _agreed(prepare: Callable[[], _Search]) -> int:
    """Return the largest of the ranks' answers, or raise on all of them what one has raised. Collective."""
    search, error = None, None
    try:
        search = prepare()
    except Exception as raised:
        error = raised
    with ThreadPoolExecutor(1) as pool:
        # The ranks talk meanwhile: a message that one of them waits for too long (30 s on CPU) would fail.
        answer: Future[int] = pool.submit(search.run) if search else Future()
        if error is not None:
            answer.set_exception(error)
        try:
            answers = gather_values(_said(answer))
            while None in answers and _failed(answers) is None:
                answers = gather_values(_said(answer))
        finally:
            if search is not None:
                search.stop.set()
    failed = _failed(answers)
    if failed is None:
        largest: int = max(answers)
        return largest
    if isinstance(answers[current_world(OWNER).rank], list):
        answer.result()  # Raises what this rank has raised.
    kind, text = answers[failed]
    raise error_of(kind, f"Rank {failed} has failed. {text}")


def _failed(answers: list[Any]) -> int | None:
    """Return the first rank that has told an error."""
    return next((rank for rank, theirs in enumerate(answers) if isinstance(theirs, list)), None)


def _said(answer: "Future[int]") -> Any:
    """Return what this rank tells the others after a moment: None, its answer, or the error in its place."""
    if not wait([answer], timeout=_MOMENT).done:
        return None
    error = answer.exception()
    return answer.result() if error is None else [type(error).__name__, str(error)]
