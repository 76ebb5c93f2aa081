"""A callback that shows the progress of a training."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext
from tqdm import tqdm

from ms_gradaccum._checks import FrozenAfterInit, check_bool
from ms_gradaccum.batch.weighted_loss import first_of
from ms_gradaccum.parallel.world import current_world
from ms_gradaccum.training.step_output import StepOutput

_OWNER = "ProgressBar"
_LINE = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_SECONDS = 10.0  # The shortest time between two lines.


class ProgressBar(FrozenAfterInit, Callback):
    """Show the epoch, the batches, the updates, the losses, the learning rate, the norm of the gradient and the speed.

    It is a callback of ``Model.train`` and ``Model.fit``. On a terminal this is tqdm's bar on the standard error
    stream. Elsewhere (log files, CI) it is the bar's text as a line on the standard output stream, each 10 seconds and
    at the end. Of several processes only rank 0 shows anything.

    Args:
        live (bool, optional): ``True`` draws the bar, ``False`` prints the lines. ``None`` draws the bar if the
            standard error stream is a terminal, or if the environment variable `MS_GRADACCUM_LIVE_BAR` is ``1`` (for a
            log that is shown on a terminal while it is written). Default: ``None``.

    Raises:
        TypeError: If `live` has the wrong type.

    Supported Platforms:
        ``GPU`` ``CPU``

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

    # Set during a training, on rank 0.
    _bar: "_Bar | None" = None

    def __init__(self, live: bool | None = None) -> None:
        super().__init__()
        if live is not None:
            check_bool(_OWNER, "live", live, "None draws the bar on a terminal only.")
        self.live = live
        self._is_built = True

    def on_train_begin(self, run_context: RunContext) -> None:
        self._close()  # It may be open after an interrupted training.

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        if self._bar is not None or current_world(_OWNER).rank != 0:
            return
        is_live = self.live
        if is_live is None:
            is_live = os.getenv("MS_GRADACCUM_LIVE_BAR") == "1" or sys.stderr.isatty()
        settings: dict[str, Any] = {}
        if not is_live:
            settings = {
                "file": _Lines(),
                "bar_format": _LINE,
                "mininterval": _SECONDS,
                "delay": _SECONDS,
                "leave": False,
                "disable": False,  # $TQDM_DISABLE is only for bars.
            }
        bar = _Bar(run_context.original_args(), **settings)
        if not bar.disable:
            self._bar = bar

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._bar is not None:
            self._bar.step(run_context.original_args())

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
        self._bar.close()
        self._bar = None


class _Bar(tqdm):
    """The bar of a training. It reads outputs only when it is drawn, since reading a loss waits for the device."""

    def __init__(self, params: Any, **settings: Any) -> None:
        # A training that goes on begins in a later epoch, and perhaps in the middle of it.
        self.epochs = params.cur_epoch_num - 1 + params.epoch_num
        self.events = getattr(params.train_network, "events", None)
        self.updates_before = 0 if self.events is None else self.events.updates
        self.loss: object = None
        self.last_update: StepOutput | None = None
        done = (
            params.cur_epoch_num - 1
        ) * params.batch_num + params.cur_step_num % params.batch_num
        super().__init__(
            total=self.epochs * params.batch_num, initial=done, unit="batch", miniters=0, **settings
        )

    def step(self, params: Any) -> None:
        """Show the outputs of a step of a Model."""
        outputs = params.net_outputs
        self.loss = first_of(outputs)
        if isinstance(outputs, StepOutput) and outputs.ends_window:
            self.last_update = outputs
        self.set_description(f"epoch {params.cur_epoch_num}/{self.epochs}", refresh=False)
        batch = (params.cur_step_num - 1) % params.batch_num + 1
        self.update((params.cur_epoch_num - 1) * params.batch_num + batch - self.n)

    @property
    def format_dict(self) -> dict[str, Any]:
        return {**super().format_dict, "postfix": ", ".join(self._facts())}

    def _facts(self) -> Iterator[str]:
        if self.events is not None and self.last_update is not None:
            yield f"{self.events.updates - self.updates_before} updates"
        if isinstance(self.loss, Tensor):
            yield f"loss {np.mean(self.loss.asnumpy()):.4g}"
        if self.last_update is not None:
            others = [f"{float(loss):.4g}" for loss in self.last_update.other_losses]
            if others:
                yield f"other losses {' '.join(others)}"
            rates = self.last_update.learning_rate.asnumpy()
            # Groups can have their own rates.
            yield "lr " + "-".join(f"{rate:.4g}" for rate in sorted({rates.min(), rates.max()}))
            yield f"norm {float(self.last_update.grad_norm):.4g}"


class _Lines:
    """The standard output stream, with a line for each drawing of tqdm."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), flush=True)
