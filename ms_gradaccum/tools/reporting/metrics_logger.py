"""Reports into files, and to other programs that watch a training."""

import os
from collections.abc import Callable
from typing import Any, SupportsFloat

from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import Settled, argument_error, check_bool, typed
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.tools.reporting.metric_sinks import EventFile, JsonLines
from ms_gradaccum.tools.reporting.step_report import StepReport, StepReporter
from ms_gradaccum.training.events import StepEvent, check_told
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "MetricsLogger"


class MetricsLogger(Settled, Callback):
    """Write a :class:`StepReport` of each update: a line of JSON, and if asked a TensorBoard event file or a call.

    In ``Model.train`` and ``Model.fit`` it is a callback, and writes the results of evaluations too. In a loop of your
    own, give it to ``accumulator.add_callback``, or call `log`. All processes must do so; rank 0 writes.

    A line is a JSON object with the items of the report, `time` (seconds since 1970) and in a Model `epoch`. An Inf or
    NaN is ``null``. Each line is in the file when `log` returns, or with a warning later if the disk is full.

    Args:
        path (Union[str, os.PathLike]): The file of the lines. Its folder is made if there is none.
        tensorboard_dir (Union[str, os.PathLike], optional): Folder of event files, which take the package
            tensorboardX. Default: ``None``.
        log (Callable, optional): Called with a dict from names to numbers and the number of the update, as
            ``wandb.log`` and ``swanlab.log`` are. Default: ``None``.

    Keyword Args:
        train_step (Union[TrainOneStepCell, Accumulator], optional): The training step of a loop without a Model.
            Default: ``None``.
        append (bool): True goes on in a file that has lines, of a training that is resumed; False refuses it.
            Default: ``False``.
        every (int), weight_norm (bool), communication_time (bool), peak_memory (bool): As of :class:`StepReporter`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `path` has lines and `append` is False, or an argument is out of range.
        OSError: If `path` or `tensorboard_dir` cannot be written.
        ImportError: If `tensorboard_dir` is given, but tensorboardX is not installed.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

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

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensorboard_dir: str | os.PathLike[str] | None = None,
        log: Callable[[dict[str, float], int], object] | None = None,
        *,
        train_step: TrainOneStepCell | Accumulator | None = None,
        append: bool = False,
        every: int = 1,
        weight_norm: bool = False,
        communication_time: bool = False,
        peak_memory: bool = False,
    ) -> None:
        super().__init__()
        if log is not None and not callable(log):
            rule = "a function of a dict and a step, or None"
            raise TypeError(argument_error(_OWNER, "log", rule, typed(log), "Give wandb.log."))
        check_bool(_OWNER, "append", append, "True goes on in a file that has lines.")
        self._costs = {"weight_norm": weight_norm, "communication_time": communication_time}
        for name, value in self._costs.items():
            check_bool(_OWNER, name, value, "The default is False.")
        self._settings: dict[str, Any] = {"every": every, "peak_memory": peak_memory}
        self._train_step = train_step
        # The step of a Model comes when the training begins.
        self._reporter = StepReporter(train_step, **self._settings, **(self._costs if train_step is not None else {}))
        self._epoch: dict[str, float] = {}
        self._update = 0
        writes = current_world(_OWNER).rank == 0
        self._lines = JsonLines(path, append) if writes else None
        self._events = EventFile(tensorboard_dir) if writes and tensorboard_dir is not None else None
        self._log = log if writes else None
        self._is_built = True

    def log(self, output: StepOutput | StepReport | None, **extra: SupportsFloat) -> StepReport | None:
        """Write the report of an update, and return it.

        Args:
            output (Union[StepReport, StepOutput], optional): The report, or an output of which one is made. None, and
                an output inside a window, are ignored.
            extra (dict): Numbers to write beside it, by name.

        Raises:
            TypeError: If something in `extra` is not a number.
            ValueError: If `train_step` is missing for a requested item.
        """
        asked = [name for name, value in self._costs.items() if value]
        if isinstance(output, StepOutput) and self._train_step is None and asked:
            remedy = "Give the Accumulator or the TrainOneStepCell."
            raise ValueError(argument_error(_OWNER, "train_step", f"given for {' and '.join(asked)}", None, remedy))
        report = output if isinstance(output, StepReport) else self._reporter.report(output)
        if report is None:
            return None
        for name, value in extra.items():
            if not _is_number(value):
                remedy = "Metrics of several values take a name for each."
                raise TypeError(argument_error(_OWNER, name, "a number", typed(value), remedy))
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in extra.items()}
        self._update = report.update
        self._write({**report.as_dict(), **numbers}, {**self._epoch, **report.scalars(), **numbers})
        return report

    def close(self) -> None:
        """Close the files. What is logged after it opens them again."""
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            self._events.close()

    def on_update_end(self, event: StepEvent) -> None:
        """Log an update that a Model or an Accumulator has made."""
        self.log(event.output)

    def on_train_begin(self, run_context: RunContext) -> None:
        train_step = run_context.original_args().train_network
        check_told(_OWNER, "logger", train_step, self)
        if train_step is not self._train_step:
            self._train_step = train_step
            self._reporter = StepReporter(train_step, **self._settings, **self._costs)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epoch = {"epoch": run_context.original_args().cur_epoch_num}
        self._reporter.restart()

    def on_eval_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        results = params.get("eval_results") or params.get("metrics") or {}
        # The names are those of fit's own loss and of the user's metrics, some of which are no single numbers.
        numbers = {name: float(value) for name, value in results.items() if _is_number(value)}
        numbers = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in numbers.items()}
        if numbers:
            self._write({"update": self._update, **numbers}, numbers)

    def on_train_end(self, run_context: RunContext) -> None:
        self._epoch = {}
        self.close()

    def __exit__(self, *error: object) -> None:
        # Model.fit calls this after each evaluation, too. After an error in the training on_train_end does not come.
        if not self._epoch or error[0] is not None:
            self._epoch = {}
            self.close()

    def _write(self, record: dict[str, Any], scalars: dict[str, float]) -> None:
        if self._lines is not None:
            self._lines.write({**self._epoch, **record})
        if self._events is not None:
            self._events.write(scalars, self._update)
        if self._log is not None:
            self._log(scalars, self._update)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str)
