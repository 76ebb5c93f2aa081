"""A callback that shows the progress of a training."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from ms_gradaccum._checks import FrozenAfterInit, check_bool
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "ProgressBar"
# The text of a bar, and the shortest time between two lines of it. Unit: seconds.
_LINE, _SECONDS = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]", 10.0


class ProgressBar(FrozenAfterInit, Callback):
    """Show the epoch, the batches, the updates, the losses, the learning rate, the norm of the gradient and the speed.

    It is a callback of ``Model.train`` and ``Model.fit``. On a terminal this is tqdm's bar on the standard error
    stream, with the output of other callbacks above it. Elsewhere (log files, CI) it is the bar's text as a line on the
    standard output stream, each 10 seconds and at the end. Of several processes only rank 0 shows anything.

    Args:
        live (bool, optional): ``True`` draws the bar, ``False`` prints the lines. ``None`` draws the bar if the
            standard error stream is a terminal, or if the environment variable `MS_GRADACCUM_LIVE_BAR` is ``1`` (for a
            log that is shown on a terminal while it is written). Default: ``None``.

    Raises:
        TypeError: If `live` has the wrong type.

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
        epoch 2/2: 4/4 [00:0..., loss 0]
    """

    # The bar during a training, on rank 0.
    _bar: "_Bar | None" = None

    def __init__(self, live: bool | None = None) -> None:
        super().__init__()
        self.live = live if live is None else check_bool(_OWNER, "live", live, "None draws the bar on a terminal only.")
        self._is_built = True

    def on_train_begin(self, run_context: RunContext) -> None:
        self._close()  # It may be open if one object is given twice, or after an interrupted training.
        params = run_context.original_args()
        self._initial_step, self._last_epoch = params.cur_step_num, 0
        self._events = getattr(params.train_network, "events", None)
        self._updates_before = 0 if self._events is None else self._events.updates
        self._loss: object = None
        self._last_update: StepOutput | None = None
        if current_world(_OWNER).rank != 0:
            return
        live = os.getenv("MS_GRADACCUM_LIVE_BAR") == "1" or sys.stderr.isatty() if self.live is None else self.live
        lines = {"file": _Lines(), "bar_format": _LINE, "mininterval": _SECONDS, "delay": _SECONDS, "leave": False}
        lines["disable"] = False  # $TQDM_DISABLE is only for bars.
        total = params.epoch_num * params.batch_num
        bar = _Bar(self._facts, total=total, unit="batch", miniters=0, position=0, **({} if live else lines))
        if bar.disable:
            return
        self._bar, self._streams = bar, ExitStack()
        if live:
            # Whole lines of other output go above the bar.
            self._streams.enter_context(redirect_stdout(DummyTqdmFile(sys.stdout)))
            self._streams.enter_context(redirect_stderr(DummyTqdmFile(sys.stderr)))

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        outputs = params.net_outputs
        self._loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        if isinstance(outputs, StepOutput) and outputs.ends_window:
            self._last_update = outputs
        # The first epoch of a resumed training is not epoch 1.
        self._last_epoch = self._last_epoch or params.cur_epoch_num - 1 + params.epoch_num
        if self._bar is not None:
            self._bar.set_description(f"epoch {params.cur_epoch_num}/{self._last_epoch}", refresh=False)
            self._bar.update(params.cur_step_num - self._initial_step - self._bar.n)

    def on_train_end(self, run_context: RunContext) -> None:
        self._close()

    def __exit__(self, *error: object) -> None:
        # Model.fit calls this after each evaluation, too. After an error, on_train_end is not called.
        if error[0] is not None:
            self._close()

    def _close(self) -> None:
        if self._bar is None:
            return
        if self._bar.n != self._bar.last_print_n:
            self._bar.refresh()
        # Otherwise the bar is lines, or the streams were redirected later and stay so.
        if all(isinstance(stream, DummyTqdmFile) for stream in (sys.stdout, sys.stderr)):
            for stream in (sys.stdout, sys.stderr):
                if any(getattr(stream, "_buf", [])):  # An unfinished line.
                    stream.write("\n")
            self._streams.close()
        self._bar.close()
        self._bar = None

    def _facts(self) -> Iterator[str]:
        if self._events is not None and self._last_update is not None:
            yield f"{self._events.updates - self._updates_before} updates"
        if isinstance(self._loss, Tensor):
            yield f"loss {np.mean(self._loss.asnumpy()):.4g}"
        if self._last_update is not None:
            others = [f"{loss.asnumpy().item():.4g}" for loss in self._last_update.other_losses]
            if others:
                yield f"other losses {' '.join(others)}"
            rates = self._last_update.learning_rate.asnumpy()
            # Groups can have their own rates.
            yield "lr " + "-".join(f"{rate:.4g}" for rate in sorted({rates.min(), rates.max()}))
            yield f"norm {self._last_update.grad_norm.asnumpy().item():.4g}"


class _Bar(tqdm):
    """A bar that reads the facts only when it is drawn, since reading a loss waits for the device."""

    def __init__(self, facts: Callable[[], Iterator[str]], **settings: Any) -> None:
        self.facts = facts
        super().__init__(**settings)

    @property
    def format_dict(self) -> dict[str, Any]:
        return {**super().format_dict, "postfix": ", ".join(self.facts())}


class _Lines:
    """The standard output stream, with a line for each drawing of tqdm."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), flush=True)
