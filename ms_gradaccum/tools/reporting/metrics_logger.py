"""Reports to a file, and to other programs that monitor a training."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import SupportsFloat

from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import check_path, typed, warn
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.tools.reporting.step_report import StepReport, StepReporter
from ms_gradaccum.training.events import StepEvent, check_told
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "MetricsLogger"


class MetricsLogger(StepReporter, Callback):
    """A :class:`StepReporter` whose `log` writes each report as a line of JSON, and can pass it to a function.

    In ``Model.train`` and ``Model.fit`` it is a callback, and writes the results of evaluations too. In a loop of your
    own, give it to ``accumulator.add_callback``, or call `log`. All processes must do so; rank 0 writes.

    A line is a JSON object with the items of the report, `time` (seconds since 1970) and in a Model `epoch`. An Inf or
    NaN is ``null``. If the disk is full, a warning says so, and the training goes on without the line.

    Args:
        path (Union[str, os.PathLike]): The file to which the lines are appended. Its folder is created if necessary.
        log (Callable, optional): Called with a dict from names to numbers and the number of the update, as
            ``wandb.log`` and ``swanlab.log`` are. Default: ``None``.

    Keyword Args:
        train_step (Union[TrainOneStepCell, Accumulator], optional): The training step of a loop without a Model.
            Default: ``None``.
        every (int), weight_norm (bool): As of :class:`StepReporter`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        OSError: If `path` cannot be written.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import MetricsLogger, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.5))
        >>> logger = MetricsLogger(f"{tempfile.mkdtemp()}/run.jsonl", train_step=step)
        >>> print(logger.log(step(ops.ones((4, 1)), ops.ones((4, 1)))).loss)
        1.0
    """

    _owner = _OWNER

    def __init__(
        self,
        path: str | os.PathLike[str],
        log: Callable[[dict[str, float], int], object] | None = None,
        *,
        train_step: TrainOneStepCell | Accumulator | None = None,
        every: int = 1,
        weight_norm: bool = False,
    ) -> None:
        if log is not None and not callable(log):
            raise TypeError(
                f"For '{_OWNER}', the argument 'log' must be a function of a dict and a step, or "
                f"None, but got {typed(log)}. Give wandb.log."
            )
        super().__init__(train_step, every=every, weight_norm=weight_norm)
        self._epoch: dict[str, float] = {}
        self._update = 0
        is_first = current_world(_OWNER).rank == 0
        self._file = _JsonLines(path) if is_first else None
        self._log = log if is_first else None

    def log(
        self, output: StepOutput | StepReport | None, **extra: SupportsFloat
    ) -> StepReport | None:
        """Write the report of an update, and return it; None inside a window.

        Args:
            output (Union[StepReport, StepOutput], optional): The report, or an output to make it from.
            extra (dict): Further numbers to write, by name.

        Raises:
            TypeError: If `output` is something else, or something in `extra` is not a number.
        """
        report = output if isinstance(output, StepReport) else self.report(output)
        if report is None:
            return None
        numbers = report.as_dict()
        for name, value in extra.items():
            number = _number(value)
            if number is None:
                raise TypeError(
                    f"For '{_OWNER}', the argument '{name}' must be a number, but got "
                    f"{typed(value)}. Metrics of several values take a name for each."
                )
            numbers[name] = number
        self._update = report.update
        self._write({**self._epoch, **numbers})
        return report

    def on_update_end(self, event: StepEvent) -> None:
        """Log an update that a Model or an Accumulator has made."""
        self.log(event.output)

    def on_train_begin(self, run_context: RunContext) -> None:
        train_step = run_context.original_args().train_network
        check_told(_OWNER, "logger", train_step, self)
        if train_step is not self._train_step:
            self._watch(train_step)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epoch = {"epoch": run_context.original_args().cur_epoch_num}
        self.restart()

    def on_eval_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        # The names are those of fit's own loss and of the user's metrics. Some metrics are not single numbers.
        results = params.get("eval_results") or params.get("metrics") or {}
        numbers = {}
        for name, value in results.items():
            number = _number(value)
            if number is not None:
                numbers[f"eval_{name.removeprefix('eval_')}"] = number
        if numbers:
            self._write(numbers)

    def on_train_end(self, run_context: RunContext) -> None:
        self._epoch = {}

    def _write(self, numbers: dict[str, float]) -> None:
        if self._file is not None:
            self._file.write({"update": self._update, **self._epoch, **numbers})
        if self._log is not None:
            self._log(numbers, self._update)


class _JsonLines:
    """A file with one JSON object per line. It is opened for each line, so that the line is on the disk afterwards."""

    def __init__(self, path: object) -> None:
        # Absolute, since the program may change its folder.
        self.path = Path(
            check_path(_OWNER, "path", path, "For example 'log_output/run.jsonl'.")
        ).absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("ab").close()
        self.has_failed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Write a line. If the disk is full, warn once."""
        # JSON has no Inf and no NaN.
        plain = json.loads(
            json.dumps({"time": round(time.time(), 3), **record}), parse_constant=lambda name: None
        )
        try:
            with self.path.open("ab") as file:
                if self._is_torn():
                    file.write(b"\n")
                file.write(json.dumps(plain).encode() + b"\n")
        except OSError as error:
            if not self.has_failed:
                warn(
                    f"For '{_OWNER}', {self.path} cannot be written now ({error.strerror}). The "
                    f"training goes on, and reports are missing there."
                )
            self.has_failed = True

    def _is_torn(self) -> bool:
        """Return whether a killed program or a full disk has left the start of a line."""
        if not self.path.stat().st_size:  # A pipe has no size.
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"


def _number(value: SupportsFloat) -> float | None:
    """Return a single number, or None for something else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(value, str):
        return None
    return value if isinstance(value, int) else number
