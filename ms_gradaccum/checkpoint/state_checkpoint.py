"""A callback that saves states while a Model trains."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import (
    FrozenAfterInit,
    check_bool,
    check_float,
    check_int,
    check_path,
)
from ms_gradaccum.checkpoint.contents import KEPT, STATES
from ms_gradaccum.checkpoint.files import find_state, renamed_states
from ms_gradaccum.checkpoint.state import claim_folder, load_state, on_rank_0, save_state
from ms_gradaccum.loops.model import Model
from ms_gradaccum.parallel.world import current_world, gather_counts

_OWNER = "StateCheckpoint"


class StateCheckpoint(FrozenAfterInit, Callback):
    """Save the state of a training with :func:`save_state`, so that ``Model.train(..., resume=True)`` can resume it.

    It saves at the end of each epoch and, on request, in between, also in the middle of a window. After a SIGTERM it
    lets the current window finish (in a job of one process, the current batch), saves, and exits with status 143. In a
    training of one process a Ctrl-C does the same, and ends in a KeyboardInterrupt if Python gets it.

    Args:
        directory (Union[str, PathLike]): Folder of the states. All processes must have access to it.

    Keyword Args:
        save_checkpoint_steps (int, optional): Number of batches between two states. Default: ``None``.
        save_checkpoint_seconds (float, optional): Time after which a state is saved at the end of a window.
            Unit: seconds. Default: ``None``.
        keep_checkpoint_max (int): Number of states to keep. Default: ``5``.
        save_at_sigterm (bool): Whether to save at a SIGTERM and a Ctrl-C. Several processes then exchange a message of
            a few bytes after each window. Default: ``True``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is not a valid path, or a number is not positive.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import NumpySlicesDataset
        >>> from ms_gradaccum import Model, StateCheckpoint
        >>> x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
        >>> def train(epochs, folder):
        ...     network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        ...     optimizer = nn.SGD(network.trainable_params(), 0.02)
        ...     model = Model(nn.WithLossCell(network, nn.MSELoss()), optimizer=optimizer, accumulation_steps=4)
        ...     data = NumpySlicesDataset((x, 2 * x), shuffle=False).batch(2)
        ...     model.train(epochs, data, callbacks=[StateCheckpoint(folder)], resume=True)
        ...     return network.weight.asnumpy().item()
        >>> folder = tempfile.TemporaryDirectory()
        >>> print(f"{train(1, folder.name):.3f} {train(2, folder.name):.3f}")
        2.040 1.999
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_checkpoint_steps: int | None = None,
        save_checkpoint_seconds: float | None = None,
        keep_checkpoint_max: int = 5,
        save_at_sigterm: bool = True,
    ) -> None:
        super().__init__()
        self.directory = check_path(_OWNER, "directory", directory, STATES)
        self.steps = save_checkpoint_steps
        self.seconds = save_checkpoint_seconds
        if self.steps is not None:
            check_int(_OWNER, "save_checkpoint_steps", self.steps, "It counts batches.")
        if self.seconds is not None:
            check_float(_OWNER, "save_checkpoint_seconds", self.seconds, "Its unit is seconds.")
        self.keep_max = check_int(_OWNER, "keep_checkpoint_max", keep_checkpoint_max, KEPT)
        self.save_at_sigterm = check_bool(
            _OWNER, "save_at_sigterm", save_at_sigterm, "The default is True."
        )
        self.model: Model | None = None  # The model that is training with this callback.
        self._signal = 0  # The number of the signal that this process got in this training.
        # The step and the time of the last state. Set at the beginning of a training.
        self._saved_step = -1
        self._time = 0.0
        self._is_built = True

    def agreed(self) -> str:
        """Return what all ranks must have in common, or some would save without the others."""
        settings = f"save_checkpoint_steps={self.steps}, save_checkpoint_seconds={self.seconds}"
        return f"StateCheckpoint({settings}, save_at_sigterm={self.save_at_sigterm})"

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """Attach to a training of ``model`` in this context. Only the main thread can handle signals."""
        numbers = []
        if self.save_at_sigterm and threading.current_thread() is threading.main_thread():
            numbers.append(signal.SIGTERM)
            # At a Ctrl-C, msrun kills its processes. A program in the background ignores it. A graph of MindSpore's
            # sends a SIGTERM in its place.
            is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if is_default and current_world(_OWNER).size == 1:
                numbers.append(signal.SIGINT)
        self.model = model
        self._signal = 0
        before: dict[int, Any] = {
            number: signal.signal(number, self._note_signal) for number in numbers
        }
        try:
            yield
        finally:
            self.model = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: object) -> None:
        self._signal = number
        # print() fails in a handler that has interrupted another print().
        os.write(
            2,
            f"\n{_OWNER}: the training saves its state into {self.directory}, and ends.\n".encode(),
        )

    def resume_into(self, model: Model) -> None:
        """Load the last state in the folder, if there is one, into ``model``. Rank 0 looks for it. Collective."""

        def has_states() -> bool:
            # If all states were renamed, `load_state` raises; otherwise the training would silently start anew.
            return bool(find_state(self.directory) or renamed_states(self.directory))

        if on_rank_0("looks for a state", has_states):
            load_state(model, self.directory)

    def on_train_begin(self, run_context: RunContext) -> None:
        if self.model is None:
            raise ValueError(
                f"For '{_OWNER}', the argument 'model' must be a Model of ms_gradaccum, but got "
                f"another one. Import Model from ms_gradaccum."
            )
        claim_folder("begins to train a Model", Path(self.directory))
        self._saved_step = run_context.original_args().cur_step_num
        self._time = time.monotonic()

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        ends_pass = params.cur_step_num % params.batch_num == 0
        counted = self.steps is not None and params.cur_step_num % self.steps == 0
        told, late = self._agree(params.net_outputs.ends_window or ends_pass)
        if (ends_pass or counted or told or late) and self._save(params.cur_step_num) and told:
            if self._signal == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signal.SIGTERM)

    def _agree(self, ends_window: bool) -> tuple[bool, bool]:
        """Return whether a process got a SIGTERM, and whether a state is due by rank 0's clock."""
        late = self.seconds is not None and time.monotonic() - self._time >= self.seconds
        asks = ends_window and (self.save_at_sigterm or self.seconds is not None)
        if current_world(_OWNER).size > 1 and not asks:
            return False, False
        answers = gather_counts("ends a step with a StateCheckpoint", 2 * (self._signal > 0) + late)
        return max(answers) > 1, answers[0] % 2 == 1

    def _save(self, step: int) -> bool:
        """Save a state if all processes can, and return whether it was saved."""
        if self.model is None or not self.model.can_save:
            return False
        save_state(self.model, self.directory, keep_checkpoint_max=self.keep_max)
        self._saved_step = step
        self._time = time.monotonic()
        return True

    def on_train_end(self, run_context: RunContext) -> None:
        # Another callback has ended the training in the middle of a pass.
        step = run_context.original_args().cur_step_num
        if step != self._saved_step:
            self._save(step)
