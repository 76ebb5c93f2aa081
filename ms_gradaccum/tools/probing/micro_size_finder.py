"""The smallest number of micro batches whose training fits into a given memory."""

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from mindspore import nn

from ms_gradaccum._checks import check_positive_float, sentence
from ms_gradaccum.parallel.world import current_world, gather_values
from ms_gradaccum.tools.probing import transport
from ms_gradaccum.tools.probing.child import IN_CHILD
from ms_gradaccum.tools.probing.memory import as_text, check_memory_limit
from ms_gradaccum.tools.probing.process import Child, Measured, error_of
from ms_gradaccum.tools.probing.search import candidates, first_that_fits, largest_part
from ms_gradaccum.tools.probing.training import OWNER, Context, Script, Training, check_training

_OTHER_WAY = (
    "Write a function that returns (network, optimizer, batch) and run: "
    "python -m ms_gradaccum micro-size script.py:function --memory-limit LIMIT"
)
_FOLDER = "ms_gradaccum_"
# Seconds between two messages of the ranks.
_MOMENT = 1.0


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
    network: nn.Cell,
    optimizer: nn.Cell,
    batch: Any,
    memory_limit: int | str,
    *,
    clip: Any = None,
    mixed_precision: Any = None,
    bad_micro_batch: str = "skip_window",
    compile: bool | None = None,
    timeout: float = 600.0,
    report: Callable[[Probe], Any] | None = None,
) -> int:
    r"""Return the smallest `micro_size` with which the training of a batch fits into a memory limit.

    .. code-block:: python

        for micro_size in (1, 2, 3, ...):     # by bisection: a few of them
            train two windows in a child process, and take its largest memory
            if it is at most memory_limit: return micro_size

    Each measurement is a process of its own, which trains copies by a :class:`TrainOneStepCell`. It is ended as soon as
    it has more memory than the limit, so that neither the caller nor the machine runs out of memory. The caller's
    weights, optimizer state, random state and settings stay as they are.

    On CPU the memory is all that the process has (the peak of its resident memory, from the first window on):
    MindSpore itself, about 400 MiB, the weights, the optimizer's state, the batch, the float32 sums and the
    activations. On Ascend and GPU it is what MindSpore has allocated on the device.

    Args:
        network (Cell): As for :class:`TrainOneStepCell`: a loss cell, or a :class:`GradAccumulation`, whose
            settings hold, but for its `micro_size`.
        optimizer (Cell): As for :class:`TrainOneStepCell`. No training cell may have it already.
        batch (Union[Tensor, tuple, list, dict]): One batch of the training: the inputs of `network` in their order, by
            name, or the only one. Its values do not matter, if the network computes the same for all of them.
        memory_limit (Union[int, str]): Bytes, as a number or a text: ``"4GiB"`` (of 1024) or ``"500MB"`` (of 1000).

    Keyword Args:
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, None]): As for :class:`TrainOneStepCell`.
            Default: ``None``.
        mixed_precision (Union[str, MixedPrecision, LossScaler, LossScaleManager, None]): As for
            :class:`TrainOneStepCell`. Default: ``None``.
        bad_micro_batch (str): As for :class:`TrainOneStepCell`. Default: ``"skip_window"``.
        compile (Union[bool, None]): As for :class:`TrainOneStepCell`. The mode is that of the caller.
            Default: ``None``.
        timeout (float): Seconds that one measurement may take. Default: ``600.0``.
        report (Union[Callable, None]): Called after each measurement with its `micro_size`, `rows` (of the largest
            micro batch), `peak` (in bytes, ``None`` if the process was ended), `fits` and `seconds`; ``print`` makes a
            table of them. Default: ``None``.

    Returns:
        int, the same on all ranks: the largest of the ranks' own answers.

    Raises:
        TypeError: If an argument has the wrong type, or cannot be sent to another process.
        ValueError: If an argument has a wrong value.
        MemoryError: If not even single rows fit.
        TimeoutError: If a measurement takes longer than `timeout`.
        RuntimeError: If the training fails for another reason than memory.

    Note:
        Less memory for smaller micro batches is taken for granted. Of several processes each measures alone; what
        comes on top, and what goes away with HSDP, says docs/tools.md. Needs Linux.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_gradaccum import find_micro_size
        >>> network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
        >>> optimizer = nn.Adam(network.trainable_params())
        >>> batch = (Tensor(np.ones((64, 4), np.float32)), Tensor(np.ones((64, 1), np.float32)))
        >>> print(find_micro_size(network, optimizer, batch, "4GiB"))
        1
    """
    settings = {
        "clip": clip,
        "mixed_precision": mixed_precision,
        "bad_micro_batch": bad_micro_batch,
        "compile": compile,
    }

    def search(folder: str) -> _Search:
        training = check_training(network, optimizer, batch, settings)
        return _search(folder, training, Context.current(), memory_limit, timeout, report)

    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        if current_world(OWNER).size == 1:
            return search(folder).run()
        return _agreed(lambda: search(folder))


