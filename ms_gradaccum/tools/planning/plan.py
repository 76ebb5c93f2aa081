"""The plan of a training, computed before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter

from ms_gradaccum._checks import LastWindow
from ms_gradaccum.gradients.clipping import Clip, check_clip
from ms_gradaccum.parallel.factory import reducer_layout
from ms_gradaccum.parallel.kinds import ParallelChoice, choose_kind
from ms_gradaccum.parallel.layout import Message, Ranks, Traffic
from ms_gradaccum.tools.planning.rates import LearningRate, check_learning_rate, rates_at
from ms_gradaccum.tools.planning.settings import check_dataset_size, check_parameters, check_settings, window_batches
from ms_gradaccum.tools.planning.text import describe
from ms_gradaccum.tools.planning.windows import rows_before, rows_of_batches, share_rows, updates_of

_OWNER = "TrainingPlan"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of a training with :class:`Model` or :class:`TrainOneStepCell`: updates, rows, learning rates, costs.

    Give it the settings of the training. ``print(plan)`` shows the plan; ``dataclasses.replace(plan,
    learning_rate=...)`` makes another one, for example with the schedule that needed `updates` from the first.
    The plan counts no skipped updates (gradients with an Inf or NaN), and ignores what `reduce_dtype` and
    ``bad_micro_batch="drop"`` change in the messages.

    Keyword Args:
        dataset_size (Union[int, Sequence[int]]): Rows of the data. Each rank gets `ceil(dataset_size / ranks)` rows,
            some of them twice, as with ``num_shards`` and ``shard_id`` of MindSpore's datasets. If the data is
            distributed differently, give the rows of each rank, one number per rank.
        batch_size (int): Rows of one batch on one rank, before micro batches are cut.
        epochs (int, optional): Passes over the data. Give either this or `steps`. Default: ``None``.
        steps (int, optional): Batches that each rank trains on, over any number of passes (MindSpore's steps). The
            training ends after them as at the end of the data. Default: ``None``.
        ranks (int): Number of processes. Default: ``1``.
        drop_remainder (bool): True drops a short batch at the end of the data, as in ``Dataset.batch``.
            Default: ``False``.
        micro_size (int): Number of micro batches of one batch, as in :class:`GradAccumulation`. It changes
            neither rows nor updates. Default: ``1``.
        accumulation_steps (int, optional): Batches of one update. ``None``: computed from `global_batch`, or 1.
            Default: ``None``.
        global_batch (int, optional): Rows of one update on all ranks, instead of `accumulation_steps`.
            Default: ``None``.
        round_global_batch (bool): True rounds `global_batch` up to a multiple of `batch_size * ranks`.
            Default: ``False``.
        last_window (str): As in :class:`Model`: ``"apply"``, ``"drop"`` or ``"carry"``. Default: ``"apply"``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, None]): As in :class:`Model`. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP, Reduced]): As in :class:`Model`. ``"auto"`` is ``DataParallel()`` for
            several ranks. The plan does not count what hooks of the network send with ``Reduced()``, nor what the
            compiler sends inside ``AutoParallel`` on Ascend and GPU, which :func:`simulate` counts.
            Default: ``"auto"``.
        tokens_per_row (Union[int, float], optional): Tokens per row, or the mean. Default: ``None``.
        learning_rate (Union[float, Sequence, Tensor, LearningRateSchedule, Callable], optional): The optimizer's
            argument: a rate, one per update, or a schedule; or a function of the number of earlier updates.
            Default: ``None``.
        parameters (Sequence[Parameter], optional): The trained parameters: ``network.trainable_params()`` or
            ``optimizer.parameters``. Default: ``None``.
        device_target (str, optional): ``"CPU"``, ``"GPU"`` or ``"Ascend"``, which selects the operators of a
            message. ``None``: that of the context. Default: ``None``.

    Attributes:
        batches_per_epoch (int): Batches of each rank in a pass; if ranks differ, the most of them.
        batches (int): Batches of each rank in all.
        updates (int): Calls of the optimizer: the number of steps to give a schedule.
        updates_per_epoch (int): The largest number of updates in a pass.
        rows_per_update (int): Rows of a whole window on all ranks.
        micro_batches_per_update (int): Micro batches of a whole window on each rank.
        last_window_batches (int): Batches of a pass that are left after its whole windows.
        unused_batches (int): Batches that are part of no update.
        repeated_rows (int): Rows that are used twice in a pass so that all ranks have the same number.
        dropped_rows (int): Rows of a pass that `drop_remainder` drops.
        last_batch_rows (int): Rows of the last batch of a pass, over all ranks.
        update_rows (list[int]): Rows of each update, over all ranks.
        buffer_bytes (int): Memory of the sums on each rank, its shards included. None without
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
        rank_rows = share_rows(rows, self.ranks)
        batch_rows = rows_of_batches(rank_rows, self.batch_size, self.drop_remainder)
        per_epoch = len(batch_rows)
        batches = self.steps or per_epoch * (self.epochs or 0)
        begins, ends = updates_of(batches, per_epoch, window, self.last_window)
        self._set(
            dataset_size=rows,
            accumulation_steps=window,
            update_rows=(rows_before(batch_rows, ends) - rows_before(batch_rows, begins)).tolist(),
            batches_per_epoch=per_epoch,
            batches=batches,
            updates=len(ends),
            updates_per_epoch=int(np.bincount((ends - 1) // per_epoch).max(initial=0)),
            rows_per_update=window * self.batch_size * self.ranks,
            micro_batches_per_update=window * min(self.micro_size, self.batch_size),
            last_window_batches=per_epoch % window,
            unused_batches=batches - int((ends - begins).sum()),
            repeated_rows=sum(rank_rows) - (rows if isinstance(rows, int) else sum(rows)),
            dropped_rows=sum(rank_rows) - int(batch_rows.sum()),
            last_batch_rows=int(batch_rows[-1]),
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
        """Tokens of each update, over all ranks. None without `tokens_per_row`."""
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
