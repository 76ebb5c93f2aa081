"""The report of an update in plain numbers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mindspore import nn

from ms_gradaccum._checks import Settled, argument_error, check_bool, check_positive_int, typed
from ms_gradaccum.backend.optimizers import inner_optimizer
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.tools.reporting.step_costs import CommunicationTime, peak_memory, weight_norm_of
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.step_output import StepOutput, check_output, loss_of
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "StepReporter"


@dataclass(frozen=True)
class StepReport:
    """Report on one window, made by a :class:`StepReporter`. Items that nobody asked for are None.

    Attributes:
        update: Updates that the optimizer has made, this one included: its `global_step`, which a checkpoint keeps. For
            optimizers without one, the updates that the reporter has seen.
        updated: Whether the window made an update.
        skipped_updates: Windows without an update that the reporter has seen.
        overflow: Whether the gradient had an Inf or a NaN.
        loss: Weighted mean loss of the window. None for gradients that an Accumulator was given without a loss.
        learning_rate: Learning rate, or a tuple of one per parameter if groups have rates of their own.
        grad_norm: Global L2 norm of the mean gradient before clipping.
        clipped_grad_norm: The same after clipping.
        loss_scale: Factor of the loss in the backward pass.
        weight: Weight of the window over all processes: its rows or tokens.
        other_losses: Means of the further losses that the network returns, see :class:`StepOutput`. None if there are
            none.
        batches: Batches of this process so far. None where the windows are part of a graph (data sink mode).
        micro_batches: Micro batches of this process so far, or None likewise.
        rows_per_second: Rows of all processes per second since the last report, without the time that reports take.
            None in the first one, which would tell the time of compiling, where the network counts tokens, and if the
            reporter has missed updates since the last one (in data sink mode it sees the last of a sink).
        tokens_per_second: The same for a network that counts what its loss weighs.
        weight_norm: Global L2 norm of the weights after the update.
        communication_seconds: Time that the window's messages take if all processes are ready and nothing else runs.
        peak_memory_bytes: Peak of the memory so far: of the device, on CPU of the process.

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import StepReporter, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.5)
        >>> train_step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        >>> report = StepReporter(train_step).report(train_step(ops.ones((4, 1)), ops.ones((4, 1))))
        >>> print(report.update, report.loss, report.grad_norm, report.weight, report.weight_norm)
        1 1.0 2.0 4.0 None
    """

    update: int
    updated: bool
    skipped_updates: int
    overflow: bool
    loss: float | None
    learning_rate: float | tuple[float, ...]
    grad_norm: float
    clipped_grad_norm: float
    loss_scale: float
    weight: float
    other_losses: tuple[float, ...] | None = None
    batches: int | None = None
    micro_batches: int | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    weight_norm: float | None = None
    communication_seconds: float | None = None
    peak_memory_bytes: int | None = None

    def as_dict(self) -> dict[str, float | tuple[float, ...]]:
        """Return what is known, by name."""
        items = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in items.items() if value is not None}

    def scalars(self) -> dict[str, float]:
        """Return the same as single numbers: of several learning rates the least and the largest."""
        items: dict[str, Any] = self.as_dict()
        items.update({f"other_loss_{i}": loss for i, loss in enumerate(items.pop("other_losses", ()), 1)})
        if isinstance(self.learning_rate, tuple):
            del items["learning_rate"]
            items.update(learning_rate_min=min(self.learning_rate), learning_rate_max=max(self.learning_rate))
        return {name: value if isinstance(value, float) else int(value) for name, value in items.items()}


class _Trained(NamedTuple):
    """The parts of a training step that a reporter reads."""

    optimizer: Any
    # None where the compiler has partitioned the step.
    reducers: Sequence[GradientReducer]
    counts_tokens: bool
    events: Events
    is_open: Callable[[], bool]


class StepReporter(Settled):
    """Make a :class:`StepReport` of each update.

    It reads the device at the end of a window alone. The arguments `weight_norm`, `communication_time` and
    `peak_memory` ask for items that cost something.

    Args:
        train_step (Union[TrainOneStepCell, Accumulator], optional): What trains. Without it the reporter knows what
            the outputs say. Default: ``None``.

    Keyword Args:
        every (int): A report for each so many windows. Its rate is over all of them. Default: ``1``.
        weight_norm (bool): Whether to compute the norm of the weights: a pass over them. Default: ``False``.
        communication_time (bool): Whether to measure the time of the messages. They are sent a second time, of zeros,
            when the update is over, which changes no number; all processes must ask for it, and report the same
            updates. Where the processes meet in each micro batch, one of these rounds is measured and multiplied. It
            holds packing and unpacking, but no waiting for a process that is late. 0 in one process.
            Default: ``False``.
        peak_memory (bool): Whether to ask for the peak of the memory. Default: ``False``.
        network (Cell, optional): Of several networks of an Accumulator the one to report on. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `every` is less than 1, an item is asked for that `train_step` does not know, or it is not said
            which of several networks is meant.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import Accumulator, StepReporter
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.02)
        >>> accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, 4)
        >>> reporter = StepReporter(accumulator, weight_norm=True)
        >>> x = ops.arange(1, 9).float().reshape(4, 2, 1)
        >>> for batch in accumulator.prepare([(part, 2 * part) for part in x]):
        ...     with accumulator.accumulate():
        ...         loss = accumulator.backward(*batch)
        ...         report = reporter.report(accumulator.step())
        >>> print(report.update, report.micro_batches, report.loss, report.grad_norm, round(report.weight_norm, 4))
        1 4 102.0 102.0 2.04
    """

    def __init__(
        self,
        train_step: TrainOneStepCell | Accumulator | None = None,
        *,
        every: int = 1,
        weight_norm: bool = False,
        communication_time: bool = False,
        peak_memory: bool = False,
        network: nn.Cell | None = None,
    ) -> None:
        self.every = check_positive_int(_OWNER, "every", every, "1 means a report for each window.")
        asked = {"weight_norm": weight_norm, "communication_time": communication_time, "peak_memory": peak_memory}
        for name, value in asked.items():
            check_bool(_OWNER, name, value, "The default is False.")
        self._trained = None if train_step is None else _look_at(train_step, network)
        reducers = () if self._trained is None else self._trained.reducers
        for name in ("weight_norm", "communication_time"):
            if asked[name] and not reducers:
                got = "no train_step" if train_step is None else "one that the compiler partitions"
                remedy = f"Leave {name} out, or give what trains."
                raise ValueError(
                    argument_error(_OWNER, "train_step", f"one whose parts are known for {name}", got, remedy)
                )
        self._weight_norm = weight_norm_of(reducers) if weight_norm and reducers else None
        self._communication_time = CommunicationTime(reducers) if communication_time and reducers else None
        self._peak_memory = peak_memory
        self._updates = self._skipped_updates = 0
        # Since the last report, None before the first one.
        self._since: float | None = None
        self._weight = 0.0
        # Those that the optimizer has made and the reporter has not seen, as of the last report.
        self._unseen = 0
        self._is_built = True

    def report(self, output: StepOutput | None) -> StepReport | None:
        """Return the report of a window, or None: inside it, for None, and for windows between those of `every`.

        Args:
            output (StepOutput, optional): What the training step returned, or ``Accumulator.step``.

        Raises:
            TypeError: If `output` is something else.
            RuntimeError: If the time of the messages is to be measured, but the next window has begun.
        """
        check_output(_OWNER, output)
        if output is None or not output.ends_window:
            return None
        updated = output.is_updated
        self._updates += updated
        self._skipped_updates += not updated
        self._weight += float(output.weight.asnumpy())
        if (self._updates + self._skipped_updates) % self.every:
            return None
        report = self._make(output)
        self._since, self._weight = time.perf_counter(), 0.0
        return report

    def restart(self) -> None:
        """Leave what was until now out of the next rate, for example the time of an evaluation."""
        if self._since is not None:
            self._since, self._weight = time.perf_counter(), 0.0

    def _make(self, output: StepOutput) -> StepReport:
        now, trained = time.perf_counter(), self._trained
        rates = [float(rate) for rate in output.learning_rate.asnumpy().reshape(-1)]
        items: dict[str, Any] = {}
        update = self._update()
        unseen, self._unseen = self._unseen, update - self._updates
        if self._since is not None and unseen == self._unseen:
            unit = "tokens" if trained is not None and trained.counts_tokens else "rows"
            items[f"{unit}_per_second"] = self._weight / max(now - self._since, 1e-9)
        if trained is not None and trained.events.batches:
            items.update(batches=trained.events.batches, micro_batches=trained.events.micro_batches)
        return StepReport(
            update=update,
            updated=output.is_updated,
            skipped_updates=self._skipped_updates,
            overflow=bool(output.overflow.asnumpy()),
            loss=loss_of(output),
            learning_rate=rates[0] if len(rates) == 1 else tuple(rates),
            grad_norm=float(output.grad_norm.asnumpy()),
            clipped_grad_norm=float(output.clipped_grad_norm.asnumpy()),
            loss_scale=float(output.loss_scale.asnumpy()),
            weight=float(output.weight.asnumpy()),
            other_losses=tuple(float(loss.asnumpy()) for loss in output.other_losses) or None,
            **items,
            **self._costs(),
        )

    def _update(self) -> int:
        step = None if self._trained is None else getattr(self._trained.optimizer, "global_step", None)
        return self._updates if step is None else int(step.asnumpy().item())

    def _costs(self) -> dict[str, Any]:
        costs: dict[str, Any] = {}
        if self._weight_norm is not None:
            costs["weight_norm"] = self._weight_norm()
        if self._communication_time is not None and self._trained is not None:
            if self._trained.is_open():
                raise RuntimeError(
                    f"For '{_OWNER}', the time of the messages must be measured between two windows, but the next one "
                    f"has begun. Call report() right after the update."
                )
            costs["communication_seconds"] = self._communication_time.seconds(self._trained.events.window_micro_batches)
        if self._peak_memory:
            costs["peak_memory_bytes"] = peak_memory()
        return costs


def _look_at(train_step: Any, network: nn.Cell | None) -> _Trained:
    if isinstance(train_step, TrainOneStepCell):
        optimizer, loss_cell = inner_optimizer(train_step.optimizer), train_step.network
        return _Trained(
            optimizer,
            train_step.windows[0].reducers,
            loss_cell.weighted,
            train_step.events,
            lambda: train_step.open_batches() > 0,
        )
    if not isinstance(train_step, Accumulator):
        got, remedy = typed(train_step), "Of a Model, give model.train_network."
        raise TypeError(argument_error(_OWNER, "train_step", "a TrainOneStepCell or an Accumulator", got, remedy))
    chosen = train_step.window.chosen(network)
    if len(chosen) > 1:
        remedy = "Build a reporter for each: StepReporter(accumulator, network=loss_cell)."
        raise ValueError(argument_error(_OWNER, "network", f"one of the {len(chosen)} networks", None, remedy))
    trained = chosen[0]
    optimizer = inner_optimizer(trained.optimizers[0])
    return _Trained(optimizer, trained.reducers, trained.network.weighted, train_step.events, lambda: trained.is_open)
