"""Events of micro batches and updates, dispatched to the user's callbacks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from mindspore import nn

from ms_gradaccum._checks import check_saved, is_count, typed
from ms_gradaccum.training.step_output import StepOutput

NAMES = ("on_micro_batch_begin", "on_micro_batch_end", "on_update_begin", "on_update_end")


class StepEvent(NamedTuple):
    """Argument of a callback at the begin or end of a micro batch or an update.

    Attributes:
        batch: Number of the current batch in this process since its training step was built, from 1 on.
        micro_batch: Number of the micro batch in its batch, from 0 on; None for an update.
        rows: Rows of the micro batch; None for an update, and for gradients that the caller has computed.
        updates: Updates made so far. At the end of an update, this update is counted too, unless it was skipped.
        skipped_updates: Windows skipped so far, because their gradient had an Inf or a NaN, their norm was above
            `skip_above` or their weight was 0, or because the optimizer left out its update.
        output: Report on the window, at the end of an update; None otherwise.

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import GradAccumulation, TrainOneStepCell
        >>> class Watch:
        ...     def on_micro_batch_end(self, event):
        ...         print("micro batch", event.micro_batch, "of", event.rows, "rows")
        ...     def on_update_end(self, event):
        ...         print("update", event.updates, "with loss", event.output.loss)
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
        >>> train_step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.5))
        >>> train_step.add_callback(Watch())
        >>> output = train_step(ops.ones((3, 1)), ops.ones((3, 1)))
        micro batch 0 of 2 rows
        micro batch 1 of 1 rows
        update 1 with loss 1.0
    """

    batch: int
    micro_batch: int | None
    rows: int | None
    updates: int
    skipped_updates: int
    output: StepOutput | None = None


class _HearsMicroBatchBegin(Protocol):
    def on_micro_batch_begin(self, event: StepEvent, /) -> object: ...


class _HearsMicroBatchEnd(Protocol):
    def on_micro_batch_end(self, event: StepEvent, /) -> object: ...


class _HearsUpdateBegin(Protocol):
    def on_update_begin(self, event: StepEvent, /) -> object: ...


class _HearsUpdateEnd(Protocol):
    def on_update_end(self, event: StepEvent, /) -> object: ...


# A listener has at least one of the four methods.
StepCallback = _HearsMicroBatchBegin | _HearsMicroBatchEnd | _HearsUpdateBegin | _HearsUpdateEnd
# The methods of a listener, by the name of the event.
_Methods = dict[str, Callable[[StepEvent], None]]


class Events:
    """Count batches when they begin, micro batches when they are done, windows when they end, and call listeners."""

    _COUNTS = ("batches", "micro_batches", "updates", "skipped_updates")
    batches = 0
    micro_batches = 0
    updates = 0
    skipped_updates = 0

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.uncounted: list[StepOutput] = []  # Reports of windows that nobody has read yet.
        self.listeners: list[_Methods] = []
        self.extras = nn.CellList(auto_prefix=False)

    def state_dict(self) -> dict[str, int]:
        """Return the counts, as JSON."""
        self.count()
        return {name: getattr(self, name) for name in self._COUNTS}

    def load_state_dict(self, saved: object) -> None:
        """Go on from the counts that `state_dict` has returned."""
        rules = dict.fromkeys(self._COUNTS, is_count)
        vars(self).update(check_saved(saved, "how many batches and updates there were", rules))
        self.uncounted.clear()

    def has_listener(self, callback: object) -> bool:
        return _methods_of(callback) in self.listeners

    def add(self, callback: object) -> _Methods:
        """From now on, call the methods of ``callback`` that are named after events. Return them by name."""
        methods = _methods_of(callback)
        if not methods:
            raise TypeError(
                f"For '{self.owner}', the argument 'callback' must be an object with at least one "
                f"of the methods {', '.join(NAMES)}, but got {typed(callback)}. Each takes one "
                f"argument, a StepEvent."
            )
        self.listeners.append(methods)
        return methods

    @contextmanager
    def listening(self, callbacks: Sequence[object]) -> Iterator[None]:
        """Within this context, add the ``callbacks`` that have event methods and do not listen yet."""
        with ExitStack() as stack:
            for callback in callbacks:
                if _methods_of(callback) and not self.has_listener(callback):
                    stack.callback(self.listeners.remove, self.add(callback))
            yield

    def micro_batch_end(self, index: int, rows: int | None = None) -> None:
        """Count a micro batch that was added, and call the listeners."""
        self.micro_batches += 1
        self.tell("on_micro_batch_end", index, rows)

    def count(self) -> None:
        """Count the windows that have ended unread."""
        for output in self.uncounted:
            self.updates += output.is_updated
            self.skipped_updates += not output.is_updated
        self.uncounted.clear()

    def update_end(self, output: StepOutput) -> None:
        """Count the end of a window, and call the listeners."""
        self.uncounted.append(output)
        self.count()
        self.tell("on_update_end", output=output)

    def tell(
        self,
        name: str,
        index: int | None = None,
        rows: int | None = None,
        output: StepOutput | None = None,
    ) -> None:
        for methods in self.listeners:
            if name in methods:
                methods[name](
                    StepEvent(self.batches, index, rows, self.updates, self.skipped_updates, output)
                )


class Extra(nn.Cell):
    """A callback whose tensors belong to a training step, and so to its checkpoints and states."""

    def attach(self, step: "Observed") -> None:
        """Build the tensors for ``step``, once."""
        raise NotImplementedError

    def agreed(self) -> str:
        """Return the settings that all ranks must have in common."""
        raise NotImplementedError

    def check_can_save(self, owner: str) -> None:
        """Raise if the step cannot be saved or loaded now."""


class Observed:
    """Base class of training steps with events."""

    events: Events
    # The callbacks whose tensors belong to this step. They are among its cells, so that MindSpore finds the tensors.
    extras: nn.CellList

    def adopt(self, callbacks: Sequence[object]) -> None:
        for callback in callbacks:
            if isinstance(callback, Extra) and callback not in self.extras:
                callback.attach(self)
                self.extras.append(callback)

    def add_callback(self, callback: StepCallback) -> None:
        """Call the methods of the callback that are named after events, each with a :class:`StepEvent`.

        The events are `on_micro_batch_begin`, `on_micro_batch_end`, `on_update_begin` and `on_update_end` of each
        network. In data sink mode there is one ``on_update_end`` per sink. A callback that was added before is not
        added again.

        Args:
            callback (object): Anything with at least one of these methods, for example a :class:`MetricsLogger`.

        Raises:
            TypeError: If it has none of them.
        """
        self.adopt([callback])
        # A cell of a notebook that runs again adds nothing.
        if not self.events.has_listener(callback):
            self.events.add(callback)


def check_told(owner: str, name: str, train_step: object, callback: object) -> None:
    """Raise unless a Model's ``train_step`` reports its updates to ``callback``, the argument ``name``."""
    if not isinstance(train_step, Observed):
        raise TypeError(
            f"For '{owner}', the training step must be a TrainOneStepCell of ms_gradaccum, but got "
            f"another {type(train_step).__name__}. Import Model from ms_gradaccum."
        )
    if not train_step.events.has_listener(callback):
        raise ValueError(
            f"For '{owner}', the training step does not report its updates to this callback, "
            f"because the Model is MindSpore's. Import Model from ms_gradaccum, or call "
            f"train_step.add_callback({name}) first."
        )


def _methods_of(callback: object) -> _Methods:
    methods = {}
    for name in NAMES:
        method = getattr(callback, name, None)
        if callable(method):
            methods[name] = method
    return methods