def find_for_script(
    name: str, memory_limit: int | str, *, timeout: float = 600.0, report: Callable[[Probe], Any] | None = None
) -> int:
    """Return the same for what a function of a script returns, which each child process calls itself."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        return _search(folder, Script(name), None, memory_limit, timeout, report).run()


def _search(
    folder: str, job: Training | Script, context: Context | None, memory_limit: Any, timeout: float, report: Any
) -> "_Search":
    limit = check_memory_limit(OWNER, memory_limit)
    check_positive_float(OWNER, "timeout", timeout, "It is the time of one measurement, in seconds.")
    if report is not None and not callable(report):
        got = f"{report!r} of type {type(report).__name__}"
        raise TypeError(sentence(OWNER, "report", "a function or None", got, "For example report=print."))
    if IN_CHILD in os.environ:
        raise RuntimeError(
            f"For '{OWNER}', a process that it has started must not measure in turn, but got here by importing the "
            f"script. Call it under: if __name__ == '__main__'"
        )
    path = Path(folder) / "job"
    _write(job, context, path)
    return _Search(path, limit, timeout, report)


def _write(job: Training | Script, context: Context | None, path: Path) -> None:
    try:
        with path.open("wb") as file:
            transport.save(context, file)
            transport.save(job, file)
    except OSError:
        raise
    except Exception as error:
        raise TypeError(
            f"For '{OWNER}', network, optimizer and batch must be such that another process can get copies of them, "
            f"but got {type(error).__name__}: {error}. {_OTHER_WAY}"
        ) from error


class _Search:
    """The measurements of one call."""

    def __init__(self, job: Path, limit: int, timeout: float, report: Callable[[Probe], Any] | None) -> None:
        # Set from elsewhere when nobody waits for the answer any more.
        self.stop = Event()
        self.job = job
        self.limit = limit
        self.timeout = timeout
        self.report = report
        self.last = Measured()

    def run(self) -> int:
        """Return the answer, or raise."""
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
        with Child(self.job, micro_size, self.limit, self.timeout) as child:
            self.last = child.watch(self.stop)
        rows, _, peak, _ = self.last
        fits = peak is not None and peak <= self.limit
        if self.report is not None and rows is not None:
            seconds = time.monotonic() - begin
            self.report(Probe(micro_size, largest_part(rows, micro_size), peak, fits, seconds))
        return fits

    def _too_little(self) -> str:
        """Return the sentence for a limit that is too small, from the last measurement: that of single rows."""
        rows, loaded, peak, passed = self.last
        if rows is None or loaded is None or peak is passed is None:
            what = "network, optimizer and batch" if rows is None else f"single rows (micro_size={rows})"
            return f"For '{OWNER}', {what} must fit into this machine, but got no memory for them. Use less of it."
        takes = f"at least the {as_text(peak)}" if peak is not None else f"more than the {as_text(passed or 0)}"
        rule = f"{takes} that single rows (micro_size={rows}) take"
        remedy = f"{as_text(loaded)} of it are in use before the first row: shrink network, optimizer or batch."
        return sentence(OWNER, "memory_limit", rule, as_text(self.limit), remedy)


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
