"""MindSpore's cells that act otherwise in training than in evaluation, and the modes of cells."""

from collections.abc import Iterable

from mindspore import mint, nn

from ms_gradaccum.backend.network_code import is_user

# In BatchNorm of mindspore.nn this attribute takes precedence over the mode: True uses the batch's statistics.
STATISTICS = "use_batch_statistics"
# Cells that draw random numbers or take statistics of the batch only in training. nn.BatchNorm3d has one inside.
BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    mint.nn.BatchNorm1d,
    mint.nn.BatchNorm2d,
    mint.nn.BatchNorm3d,
    mint.nn.SyncBatchNorm,
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout)
IN_TRAINING_ONLY = (*BATCH_NORMS, *DROPOUTS)


def follows_mode(cell: nn.Cell) -> bool:
    """Return whether a cell follows its mode: not a BatchNorm with a fixed setting, nor a Dropout with p = 0."""
    return getattr(cell, STATISTICS, None) is None and getattr(cell, "p", None) != 0


def acts_otherwise_in_training(cell: nn.Cell) -> bool:
    """Return whether a BatchNorm takes statistics of its batch, or a Dropout drops something."""
    return bool(cell.training if follows_mode(cell) else getattr(cell, STATISTICS, None))


def evaluate(cells: Iterable[nn.Cell], kinds: tuple[type[nn.Cell], ...]) -> bool:
    """Set MindSpore's own cells of these kinds to evaluation mode. Return whether any was in training mode."""
    own = [cell for cell in cells if isinstance(cell, kinds) and not is_user(type(cell))]
    active = list(filter(acts_otherwise_in_training, own))
    for cell in active:
        set_mode(cell, False, False if getattr(cell, STATISTICS, None) else None)
    return bool(active)


def set_mode(cell: nn.Cell, training: bool, statistics: bool | None) -> None:
    """Set the mode of one cell and not of the cells inside, as ``set_train`` does."""
    cell.phase = "train" if training else "predict"
    cell.add_flags(training=training)
    if STATISTICS in vars(cell):
        setattr(cell, STATISTICS, statistics)
