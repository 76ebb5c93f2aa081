"""Callbacks that show how the training goes."""

import os
import sys
import time
from typing import Any, Protocol, TextIO

import numpy as np
from mindspore import Tensor
from mindspore.communication import GlobalComm, get_rank
from mindspore.train import Callback
from tqdm import tqdm

from ms_gradaccum._checks import check_bool, check_positive_float

_OWNER = "ProgressBar"


class ProgressBar(Callback):
    """Show the epoch, the updates and the loss while ``Model.train`` or ``Model.fit`` runs.

    On a terminal this is a bar on the standard error stream, with what other callbacks print above it.
    Elsewhere (log files, CI) it is a plain line on the standard output stream from time to time and one
    at the end. In a distributed run only rank 0 shows anything.

    Args:
        live (Optional[bool]): ``True`` draws the bar, ``False`` prints the lines. ``None`` draws the bar if
            the standard error stream is a terminal, or if the environment variable `MS_GRADACCUM_LIVE_BAR`
            is ``1`` (for a log that is shown on a terminal while it is written). Default: ``None``.
        seconds_per_line (Union[int, float]): Shortest time between two plain lines. Default: ``10.0``.

    Raises:
        TypeError: If `live` is neither ``None`` nor a bool.
        TypeError: If `seconds_per_line` is not an int or a float.
        ValueError: If `seconds_per_line` is not positive and finite.

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
        epoch 2/2, batch 4/4 (100%), loss 0, 00:0...
    """

    def __init__(self, live: bool | None = None, seconds_per_line: float = 10.0) -> None:
        super().__init__()
        if live is not None:
            check_bool(_OWNER, "live", live, "None draws the bar on a terminal only.")
        remedy = "It is the shortest time between two lines of a log."
        self.live = live
        self.seconds_per_line = check_positive_float(_OWNER, "seconds_per_line", seconds_per_line, remedy)
        self._display: _Display | None = None  # set while training runs, on the rank that shows it

    def on_train_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        self._step, self._shown_step = 0, 0
        self._initial_step = params.cur_step_num
        self._num_updates: int | None = None  # None: the step does not tell
        if _rank() == 0:
            num_steps = params.epoch_num * params.batch_num
            self._display = _Bar(num_steps) if self._is_live() else _Lines(num_steps, self.seconds_per_line)
        self._shown_at = time.monotonic()

    def on_train_epoch_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        if self._step == 0:  # the first epoch is not epoch 1 if the training was resumed
            self._last_epoch = params.cur_epoch_num - 1 + params.epoch_num

    def on_train_step_end(self, run_context: Any) -> None:
        if self._display is None:
            return
        params = run_context.original_args()
        self._step = params.cur_step_num - self._initial_step
        updated = getattr(params.net_outputs, "updated", None)
        if updated is not None:
            self._num_updates = (self._num_updates or 0) + bool(updated)
        # Reading the loss waits for the device, so that of the steps that are not shown stays unread.
        if time.monotonic() - self._shown_at >= self._display.seconds:
            self._show(params)

    def on_train_end(self, run_context: Any) -> None:
        if self._display is not None and self._step > self._shown_step:
            self._show(run_context.original_args())
        self._close()

    def __exit__(self, *error: Any) -> None:
        self._close()  # after an error in the training on_train_end does not come

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
        self._display = None

    def _is_live(self) -> bool:
        if self.live is not None:
            return self.live
        return os.getenv("MS_GRADACCUM_LIVE_BAR") == "1" or sys.stderr.isatty()

    def _show(self, params: Any) -> None:
        assert self._display is not None
        outputs = params.net_outputs
        loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        facts = [] if self._num_updates is None else [f"{self._num_updates} updates"]
        if isinstance(loss, Tensor):
            facts.append(f"loss {np.mean(loss.asnumpy()):.4g}")
        self._display.show(self._step, f"epoch {params.cur_epoch_num}/{self._last_epoch}", ", ".join(facts))
        self._shown_step, self._shown_at = self._step, time.monotonic()


class _Display(Protocol):
    """One of the two ways to show the progress."""

    seconds: float  # shortest time between two calls of show

    def show(self, step: int, epoch: str, facts: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Plain lines in a log."""

    def __init__(self, num_steps: int, seconds: float) -> None:
        self.num_steps, self.seconds = num_steps, seconds
        self.start = time.monotonic()

    def show(self, step: int, epoch: str, facts: str) -> None:
        elapsed = time.monotonic() - self.start
        left = elapsed / step * (self.num_steps - step)
        times = f"{tqdm.format_interval(elapsed)} elapsed, {tqdm.format_interval(left)} left"
        share = f"{step}/{self.num_steps} ({step / self.num_steps:.0%})"
        print(", ".join(filter(None, [epoch, f"batch {share}", facts, times])), flush=True)

    def close(self) -> None: ...


class _Bar:
    """A bar in the last line of the terminal."""

    seconds = 0.1

    def __init__(self, num_steps: int) -> None:
        self.bar = tqdm(total=num_steps, unit="batch", mininterval=0, miniters=0)
        self.streams = sys.stdout, sys.stderr
        self.above = _AboveBar(sys.stdout, self.bar), _AboveBar(sys.stderr, self.bar)
        sys.stdout, sys.stderr = self.above

    def show(self, step: int, epoch: str, facts: str) -> None:
        self.bar.set_description(epoch, refresh=False)
        self.bar.set_postfix_str(facts, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        for stream in self.above:
            stream.finish()
        if (sys.stdout, sys.stderr) == self.above:  # else someone else redirected them since
            sys.stdout, sys.stderr = self.streams
        self.bar.close()


class _AboveBar:
    """Stands in for a stream while there is a bar: whole lines go above it."""

    def __init__(self, stream: TextIO, bar: tqdm) -> None:
        self.stream, self.bar = stream, bar
        self.unfinished = ""  # the start of a line whose end has not been written yet

    def write(self, text: str) -> int:
        lines, newline, rest = (self.unfinished + text).rpartition("\n")
        self.unfinished = rest
        if newline:
            self.bar.clear()
            self.stream.write(lines + newline)
            self.stream.flush()
            self.bar.refresh()
        return len(text)

    def finish(self) -> None:
        if self.unfinished:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _rank() -> int:
    return get_rank() if GlobalComm.INITED else 0
