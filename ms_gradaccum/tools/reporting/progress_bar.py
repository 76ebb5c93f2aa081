"""A callback that shows the progress of a training."""

import os
import sys
import time
from collections.abc import Iterator

import numpy as np
from mindspore import Tensor
from mindspore.communication import GlobalComm, get_rank
from mindspore.train import Callback, RunContext
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from ms_gradaccum._checks import Settled, check_bool, check_positive_float, check_positive_int
from ms_gradaccum.training.step_output import StepOutput, check_output

_OWNER = "ProgressBar"


class ProgressBar(Settled, Callback):
    """Show the epoch, the updates, the losses, the learning rate, the norm of the gradient and the speed.

    On a terminal this is a bar on the standard error stream, with the output of other callbacks above it. Elsewhere
    (log files, CI) it is a plain line on the standard output stream from time to time and one at the end. Of several
    processes only rank 0 shows anything. As a callback of ``Model.train`` and ``Model.fit`` it counts batches. In a
    loop of your own, ``with ProgressBar(total=updates) as progress`` counts the updates that `update` is given.

    Args:
        live (Optional[bool]): ``True`` draws the bar, ``False`` prints the lines. ``None`` draws the bar if
            the standard error stream is a terminal, or if the environment variable `MS_GRADACCUM_LIVE_BAR`
            is ``1`` (for a log that is shown on a terminal while it is written). Default: ``None``.
        seconds_per_line (Union[int, float]): Shortest time between two plain lines. Default: ``10.0``.

    Keyword Args:
        total (int, optional): Number of updates that will be made in a loop of your own, if known. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `seconds_per_line` is not positive and finite, or `total` not positive.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Model
        >>> from ms_gradaccum import ProgressBar
        >>> data = dataset.NumpySlicesDataset((np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)))
        >>> network = nn.Dense(2, 1, weight_init="zeros", has_bias=False)
        >>> model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.25))
        >>> model.train(2, data.batch(4), callbacks=ProgressBar(live=False))
        epoch 2/2, batch 4/4 (100%), loss 0, ... batches/s, 00:0...
    """

    # True while something is shown: during a training, on rank 0. True if `update` counts, and not a Model.
    _is_open = _by_hand = False

    def __init__(self, live: bool | None = None, seconds_per_line: float = 10.0, *, total: int | None = None) -> None:
        super().__init__()
        if live is not None:
            check_bool(_OWNER, "live", live, "None draws the bar on a terminal only.")
        if total is not None:
            check_positive_int(_OWNER, "total", total, "It counts updates; None is for an unknown number.")
        remedy = "It is the shortest time between two lines of a log."
        self.live, self.total = live, total
        self.seconds_per_line = check_positive_float(_OWNER, "seconds_per_line", seconds_per_line, remedy)
        self._is_built = True

    def on_train_begin(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self._initial_step, self._last_epoch = params.cur_step_num, 0
        self._open(params.epoch_num * params.batch_num, "batch")

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        # The first epoch of a resumed training is not epoch 1.
        self._last_epoch = self._last_epoch or params.cur_epoch_num - 1 + params.epoch_num
        if self._is_open:
            epoch = f"epoch {params.cur_epoch_num}/{self._last_epoch}"
            self._count(params.cur_step_num - self._initial_step, params.net_outputs, epoch)

    def on_train_end(self, run_context: RunContext) -> None:
        self.close()

    def update(self, output: StepOutput | None, epoch: int | None = None) -> None:
        """Count an update, in a loop of your own.

        Args:
            output (StepOutput, optional): The result of the training step or of ``Accumulator.step``. None, and an
                output inside a window, are not counted.
            epoch (int, optional): The epoch to show. Default: ``None``.
        """
        check_output(_OWNER, output)
        if output is None or not output.ends_window:
            return
        if not self._by_hand:
            self._open(self.total, "update")
            self._by_hand = True
        if self._is_open:
            self._count(self._step + output.is_updated, output, "" if epoch is None else f"epoch {epoch}")

    def close(self) -> None:
        """Show the last step and no more, in a loop of your own without ``with``."""
        if self._is_open:
            self._show()
        self._close()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        # Model.fit leaves its callbacks after each evaluation, too. After an error on_train_end does not come.
        if error[0] is not None:
            self._close()
        elif self._by_hand:
            self.close()

    def _open(self, total: int | None, unit: str) -> None:
        self._close()  # If one object is given twice, or after a loop that was left.
        self._length, self._unit = total, unit
        self._step = self._shown_step = 0
        self._num_updates: int | None = None  # None: the step does not tell.
        self._last_update: StepOutput | None = None
        self._started = self._shown_at = time.monotonic()
        self._is_open = (get_rank() if GlobalComm.INITED else 0) == 0
        live = os.getenv("MS_GRADACCUM_LIVE_BAR") == "1" or sys.stderr.isatty() if self.live is None else self.live
        self._seconds = 0.1 if live else self.seconds_per_line
        self._bar = tqdm(total=total, unit=unit, mininterval=0, miniters=0) if self._is_open and live else None
        if self._bar is not None:
            # Whole lines that others write go above the bar.
            self._streams = sys.stdout, sys.stderr
            self._above = sys.stdout, sys.stderr = DummyTqdmFile(sys.stdout), DummyTqdmFile(sys.stderr)

    def _close(self) -> None:
        if self._is_open and self._bar is not None:
            for each in self._above:
                if any(each._buf):  # The start of a line without its end.
                    each.write("\n")
            if (sys.stdout, sys.stderr) == self._above:  # Else someone else has redirected them since.
                sys.stdout, sys.stderr = self._streams
            self._bar.close()
        self._is_open = self._by_hand = False

    def _count(self, step: int, outputs: object, epoch: str) -> None:
        self._step, self._epoch = step, epoch
        self._loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        if isinstance(outputs, StepOutput):
            self._num_updates = (self._num_updates or 0) + outputs.is_updated
            if outputs.ends_window:
                self._last_update = outputs
        # Reading the loss waits for the device, so it is read only for steps that are shown.
        if time.monotonic() - self._shown_at >= self._seconds:
            self._show()

    def _show(self) -> None:
        """Draw the bar, or print a line with the rate since the last one."""
        now, step, total = time.monotonic(), self._step, self._length
        if step == self._shown_step:
            return
        if self._bar is not None:
            self._bar.set_description(self._epoch, refresh=False)
            self._bar.set_postfix_str(", ".join(self._facts()), refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            elapsed = now - self._started
            place, times = f"{self._unit} {step}", f"{tqdm.format_interval(elapsed)} elapsed"
            if total is not None:
                place += f"/{total} ({step / total:.0%})"
                times += f", {tqdm.format_interval(elapsed / step * (total - step))} left"
            rate = (step - self._shown_step) / max(now - self._shown_at, 1e-9)
            speed = f"{rate:.3g} {'batches' if self._unit == 'batch' else 'updates'}/s"
            print(", ".join(filter(None, [self._epoch, place, *self._facts(), speed, times])), flush=True)
        self._shown_step, self._shown_at = step, now

    def _facts(self) -> Iterator[str]:
        if self._num_updates is not None and not self._by_hand:
            yield f"{self._num_updates} updates"
        if isinstance(self._loss, Tensor):
            yield f"loss {np.mean(self._loss.asnumpy()):.4g}"
        if self._last_update is not None:
            others = [f"{loss.asnumpy().item():.4g}" for loss in self._last_update.other_losses]
            if others:
                yield f"other losses {' '.join(others)}"
            rates = self._last_update.learning_rate.asnumpy()
            # Groups can have rates of their own.
            yield "lr " + "-".join(f"{rate:.4g}" for rate in sorted({rates.min(), rates.max()}))
            yield f"norm {self._last_update.grad_norm.asnumpy().item():.4g}"
