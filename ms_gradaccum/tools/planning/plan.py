"""The plan of a training, computed before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import Parameter

from ms_gradaccum._checks import LastWindow
from ms_gradaccum.gradients.clipping import Clip, check_clip
from ms_gradaccum.parallel.factory import reducer_layout
from ms_gradaccum.parallel.kinds import ParallelChoice, choose_kind
from ms_gradaccum.parallel.layout import Message, Ranks, Traffic
from ms_gradaccum.tools.planning.rates import LearningRate, check_learning_rate, rates_at
from ms_gradaccum.tools.planning.settings import check_dataset_size, check_parameters, check_settings, window_batches
from ms_gradaccum.tools.planning.text import describe
from ms_gradaccum.tools.planning.windows import Windows, plan_epoch

_OWNER = "TrainingPlan"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of a training with :class:`Model` or :class:`TrainOneStepCell`: updates, rows, learning rates, costs.

    The settings are those that the training gets. ``print(plan)`` shows the plan; ``dataclasses.replace(plan,
    learning_rate=...)`` makes another one, for example with the schedule that needed `updates` from the first.
    Updates that are skipped because of a gradient that is not finite are not foreseen; neither is what a
    `reduce_dtype` and ``bad_micro_batch="drop"`` change in the messages.

    Keyword Args:
        dataset_size (Union[int, Sequence[int]]): Rows of the data. Several ranks get `ceil(dataset_size / ranks)` rows
            each, some of them twice, as ``num_shards`` and ``shard_id`` of MindSpore's datasets deal them. Or the
            rows of each rank, one number per rank, if they are dealt in another way.
        batch_size (int): Rows of one batch on one rank, before micro batches are cut.
        epochs (int, optional): Passes over the data. Either this or `steps`. Default: ``None``.
        steps (int, optional): Batches to train on (of each rank), however many passes they are: what MindSpore
            calls steps. The training ends behind them as it does at the end of the data. Default: ``None``.
        ranks (int): Number of processes. Default: ``1``.
        drop_remainder (bool): Whether a short batch at the end of the data is dropped, as in ``Dataset.batch``.
            Default: ``False``.
        micro_size (int): That of :class:`GradAccumulation`: the number of micro batches of one batch. Changes
            neither rows nor updates. Default: ``1``.
        accumulation_steps (int, optional): Number of batches of one update. ``None``: what `global_batch` says, or 1.
            Default: ``None``.
        global_batch (int, optional): Rows of one update on all ranks, in place of `accumulation_steps`.
            Default: ``None``.
        round_global_batch (bool): Whether a `global_batch` that is no multiple of `batch_size * ranks` is rounded
            up to the next one. Default: ``False``.
        last_window (str): That of :class:`Model`: ``"apply"``, ``"drop"`` or ``"carry"``. Default: ``"apply"``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, None]): That of :class:`Model`. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP, Reduced]): That of :class:`Model`. ``"auto"`` is ``DataParallel()`` for
            several ranks. What the compiler sends inside ``AutoParallel`` on Ascend and GPU, or hooks of the network
            with ``Reduced()``, is not foreseen here: :func:`simulate` counts the former.
            Default: ``"auto"``.
        tokens_per_row (Union[int, float], optional): Tokens in a row, or their mean. Default: ``None``.
        learning_rate (Union[float, Sequence, Tensor, LearningRateSchedule, Callable], optional): What the optimizer
            gets: a rate, one per update, or a schedule; or a function of the number of updates before.
            Default: ``None``.
        parameters (Sequence[Parameter], optional): What the optimizer updates: ``network.trainable_params()`` or
            ``optimizer.parameters``. Default: ``None``.
        device_target (str, optional): ``"CPU"``, ``"GPU"`` or ``"Ascend"``, on which the operators of a message
            depend. ``None``: that of the context. Default: ``None``.

    Attributes:
        batches_per_epoch (int): Batches of each rank in a pass; of the one with the most if they differ.
        batches (int): Batches of each rank in all.
        updates (int): Calls of the optimizer: the number of steps to give a schedule.
        updates_per_epoch (int): The largest number of updates in a pass.
        rows_per_update (int): Rows of a whole window on all ranks.
        micro_batches_per_update (int): Micro batches of a whole window on each rank.
        last_window_batches (int): Batches by which a pass is longer than whole windows. 0: none.
        unused_batches (int): Batches that make no update.
        repeated_rows (int): Rows that come twice in a pass, so that all ranks have the same number.
        dropped_rows (int): Rows of a pass that `drop_remainder` drops.
        last_batch_rows (int): Rows of the last batch of a pass, those of all ranks together.
        update_rows (list[int]): Rows of each update, those of all ranks together.
        buffer_bytes (int): Memory of the sums on each rank, with those of its shards. None without
            `parameters`. Unit: bytes.
        traffic (Traffic): The messages per micro batch, per batch and per update. None without `parameters`. Beside
            these, :class:`Model` sends one before each pass and may send those of an update after it.

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
    tokens_per_row: float | None = None
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
        check_settings(_OWNER, self)
        rows, window = check_dataset_size(_OWNER, self), window_batches(_OWNER, self)
        epoch = plan_epoch(rows, self.ranks, self.batch_size, self.drop_remainder)
        per_epoch = len(epoch.batch_rows)
        batches = self.steps or per_epoch * (self.epochs or 0)
        windows = Windows(epoch, batches, window, self.last_window)
        self._set(
            dataset_size=rows,
            accumulation_steps=window,
            update_rows=windows.rows,
            batches_per_epoch=per_epoch,
            batches=batches,
            updates=len(windows.ends),
            updates_per_epoch=windows.most_per_epoch,
            rows_per_update=window * self.batch_size * self.ranks,
            micro_batches_per_update=window * min(self.micro_size, self.batch_size),
            last_window_batches=per_epoch % window,
            unused_batches=batches - windows.batches,
            repeated_rows=epoch.repeated_rows,
            dropped_rows=epoch.dropped_rows,
            last_batch_rows=int(epoch.batch_rows[-1]),
        )
        if self.learning_rate is not None:
            self._set(learning_rate=check_learning_rate(_OWNER, self.learning_rate, self.updates))
        if self.parameters is not None:
            self._add_costs()

    def _add_costs(self) -> None:
        weights = check_parameters(_OWNER, self.parameters)
        kind = choose_kind(_OWNER, self.parallel, self.ranks)
        device = self.device_target or ms.get_context("device_target")
        layout = reducer_layout(kind, weights, Ranks(self.ranks, self.ranks, device))
        traffic = layout.messages(check_clip(_OWNER, self.clip).norm_passes)
        self._set(parameters=weights, buffer_bytes=layout.sum_bytes, traffic=traffic)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # The class is frozen.

    @property
    def update_tokens(self) -> list[float] | None:
        """Tokens of each update, those of all ranks together. None without `tokens_per_row`."""
        return None if self.tokens_per_row is None else [rows * self.tokens_per_row for rows in self.update_rows]

    @cached_property
    def learning_rates(self) -> list[float] | None:
        """The learning rate of each update. None without `learning_rate`."""
        return None if self.learning_rate is None else rates_at(_OWNER, self.learning_rate, range(self.updates))

    @property
    def window_messages(self) -> tuple[Message, ...] | None:
        """The messages that each rank sends in a whole window. None without `parameters`."""
        if self.traffic is None or self.accumulation_steps is None:
            return None
        return self.traffic.of_window(self.accumulation_steps, self.micro_batches_per_update)

    @property
    def collectives_per_window(self) -> int | None:
        """Number of messages of a whole window. None without `parameters`."""
        return None if self.window_messages is None else len(self.window_messages)

    @property
    def bytes_per_window(self) -> int | None:
        """The bytes that a rank passes to collective operators in a whole window. None without `parameters`."""
        return None if self.window_messages is None else sum(message.nbytes for message in self.window_messages)

    def __str__(self) -> str:
        return describe(self)
