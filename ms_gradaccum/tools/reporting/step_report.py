"""The report of an update in plain numbers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import ParameterTuple, Tensor, nn

from ms_gradaccum._checks import FrozenAfterInit, check_bool, check_int, typed
from ms_gradaccum.backend.compiled import NOTHING, Compiled
from ms_gradaccum.backend.optimizers import updates_of
from ms_gradaccum.backend.tensors import chunks_of
from ms_gradaccum.gradients.clipping import global_norm
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.network_trainer import only_of
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.reducer import GradientReducer, replicas_of
from ms_gradaccum.training.step import Step
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window import Window


@dataclass(frozen=True)
class StepReport:
    """Report on one window, made by a :class:`StepReporter`. Items that were not requested or are unknown are None.

    docs/observing.md lists the items. `update` is the optimizer's `global_step`; for optimizers without one, the
    reporter counts. The first report has no rate, because it includes compiling. Nor has a report after updates that
    the reporter did not see (in data sink mode it sees only the last update of a sink).
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
    loss_names: tuple[str, ...] = ()
    batches: int | None = None
    micro_batches: int | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    weight_norm: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Return the known items as single numbers, by name; of several learning rates the smallest and the largest."""
        items = dict(vars(self))
        others = items.pop("other_losses") or ()
        names = items.pop("loss_names") or range(1, len(others) + 1)
        for name, loss in zip(names, others):
            items[f"other_loss_{name}"] = loss
        rates = items["learning_rate"]
        if isinstance(rates, tuple):
            items |= {
                "learning_rate": None,
                "learning_rate_min": min(rates),
                "learning_rate_max": max(rates),
            }
        numbers = {}
        for name, value in items.items():
            if value is not None:
                numbers[name] = value if isinstance(value, float) else int(value)
        return numbers


class StepReporter(FrozenAfterInit):
    """Make a :class:`StepReport` of each update. The device is read only at the end of a window.

    Args:
        train_step (Union[TrainOneStepCell, Accumulator], optional): The training step. Without it a report has only
            the items of the output. Default: ``None``.

    Keyword Args:
        every (int): Number of windows for one report, whose rate covers all of them. Default: ``1``.
        weight_norm (bool): Whether to compute the norm of the weights in a pass over them. Default: ``False``.
        network (Cell, optional): The network to report on if an Accumulator has several. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `every` is less than 1, or `network` is missing for an Accumulator of several.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import StepReporter, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.5)
        >>> train_step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        >>> reporter = StepReporter(train_step, weight_norm=True)
        >>> report = reporter.report(train_step(ops.ones((4, 1)), ops.ones((4, 1))))
        >>> print(report.update, report.loss, report.grad_norm, report.weight, report.weight_norm)
        1 1.0 2.0 4.0 1.0
    """

    # Class name used in error messages.
    _owner = "StepReporter"

    def __init__(
        self,
        train_step: TrainOneStepCell | Accumulator | None = None,
        *,
        every: int = 1,
        weight_norm: bool = False,
        network: nn.Cell | None = None,
    ) -> None:
        self.every = check_int(self._owner, "every", every, "1 means a report for each window.")
        self._has_norm = check_bool(
            self._owner, "weight_norm", weight_norm, "The default is False."
        )
        self._watch(train_step, network)
        self._is_built = True

    def _watch(
        self, train_step: TrainOneStepCell | Accumulator | None, network: nn.Cell | None = None
    ) -> None:
        """Report on this training step from now on; without one, only on outputs."""
        self._window: Window | Step | None = None
        if isinstance(train_step, TrainOneStepCell):
            self._window = train_step.windows[0]
        elif isinstance(train_step, Accumulator):
            remedy = "Build a reporter for each: StepReporter(accumulator, network=loss_cell)."
            self._window = only_of(train_step.windows, network, self._owner, remedy)
        elif train_step is not None:
            raise TypeError(
                f"For '{self._owner}', the argument 'train_step' must be a TrainOneStepCell or an "
                f"Accumulator, but got {typed(train_step)}. For a Model, give model.train_network."
            )
        self._train_step = train_step
        self._weight_norm: Compiled | None = None
        # A step that the compiler partitions has no reducers.
        if self._has_norm and self._window is not None and self._window.reducers:
            reducers = self._window.reducers
            self._weight_norm = Compiled(
                lambda: _WeightNorm(reducers), self._owner, "the norm of the weights"
            )
        self._updates = 0
        self._skipped_updates = 0
        # The time and the weight since the last report, and the number of updates that this reporter did not see.
        self._since: float | None = None
        self._weight = 0.0
        self._unseen = 0

    def report(self, output: StepOutput | None) -> StepReport | None:
        """Return the report of a window; None inside a window, and for windows that `every` leaves out.

        Args:
            output (StepOutput, optional): The result of the training step or of ``Accumulator.step``.

        Raises:
            TypeError: If `output` is something else.
        """
        if output is not None and not isinstance(output, StepOutput):
            raise TypeError(
                f"For '{self._owner}', the argument 'output' must be a StepOutput or None, but got "
                f"{type(output).__name__}. With several networks, give the output of one of them."
            )
        if output is None or not output.ends_window:
            return None
        self._updates += output.is_updated
        self._skipped_updates += not output.is_updated
        self._weight += float(output.weight)
        if (self._updates + self._skipped_updates) % self.every:
            return None
        now = time.perf_counter()
        update = self._number_of_update()
        items: dict[str, Any] = {name: _plain(value) for name, value in output._asdict().items()}
        unseen = update - self._updates
        if self._since is not None and unseen == self._unseen:
            counts_tokens = self._window is not None and self._window.network.weighted
            unit = "tokens" if counts_tokens else "rows"
            items[f"{unit}_per_second"] = self._weight / max(now - self._since, 1e-9)
        self._unseen = unseen
        if self._train_step is not None and self._train_step.events.batches:
            items["batches"] = self._train_step.events.batches
            items["micro_batches"] = self._train_step.events.micro_batches or None
        if self._weight_norm is not None:
            items["weight_norm"] = _plain(self._weight_norm(NOTHING))
        items["other_losses"] = tuple(map(float, output.other_losses)) or None
        if self._window is not None:
            items["loss_names"] = self._window.network.weighted_loss.names
        self._since = now
        self.restart()
        return StepReport(update=update, skipped_updates=self._skipped_updates, **items)

    def _number_of_update(self) -> int:
        """Return the optimizer's number of updates, or the number that the step or this reporter has counted."""
        # A user's optimizer may leave its count at 0.
        count = None if self._window is None else updates_of(self._window.optimizers[0])
        if count:
            return count
        # The events of several networks are counted together.
        if self._train_step is not None and len(self._train_step.windows) == 1:
            return self._train_step.events.updates
        return self._updates

    def restart(self) -> None:
        """Exclude the time until now from the next rate, for example an evaluation."""
        if self._since is not None:
            self._since = time.perf_counter()
            self._weight = 0.0


class _WeightNorm(nn.Cell):
    """The L2 norm of all trained parameters as one vector. They are whole on each rank."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(replicas_of(reducers))
        self.chunks = chunks_of([parameter.size for parameter in self.parameters])

    def construct(self, nothing: Tensor) -> Tensor:
        return global_norm(tuple(self.parameters), self.chunks) + nothing


def _plain(tensor: Tensor | None) -> float | tuple[float, ...] | None:
    """Return a tensor of one element as a number, other tensors as a tuple."""
    if tensor is None:
        return None
    values = tuple(tensor.asnumpy().reshape(-1).tolist())
    return values[0] if len(values) == 1 else values
