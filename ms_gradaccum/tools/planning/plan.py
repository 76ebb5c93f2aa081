"""Plan of a training, computed before it runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ms_gradaccum import _checks as check
from ms_gradaccum._checks import LastWindow, argument_error, typed
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.gradients.clipping import Clip, check_clip
from ms_gradaccum.parallel.factory import reducer_layout
from ms_gradaccum.parallel.kinds import ParallelChoice, choose_kind
from ms_gradaccum.parallel.layout import Message, Ranks, Traffic
from ms_gradaccum.tools.planning.text import describe

_OWNER = "TrainingPlan"
LearningRate: TypeAlias = float | Sequence[float] | Tensor | LearningRateSchedule | Callable[[int], float]
# The limits of a plan, which counts batch by batch.
_MOST_BATCHES, _MOST_ROWS = 10**8, 10**15
_MOST = {"ranks": 10**6, "global_batch": _MOST_ROWS}
_COUNTS = {
    "batch_size": "It counts the rows of one batch on one rank.",
    "ranks": "It counts the processes; 1 is a single one.",
    "micro_size": "It counts the micro batches of one batch; 1 means no split.",
    "global_batch": "It counts the rows of one update on all ranks together.",
    "epochs": "It counts the passes over the data.",
    "steps": "It counts the batches to train on.",
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of a training with :class:`Model` or :class:`TrainOneStepCell`: updates, rows, learning rates, costs.

    ``print(plan)`` shows it; ``dataclasses.replace(plan, learning_rate=...)`` makes another one, for example with the
    schedule that needed `updates` from the first. Skipped updates (gradients with an Inf or NaN) are not counted, nor
    what `reduce_dtype`, ``bad_micro_batch="drop"``, hooks of the network and the compiler change in the messages.

    Keyword Args:
        dataset_size (Union[int, Sequence[int]]): Rows of the data, of which each rank gets `ceil(dataset_size / ranks)`
            as with ``num_shards`` and ``shard_id`` of MindSpore's datasets; or the rows of each rank.
        batch_size (int): Rows of one batch on one rank, before micro batches are cut.
        epochs, steps (int, optional): Passes over the data, or batches of each rank. Give one of them.
        ranks (int): Number of processes. Default: ``1``.
        drop_remainder (bool): True drops a short batch at the end of the data, as in ``Dataset.batch``.
            Default: ``False``.
        accumulation_steps (int, optional): Batches of one update. Default: computed from `global_batch`, or 1.
        global_batch (int, optional): Rows of one update on all ranks, instead of `accumulation_steps`.
            Default: ``None``.
        round_global_batch (bool): True rounds `global_batch` up to a multiple of `batch_size * ranks`.
            Default: ``False``.
        micro_size, last_window, clip, parallel (optional): As in :class:`GradAccumulation` and :class:`Model`.
            ``parallel="auto"`` is ``DataParallel()`` for several ranks.
        learning_rate (Union[float, Sequence, Tensor, LearningRateSchedule, Callable], optional): The optimizer's
            argument, or a function of the number of earlier updates. Default: ``None``.
        parameters (Sequence[Parameter], optional): The trained parameters, for the costs. Default: ``None``.
        device_target (str, optional): ``"CPU"``, ``"GPU"`` or ``"Ascend"``, which selects the operators of a
            message. Default: that of the context.

    Attributes:
        batches_per_epoch, batches (int): Batches of each rank in a pass (if ranks differ, the most), and in all.
        updates (int): Calls of the optimizer: the number of steps to give a schedule.
        updates_per_epoch (int): The largest number of updates in a pass.
        rows_per_update, micro_batches_per_update (int): Rows of a whole window on all ranks; micro batches on each.
        last_window_batches (int): Batches of a pass that are left after its whole windows.
        unused_batches (int): Batches that are part of no update.
        repeated_rows (int): Rows that are used twice in a pass so that all ranks have the same number.
        dropped_rows (int): Rows of a pass that `drop_remainder` drops.
        last_batch_rows (int): Rows of the last batch of a pass, over all ranks.
        update_rows (list[int]): Rows of each update, over all ranks.
        buffer_bytes (int): Memory of the sums on each rank in bytes. None without `parameters`.
        traffic (Traffic): The messages per micro batch, per batch and per update. None without `parameters`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, `global_batch` cannot be reached, a rank has no batch, or
            `learning_rate` has fewer entries than there are updates.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from ms_gradaccum import TrainingPlan
        >>> plan = TrainingPlan(dataset_size=60000, batch_size=8, ranks=4, global_batch=256, epochs=3)
        >>> print(plan.accumulation_steps, plan.updates, plan.updates_per_epoch)
        8 705 235
        >>> schedule = nn.CosineDecayLR(0.0, 0.1, plan.updates)
    """

    dataset_size: int | Sequence[int]
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    ranks: int = 1
    drop_remainder: bool = False
    micro_size: int = 1
    accumulation_steps: int | None = None
    global_batch: int | None = None
    round_global_batch: bool = False
    last_window: LastWindow = "apply"
    clip: Clip = None
    parallel: ParallelChoice = "auto"
    learning_rate: LearningRate | None = field(default=None, repr=False, compare=False)
    parameters: Sequence[Parameter] | None = field(default=None, repr=False)
    device_target: str | None = None

    batches_per_epoch: int = field(init=False)
    batches: int = field(init=False)
    updates: int = field(init=False)
    updates_per_epoch: int = field(init=False)
    rows_per_update: int = field(init=False)
    micro_batches_per_update: int = field(init=False)
    last_window_batches: int = field(init=False)
    unused_batches: int = field(init=False)
    repeated_rows: int = field(init=False)
    dropped_rows: int = field(init=False)
    last_batch_rows: int = field(init=False)
    update_rows: list[int] = field(init=False, repr=False, compare=False)
    buffer_bytes: int | None = field(init=False, default=None)
    traffic: Traffic | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        _check_settings(self)
        norm_passes = check_clip(_OWNER, self.clip).norm_passes
        kind = choose_kind(_OWNER, self.parallel, self.ranks)
        target = ms.get_context("device_target") if self.device_target is None else self.device_target
        check.check_choice(_OWNER, "device_target", target, ("CPU", "GPU", "Ascend"), "None is that of the context.")
        rank_rows, window = _check_dataset_size(self), _window_batches(self)
        kept = [each - each % self.batch_size if self.drop_remainder else each for each in rank_rows]
        batch_rows = _rows_of_batches(kept, self.batch_size)
        per_epoch = len(batch_rows)
        batches = self.steps or per_epoch * (self.epochs or 0)
        begins, ends = _updates_of(batches, per_epoch, window, self.last_window)
        before = np.concatenate([[0], np.cumsum(batch_rows)])
        first, behind = (each // per_epoch * before[-1] + before[each % per_epoch] for each in (begins, ends))
        given = self.dataset_size if isinstance(self.dataset_size, int) else tuple(self.dataset_size)
        # The class is frozen.
        vars(self).update(
            dataset_size=given,
            accumulation_steps=window,
            update_rows=(behind - first).tolist(),
            batches_per_epoch=per_epoch,
            batches=batches,
            updates=len(ends),
            updates_per_epoch=int(np.bincount((ends - 1) // per_epoch).max(initial=0)),
            rows_per_update=window * self.batch_size * self.ranks,
            micro_batches_per_update=window * min(self.micro_size, self.batch_size),
            last_window_batches=per_epoch % window,
            unused_batches=batches - int((ends - begins).sum()),
            repeated_rows=sum(rank_rows) - (given if isinstance(given, int) else sum(given)),
            dropped_rows=sum(rank_rows) - sum(kept),
            last_batch_rows=int(batch_rows[-1]),
            learning_rate=_check_learning_rate(self.learning_rate, len(ends)),
        )
        if self.parameters is not None:
            shapes = _shapes_of(self.parameters)
            layout = reducer_layout(kind, shapes, Ranks(self.ranks, self.ranks, target))
            vars(self).update(parameters=shapes, buffer_bytes=layout.sum_bytes, traffic=layout.messages(norm_passes))

    @cached_property
    def learning_rates(self) -> list[float] | None:
        """The learning rate of each update. None without `learning_rate`."""
        return None if self.learning_rate is None else self.rates_at(range(self.updates))

    def rates_at(self, updates: Iterable[int]) -> list[float]:
        """Return the learning rates of these updates, counted from 0."""
        given: Any = self.learning_rate
        if isinstance(given, LearningRateSchedule):
            # An optimizer calls it with the number of earlier updates in a tensor of shape (1,).
            schedule = Compiled(lambda: given, _OWNER, "the learning rate")
            return [float(schedule(Tensor([update], ms.int32)).asnumpy().item()) for update in updates]
        if callable(given):
            return [_rate(f"learning_rate({update})", given(update)) for update in updates]
        return [given[update] if isinstance(given, tuple) else given for update in updates]

    @property
    def window_messages(self) -> tuple[Message, ...] | None:
        """The messages that each rank sends in a whole window. None without `parameters`."""
        if self.traffic is None or self.accumulation_steps is None:
            return None
        return self.traffic.of_window(self.accumulation_steps, self.micro_batches_per_update)

    def __str__(self) -> str:
        return describe(self)


class _Shape(NamedTuple):
    """Shape of a parameter and bytes of one element. A plan does not keep the parameters alive."""

    shape: tuple[int, ...]
    itemsize: int


def _shapes_of(parameters: Any) -> tuple[_Shape, ...]:
    is_list = isinstance(parameters, (list, tuple))
    if not is_list or not all(isinstance(each, (Parameter, _Shape)) for each in parameters):
        rule, got = "a list of parameters", type(parameters).__name__
        raise TypeError(argument_error(_OWNER, "parameters", rule, got, "Give network.trainable_params()."))
    return tuple(_Shape(tuple(each.shape), each.itemsize) for each in parameters)


def _rows_of_batches(rank_rows: Sequence[int], batch_size: int) -> Any:
    """Return the rows of each batch of an epoch, over all ranks. A rank without data adds none."""
    begins = np.arange(0, max(rank_rows), batch_size)
    return sum(np.clip(rows - begins, 0, batch_size) * count for rows, count in Counter(rank_rows).items())


def _updates_of(batches: int, per_epoch: int, window: int, last_window: str) -> Any:
    """Return the number of the first batch of each update and that of the batch after its last one, in two rows."""
    # With "carry", all epochs count as one.
    length = batches if last_window == "carry" else per_epoch
    starts = np.arange(0, batches, length)
    begins = (starts[:, None] + np.arange(0, length, window)).ravel()
    ends = np.minimum(begins + window, np.repeat(starts + length, len(begins) // len(starts)).clip(max=batches))
    # Windows behind the last batch are empty; an incomplete window is an update if it is applied.
    kept = ends - begins >= (1 if last_window == "apply" else window)
    return np.stack([begins[kept], ends[kept]])


def _check_settings(plan: Any) -> None:
    for name, remedy in _COUNTS.items():
        value = getattr(plan, name)
        if value is not None or name in ("batch_size", "ranks", "micro_size"):
            check.check_positive_int(_OWNER, name, value, remedy, _MOST.get(name, check.MAX_INT))
    if (plan.epochs is None) == (plan.steps is None):
        got = "neither" if plan.epochs is None else f"epochs={plan.epochs} and steps={plan.steps}"
        raise ValueError(
            f"For '{_OWNER}', either epochs or steps must be given, but got {got}. Say how long it trains."
        )
    check.check_bool(_OWNER, "drop_remainder", plan.drop_remainder, "It is the argument of Dataset.batch().")
    check.check_bool(_OWNER, "round_global_batch", plan.round_global_batch, "True rounds up.")
    check.check_last_window(_OWNER, plan.last_window)


def _check_dataset_size(plan: Any) -> list[int]:
    """Return the rows of each rank."""
    remedy = "It counts the rows of the data; give one number per rank if they are distributed unevenly."
    given, ranks, batch_size = plan.dataset_size, plan.ranks, plan.batch_size
    is_uneven = isinstance(given, Sequence) and not isinstance(given, str)
    for each in given if is_uneven else [given]:
        check.check_positive_int(_OWNER, "dataset_size", each, remedy, _MOST_ROWS)
    if is_uneven and len(given) != ranks:
        rule = f"one number, or one for each of the {ranks} ranks"
        raise ValueError(argument_error(_OWNER, "dataset_size", rule, f"{len(given)} numbers", "Give ranks, too."))
    # A dataset gives all ranks the same number of rows and repeats the first rows at the end if necessary.
    rank_rows = list(given) if is_uneven else [-(-given // ranks)] * ranks
    per_epoch = -(-max(rank_rows) // batch_size)
    batches = max(per_epoch, plan.steps or per_epoch * plan.epochs)
    if batches > _MOST_BATCHES:
        rule, remedy = f"at most {_MOST_BATCHES} batches on each rank", "Plan fewer epochs, or larger batches."
        raise ValueError(f"For '{_OWNER}', a training must have {rule}, but got {batches}. {remedy}")
    if plan.drop_remainder and min(rank_rows) < batch_size:
        rule, got = f"at least one batch of {batch_size} rows on each rank", f"{min(rank_rows)} rows on one of them"
        remedy = "Use drop_remainder=False or smaller batches."
        raise ValueError(argument_error(_OWNER, "dataset_size", rule, got, remedy))
    return rank_rows


def _window_batches(plan: Any) -> int:
    """Return the number of batches of a window."""
    given, wanted, rows = plan.accumulation_steps, plan.global_batch, plan.batch_size * plan.ranks
    if given is not None:
        check.check_accumulation_steps(_OWNER, given)
    if wanted is None:
        return given or 1
    steps: int = -(-wanted // rows)
    if wanted % rows and not plan.round_global_batch:
        nearest = " or ".join(f"{rows * count} (accumulation_steps={count})" for count in (steps - 1, steps) if count)
        rule, remedy = f"a multiple of batch_size * ranks = {rows}", "round_global_batch=True rounds up."
        raise ValueError(argument_error(_OWNER, "global_batch", rule, wanted, f"Use {nearest}; {remedy}"))
    if given not in (None, steps):
        rule = f"{steps} for a global_batch of {wanted}"
        raise ValueError(argument_error(_OWNER, "accumulation_steps", rule, given, "Give one of the two."))
    return steps


def _check_learning_rate(value: Any, updates: int) -> Any:
    """Return a learning rate, several ones as a tuple of floats."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = np.asarray(value.asnumpy() if isinstance(value, Tensor) else value).tolist()
    is_function = callable(value) and (isinstance(value, LearningRateSchedule) or not isinstance(value, nn.Cell))
    if value is None or is_function:
        return value
    rates = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in rates):
        rule = "a number, a list of numbers, a LearningRateSchedule or a function of the update's number"
        raise TypeError(argument_error(_OWNER, "learning_rate", rule, typed(value), "Give that of the optimizer."))
    if rates is not value:
        return _rate("learning_rate", value)
    if len(rates) < updates:
        rule, remedy = f"as long as the {updates} updates", "An optimizer takes one entry per update, not per batch."
        raise ValueError(argument_error(_OWNER, "learning_rate", rule, f"{len(rates)} rates", remedy))
    return tuple(_rate(f"learning_rate[{i}]", rate) for i, rate in enumerate(rates))


def _rate(name: str, rate: Any) -> float:
    return check.check_number(_OWNER, name, rate, "It is the rate of an update.")
