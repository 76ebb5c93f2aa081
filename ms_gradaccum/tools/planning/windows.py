"""The batches and the rows of each update, counted without training."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def share_rows(dataset_size: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank: as given, or as ``num_shards`` and ``shard_id`` of a dataset distribute them.

    A dataset gives all ranks the same number of rows and repeats the first rows at the end if necessary.
    """
    if isinstance(dataset_size, int):
        return (-(-dataset_size // ranks),) * ranks
    return tuple(dataset_size)


def rows_of_batches(rank_rows: Sequence[int], batch_size: int, drop_remainder: bool) -> Any:
    """Return the rows of each batch of an epoch, over all ranks. A rank without data adds none."""
    used_rows = [rows - rows % batch_size if drop_remainder else rows for rows in rank_rows]
    begins = np.arange(0, max(used_rows), batch_size)
    return sum(np.clip(rows - begins, 0, batch_size) * count for rows, count in Counter(used_rows).items())


def updates_of(batches: int, per_epoch: int, accumulation_steps: int, last_window: str) -> Any:
    """Return the number of the first batch of each update and that of the batch after its last one, in two rows."""
    # With "carry", all epochs count as one.
    length = batches if last_window == "carry" else per_epoch
    starts = np.arange(0, batches, length)
    begins = (starts[:, None] + np.arange(0, length, accumulation_steps)).ravel()
    ends = np.minimum(begins + accumulation_steps, np.repeat(starts + length, len(begins) // len(starts)))
    ends = np.minimum(ends, batches)
    # Windows behind the last batch are empty; an incomplete window is an update if it is applied.
    kept = ends - begins >= (1 if last_window == "apply" else accumulation_steps)
    return np.stack([begins[kept], ends[kept]])


def rows_before(batch_rows: Any, batches: Any) -> Any:
    """Return the rows of the first ``batches`` batches of a training, with the rows of each batch of an epoch."""
    before = np.concatenate([[0], np.cumsum(batch_rows)])
    epochs, rest = np.divmod(batches, len(batch_rows))
    return epochs * before[-1] + before[rest]
