"""Reports into files, and to other programs that watch a training."""

import os
from collections.abc import Callable
from typing import Any, SupportsFloat

from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import Settled, argument_error, check_bool, typed
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.tools.reporting.metric_sinks import Call, EventFile, JsonLines
from ms_gradaccum.tools.reporting.step_report import StepReport, StepReporter
from ms_gradaccum.training.events import StepEvent, check_told
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "MetricsLogger"


class MetricsLogger(Settled, Callback):
    """Write a :class:`StepReport` of each update: a line of JSON, and if asked a TensorBoard event file or a call.

    In ``Model.train`` and ``Model.fit`` it is a callback, and writes what `fit` evaluates too. In a loop of your own,
    give it to ``accumulator.add_callback``, or call `log`. Of several processes all must do so; rank 0 writes.

    A line is one JSON object with the items of the report, `time` (seconds since 1970) and in a Model `epoch`. An Inf
    or NaN, which JSON does not know, is ``null``. Each line is in the file when `log` returns. What cannot be written
    later on, to a full disk for example, is kept and tried again with the next line, after one warning.

    Args:
        path (Union[str, os.PathLike]): The file of the lines. Its folder is made if there is none.
        tensorboard_dir (Union[str, os.PathLike], optional): Folder of the event files, which takes the package
            tensorboardX. Default: ``None``, no event files.
        log (Callable, optional): Called with a dict from names to numbers and the number of the update, as
            ``wandb.log`` and ``swanlab.log`` are. Default: ``None``.

    Keyword Args:
        train_step (Union[TrainOneStepCell, Accumulator], optional): What trains, if not a Model. Default: ``None``.
        append (bool): Whether to go on in a file that has lines, of a training that is resumed. If not, lines are an
            error. Default: ``False``.
        every (int), weight_norm (bool), communication_time (bool), peak_memory (bool): As of :class:`StepReporter`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `path` has lines and `append` is False, or an argument is out of range.
        OSError: If `path` or `tensorboard_dir` cannot be written.
        ImportError: If `tensorboard_dir` is given, but tensorboardX is not installed.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import json, os, tempfile
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import NumpySlicesDataset
        >>> from ms_gradaccum import MetricsLogger, Model
        >>> x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.02), accumulation_steps=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "run.jsonl")
        ...     dataset = NumpySlicesDataset((x, 2 * x), shuffle=False).batch(2)
        ...     model.train(1, dataset, callbacks=MetricsLogger(path, weight_norm=True))
        ...     with open(path) as lines:
        ...         line = json.loads(lines.read())
        >>> print(line["epoch"], line["update"], line["loss"], round(line["weight_norm"], 4))
        1 1 102.0 2.04
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
        self._settings: dict[str, Any] = {"every": every, "peak_memory": peak_memory}
        self._train_step = train_step
        # Without a step it knows what the outputs say; that of a Model comes when the training begins.
        for name, value in self._costs.items():
            check_bool(_OWNER, name, value, "The default is False.")
        costs = {} if train_step is None else self._costs
        self._reporter = StepReporter(train_step, **self._settings, **costs)
        self._epoch: int | None = None
        self._update = 0
        self._sinks: list[Any] = []
        if current_world(_OWNER).rank == 0:
            try:
                self._sinks.append(JsonLines(path, append))
                if tensorboard_dir is not None:
                    self._sinks.append(EventFile(tensorboard_dir))
            except BaseException:
                self.close()
                raise
            if log is not None:
                self._sinks.append(Call(log))
        self._is_built = True

    def log(self, output: StepOutput | StepReport | None, **extra: SupportsFloat) -> StepReport | None:
        """Write the report of an update, and return it.

        Args:
            output (Union[StepReport, StepOutput], optional): The report, or an output of which one is made. None, and
                an output inside a window, are nothing to write.
            extra (dict): Numbers to write beside it, by name.

        Raises:
            TypeError: If something in `extra` is not a number.
            ValueError: If `train_step` is missing for what was asked.
        """
        if output is None or isinstance(output, StepReport):
            report = output
        else:
            self._check_known()
            report = self._reporter.report(output)
        if report is None:
            return None
        for name, value in extra.items():
            if not _is_number(value):
                remedy = "Metrics of several values take a name for each."
                raise TypeError(argument_error(_OWNER, name, "a number", typed(value), remedy))
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in extra.items()}
        self._update = report.update
        epoch = {} if self._epoch is None else {"epoch": self._epoch}
        self._write({**epoch, **report.as_dict(), **numbers}, {**epoch, **report.scalars(), **numbers})
        return report

    def close(self) -> None:
        """Close the files. What is logged after it opens them again."""
        for sink in self._sinks:
            sink.close()

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
        self._epoch = run_context.original_args().cur_epoch_num
        self._reporter.restart()

    def on_eval_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        results = params.get("eval_results") or params.get("metrics") or {}
        # Names of fit's own loss and of the user's metrics; what is no single number cannot be drawn.
        numbers = {name: float(value) for name, value in results.items() if _is_number(value)}
        numbers = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in numbers.items()}
        if numbers:
            epoch = {} if self._epoch is None else {"epoch": self._epoch}
            self._write({**epoch, "update": self._update, **numbers}, numbers)

    def on_train_end(self, run_context: RunContext) -> None:
        self._leave()

    def __exit__(self, *error: object) -> None:
        # Here comes fit after each evaluation, too. After an error in the training on_train_end does not come.
        if self._epoch is None or error[0] is not None:
            self._leave()

    def _leave(self) -> None:
        self._epoch = None
        self.close()

    def _check_known(self) -> None:
        asked = [name for name, value in self._costs.items() if value]
        if self._train_step is None and asked:
            remedy = "Give the Accumulator or the TrainOneStepCell."
            raise ValueError(argument_error(_OWNER, "train_step", f"given for {' and '.join(asked)}", None, remedy))

    def _write(self, record: dict[str, Any], scalars: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.write(record, scalars, self._update)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str)
