"""Plan of a training, computed before it runs."""

from dataclasses import dataclass, field

import numpy as np

from ms_gradaccum._checks import MAX_INT, check_bool, check_int, counted
from ms_gradaccum.loops.epoch import LastWindow, check_last_window

_OWNER = "TrainingPlan"
_MOST_BATCHES = 10**8  # A plan has a number for each epoch.
_MOST_ROWS = 10**15
# What each setting counts, and its limit.
_COUNTS = {
    "dataset_size": ("It counts the rows of the data.", _MOST_ROWS),
    "batch_size": ("It counts the rows of one batch on one rank.", MAX_INT),
    "ranks": ("It counts the processes; 1 is a single one.", 10**6),
    "accumulation_steps": (
        "It counts the batches of one update; 1 means an update per batch.",
        MAX_INT,
    ),
    "global_batch": ("It counts the rows of one update on all ranks together.", _MOST_ROWS),
    "epochs": ("It counts the passes over the data.", MAX_INT),
    "steps": ("It counts the batches to train on.", MAX_INT),
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Number of updates of a training with :class:`Model` or :class:`TrainOneStepCell`.

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
        last_window (str): As in :class:`Model`. Default: ``"apply"``.

    Attributes:
        batches_per_epoch (int): Batches of each rank in a pass.
        batches (int): Batches of each rank in all.
        updates (int): Calls of the optimizer: the number of steps for a schedule.
        updates_per_epoch (int): The largest number of updates in a pass.

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
    accumulation_steps: int | None = None
    global_batch: int | None = None
    last_window: LastWindow = "apply"

    batches_per_epoch: int = field(init=False)
    batches: int = field(init=False)
    updates: int = field(init=False)
    updates_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        _check_settings(self)
        window = _window_batches(self)
        # A dataset repeats its first rows at the end if its rows are not divisible by the ranks.
        rows = -(-self.dataset_size // self.ranks)
        per_epoch = -(-rows // self.batch_size)
        if self.drop_remainder:
            per_epoch = rows // self.batch_size
        if per_epoch == 0:
            raise ValueError(
                f"For '{_OWNER}', the argument 'dataset_size' must be at least one batch of "
                f"{self.batch_size} rows on each rank, but got {rows} rows on each. Use "
                f"drop_remainder=False."
            )
        batches = self.steps or per_epoch * (self.epochs or 0)
        most = max(per_epoch, batches)
        if most > _MOST_BATCHES:
            raise ValueError(
                f"For '{_OWNER}', a training must have at most {_MOST_BATCHES} batches on each "
                f"rank, but got {most}. Plan fewer epochs, or larger batches."
            )
        # The number of batches before each pass, and at the end.
        ends = np.arange(0, batches + per_epoch, per_epoch).clip(max=batches)
        if self.last_window == "carry":
            updates = np.diff(ends // window)
        elif self.last_window == "drop":
            updates = np.diff(ends) // window
        else:
            updates = -(-np.diff(ends) // window)
        # The class is frozen.
        vars(self).update(
            accumulation_steps=window,
            batches_per_epoch=per_epoch,
            batches=batches,
            updates=int(updates.sum()),
            updates_per_epoch=int(updates.max()),
        )

    def __str__(self) -> str:
        window = self.accumulation_steps or 1
        rows = window * self.batch_size * self.ranks
        epochs = (
            f"{self.batches / self.batches_per_epoch:.4g} of "
            f"{counted(self.batches_per_epoch, 'batch')}"
        )
        return (
            f"data     {self.dataset_size} rows for {counted(self.ranks, 'rank')} in batches of "
            f"{self.batch_size}\nepochs   {epochs} on each rank: "
            f"{counted(self.batches, 'batch')}\nwindow   {counted(window, 'batch')} on each rank: "
            f"{rows} rows\nupdates  {self.updates}: {self.updates_per_epoch} per epoch"
        )


def _check_settings(plan: TrainingPlan) -> None:
    for name, (remedy, most) in _COUNTS.items():
        if getattr(plan, name) is not None or name in ("dataset_size", "batch_size", "ranks"):
            check_int(_OWNER, name, getattr(plan, name), remedy, most=most)
    if (plan.epochs is None) == (plan.steps is None):
        got = "neither"
        if plan.epochs is not None:
            got = f"epochs={plan.epochs} and steps={plan.steps}"
        raise ValueError(
            f"For '{_OWNER}', either epochs or steps must be given, but got {got}. Say how long it "
            f"trains."
        )
    check_bool(
        _OWNER, "drop_remainder", plan.drop_remainder, "It is the argument of Dataset.batch()."
    )
    check_last_window(_OWNER, plan.last_window)


def _window_batches(plan: TrainingPlan) -> int:
    """Return the number of batches of a window."""
    wanted = plan.global_batch
    if wanted is None:
        return plan.accumulation_steps or 1
    rows = plan.batch_size * plan.ranks
    steps = wanted // rows
    if wanted % rows:
        nearest = " or ".join(
            f"{rows * n} (accumulation_steps={n})" for n in (steps, steps + 1) if n
        )
        raise ValueError(
            f"For '{_OWNER}', the argument 'global_batch' must be a multiple of batch_size * ranks "
            f"= {rows}, but got {wanted}. Use {nearest}."
        )
    if plan.accumulation_steps not in (None, steps):
        raise ValueError(
            f"For '{_OWNER}', the argument 'accumulation_steps' must be {steps} for a global_batch "
            f"of {wanted}, but got {plan.accumulation_steps}. Give one of the two."
        )
    return steps
