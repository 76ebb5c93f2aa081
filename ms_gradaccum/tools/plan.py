"""Plan of a training, computed before it runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ms_gradaccum import _checks as check
from ms_gradaccum._checks import counted
from ms_gradaccum.backend.tensors import Array
from ms_gradaccum.loops.epoch import LastWindow, check_last_window
from ms_gradaccum.tools.text import aligned

_OWNER = "TrainingPlan"
_MOST_BATCHES = 10**8  # A plan counts them one by one.
_MOST_ROWS = 10**15
# What each setting counts, and its limit.
_COUNTS = {
    "dataset_size": ("It counts the rows of the data.", _MOST_ROWS),
    "batch_size": ("It counts the rows of one batch on one rank.", check.MAX_INT),
    "ranks": ("It counts the processes; 1 is a single one.", 10**6),
    "micro_size": ("It counts the micro batches of one batch; 1 means no split.", check.MAX_INT),
    "accumulation_steps": ("It counts the batches of one update; 1 means an update per batch.", check.MAX_INT),
    "global_batch": ("It counts the rows of one update on all ranks together.", _MOST_ROWS),
    "epochs": ("It counts the passes over the data.", check.MAX_INT),
    "steps": ("It counts the batches to train on.", check.MAX_INT),
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of a training with :class:`Model` or :class:`TrainOneStepCell`: updates and their rows.

    ``print(plan)`` shows it. It ignores skipped updates (gradients with an Inf or NaN).

    Keyword Args:
        dataset_size (int): Rows of the data. Each rank gets `ceil(dataset_size / ranks)`, as with ``num_shards`` and
            ``shard_id`` of MindSpore's datasets.
        batch_size (int): Rows of one batch on one rank, before micro batches are cut.
        epochs, steps (int, optional): Passes over the data, or batches of each rank. Give one of them.
        ranks (int): Number of processes. Default: ``1``.
        drop_remainder (bool): True drops a short batch at the end of the data, as in ``Dataset.batch``.
            Default: ``False``.
        accumulation_steps (int, optional): Batches of one update. Default: computed from `global_batch`, or 1.
        global_batch (int, optional): Rows of one update on all ranks, instead of `accumulation_steps`.
        micro_size, last_window (optional): As in :class:`GradAccumulation` and :class:`Model`.

    Attributes:
        batches_per_epoch (int): Batches of each rank in a pass.
        batches (int): Batches of each rank in all.
        updates (int): Calls of the optimizer: the number of steps for a schedule.
        updates_per_epoch (int): The largest number of updates in a pass.
        rows_per_update (int): Rows of a whole window on all ranks.
        micro_batches_per_update (int): Micro batches of a whole window on each rank.
        unused_batches (int): Batches that are part of no update.
        dropped_rows (int): Rows of a pass that `drop_remainder` drops.
        update_rows (list[int]): Rows of each update, over all ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, `global_batch` cannot be reached, or a rank has no batch.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from ms_gradaccum import TrainingPlan
        >>> plan = TrainingPlan(dataset_size=60000, batch_size=8, ranks=4, global_batch=256, epochs=3)
        >>> print(plan.accumulation_steps, plan.updates, plan.updates_per_epoch)
        8 705 235
        >>> schedule = nn.CosineDecayLR(0.0, 0.1, plan.updates)
    """

    dataset_size: int
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    ranks: int = 1
    drop_remainder: bool = False
    micro_size: int = 1
    accumulation_steps: int | None = None
    global_batch: int | None = None
    last_window: LastWindow = "apply"

    batches_per_epoch: int = field(init=False)
    batches: int = field(init=False)
    updates: int = field(init=False)
    updates_per_epoch: int = field(init=False)
    rows_per_update: int = field(init=False)
    micro_batches_per_update: int = field(init=False)
    unused_batches: int = field(init=False)
    dropped_rows: int = field(init=False)
    update_rows: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_settings(self)
        window = _window_batches(self)
        # A dataset repeats its first rows at the end if its rows are not divisible by the ranks.
        rows = -(-self.dataset_size // self.ranks)
        dropped = rows % self.batch_size if self.drop_remainder else 0
        used = rows - dropped
        if used == 0:
            raise ValueError(
                f"For '{_OWNER}', the argument 'dataset_size' must be at least one batch of {self.batch_size} rows on "
                f"each rank, but got {rows} rows on each. Use drop_remainder=False."
            )
        per_epoch = -(-used // self.batch_size)
        batches = self.steps or per_epoch * (self.epochs or 0)
        most = max(per_epoch, batches)
        if most > _MOST_BATCHES:
            raise ValueError(
                f"For '{_OWNER}', a training must have at most {_MOST_BATCHES} batches on each rank, but got {most}. "
                f"Plan fewer epochs, or larger batches."
            )
        first, end = _updates_of(batches, per_epoch, window, self.last_window)

        def rows_before(batch: Array) -> Array:
            return batch // per_epoch * used + batch % per_epoch * self.batch_size

        # The class is frozen.
        vars(self).update(
            accumulation_steps=window,
            update_rows=(self.ranks * (rows_before(end) - rows_before(first))).tolist(),
            batches_per_epoch=per_epoch,
            batches=batches,
            updates=len(end),
            updates_per_epoch=int(np.bincount((end - 1) // per_epoch).max(initial=0)),
            rows_per_update=window * self.batch_size * self.ranks,
            micro_batches_per_update=window * min(self.micro_size, self.batch_size),
            unused_batches=batches - int((end - first).sum()),
            dropped_rows=self.ranks * dropped,
        )

    def __str__(self) -> str:
        window = counted(self.accumulation_steps or 1, "batch")
        micro_batches = counted(self.micro_batches_per_update, "micro batch")
        epochs = f"{self.batches / self.batches_per_epoch:.4g}"
        updates = "none: no window is ever whole"
        if self.updates:
            sizes = " to ".join(map(str, sorted({min(self.update_rows), max(self.update_rows)})))
            updates = f"{self.updates}: {self.updates_per_epoch} per epoch, of {sizes} rows"
        per_epoch = counted(self.batches_per_epoch, "batch")
        batches = counted(self.batches, "batch")
        lines = [
            ("data", f"{self.dataset_size} rows for {counted(self.ranks, 'rank')} in batches of {self.batch_size}"),
            ("epochs", f"{epochs} of {per_epoch} on each rank: {batches}"),
            ("window", f"{window}, {micro_batches} on each rank: {self.rows_per_update} rows"),
            ("updates", updates),
            ("left over", "; ".join(self._left_over()) or "nothing"),
        ]
        return "\n".join(aligned(lines))

    def _left_over(self) -> Iterator[str]:
        if self.dropped_rows:
            yield f"{counted(self.dropped_rows, 'row')} of an epoch dropped with its last batch"
        rest = self.batches_per_epoch % (self.accumulation_steps or 1)
        if rest:
            fate = {"apply": "one more update", "drop": "dropped", "carry": "to the next epoch"}[self.last_window]
            yield f"an epoch has {counted(rest, 'batch')} more than whole windows: {fate}"
        if self.unused_batches:
            yield f"{counted(self.unused_batches, 'batch')} in no update"


def _updates_of(batches: int, per_epoch: int, window: int, last_window: str) -> tuple[Array, Array]:
    """Return, per update, the numbers of its first batch and of the batch after its last one."""
    # With "carry", all epochs count as one.
    length = batches if last_window == "carry" else per_epoch
    starts = np.arange(0, batches, length)
    first = (starts[:, None] + np.arange(0, length, window)).ravel()
    ends_of_passes = np.repeat(starts + length, len(first) // len(starts)).clip(max=batches)
    end = np.minimum(first + window, ends_of_passes)
    # Windows after the last batch are empty. An incomplete window makes an update if it is applied.
    least = 1 if last_window == "apply" else window
    is_update = end - first >= least
    return first[is_update], end[is_update]


def _check_settings(plan: TrainingPlan) -> None:
    for name, (remedy, most) in _COUNTS.items():
        if getattr(plan, name) is not None or name in ("dataset_size", "batch_size", "ranks", "micro_size"):
            check.check_positive_int(_OWNER, name, getattr(plan, name), remedy, most)
    if (plan.epochs is None) == (plan.steps is None):
        got = "neither"
        if plan.epochs is not None:
            got = f"epochs={plan.epochs} and steps={plan.steps}"
        raise ValueError(
            f"For '{_OWNER}', either epochs or steps must be given, but got {got}. Say how long it trains."
        )
    check.check_bool(_OWNER, "drop_remainder", plan.drop_remainder, "It is the argument of Dataset.batch().")
    check_last_window(_OWNER, plan.last_window)


def _window_batches(plan: TrainingPlan) -> int:
    """Return the number of batches of a window."""
    wanted = plan.global_batch
    if wanted is None:
        return plan.accumulation_steps or 1
    rows = plan.batch_size * plan.ranks
    steps = wanted // rows
    if wanted % rows:
        nearest = " or ".join(f"{rows * n} (accumulation_steps={n})" for n in (steps, steps + 1) if n)
        raise ValueError(
            f"For '{_OWNER}', the argument 'global_batch' must be a multiple of batch_size * ranks = {rows}, but got "
            f"{wanted}. Use {nearest}."
        )
    if plan.accumulation_steps not in (None, steps):
        raise ValueError(
            f"For '{_OWNER}', the argument 'accumulation_steps' must be {steps} for a global_batch of {wanted}, but "
            f"got {plan.accumulation_steps}. Give one of the two."
        )
    return steps
