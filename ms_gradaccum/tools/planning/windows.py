"""The batches of each update, computed by counting without training."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class Epoch(NamedTuple):
    """One pass over the data on all ranks.

    Attributes:
        batch_rows: Rows of each batch, over all ranks.
        repeated_rows: Rows that are used twice so that all ranks have the same number.
        dropped_rows: Rows that are dropped because the last batch would be short.
    """

    batch_rows: Any
    repeated_rows: int
    dropped_rows: int


def share_rows(dataset_size: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank: as given, or as ``num_shards`` and ``shard_id`` of a dataset distribute them.

    A dataset gives all ranks the same number of rows and repeats the first rows at the end if necessary.
    """
    if isinstance(dataset_size, int):
        return (-(-dataset_size // ranks),) * ranks
    return tuple(dataset_size)


def plan_epoch(dataset_size: int | Sequence[int], ranks: int, batch_size: int, drop_remainder: bool) -> Epoch:
    """Return the batches of an epoch over all ranks. A rank without data adds no rows to the batches of the others."""
    rank_rows = share_rows(dataset_size, ranks)
    used_rows = [rows - rows % batch_size if drop_remainder else rows for rows in rank_rows]
    begins = np.arange(0, max(used_rows), batch_size)
    batch_rows = sum(np.clip(rows - begins, 0, batch_size) * count for rows, count in Counter(used_rows).items())
    given = dataset_size if isinstance(dataset_size, int) else sum(dataset_size)
    return Epoch(batch_rows, sum(rank_rows) - given, sum(rank_rows) - sum(used_rows))


class Windows:
    """The batches of each update.

    Args:
        epoch: A pass over the data.
        batches: Number of batches, over as many epochs as necessary.
        accumulation_steps: Number of batches of a whole window.
        last_window: The treatment of an unfinished window at the end of an epoch, as for `Model`.
    """

    def __init__(self, epoch: Epoch, batches: int, accumulation_steps: int, last_window: str) -> None:
        self.epoch = epoch
        self.per_epoch = len(epoch.batch_rows)
        # With "carry", all epochs count as one.
        length = batches if last_window == "carry" else self.per_epoch
        starts = np.arange(0, batches, length)
        begins = (starts[:, None] + np.arange(0, length, accumulation_steps)).ravel()
        ends = np.minimum(begins + accumulation_steps, np.repeat(starts + length, len(begins) // len(starts)))
        ends = np.minimum(ends, batches)
        # Windows behind the last batch are empty; an incomplete window is an update if it is applied.
        kept = ends - begins >= (1 if last_window == "apply" else accumulation_steps)
        self.begins, self.ends = begins[kept], ends[kept]

    @property
    def batches(self) -> int:
        """Number of batches that make updates."""
        return int((self.ends - self.begins).sum())

    @property
    def most_per_epoch(self) -> int:
        """The largest number of updates in an epoch."""
        return int(np.bincount((self.ends - 1) // self.per_epoch).max()) if len(self.ends) else 0

    @cached_property
    def rows(self) -> list[int]:
        """Rows of each update, those of all ranks together."""
        return [int(count) for count in self._rows_before(self.ends) - self._rows_before(self.begins)]

    def _rows_before(self, batches: Any) -> Any:
        before = np.concatenate([[0], np.cumsum(self.epoch.batch_rows)])
        epochs, rest = np.divmod(batches, self.per_epoch)
        return epochs * before[-1] + before[rest]
