"""Which batch ends a window. Plain counting: all ranks that see the same number of batches decide alike."""

from ms_gradaccum.accumulation_config import AccumulationConfig


class WindowCounter:
    """Counts the batches of the open window, and what has gone by.

    Attributes:
        batches: Batches in the open window, the current one included.
        updates: Updates made.
        tokens: Weight of the windows of these updates.
    """

    def __init__(self, config: AccumulationConfig) -> None:
        self.config = config
        self.batches = 0
        self.updates = 0
        self.tokens = 0.0
        self.steps = 0

    def begin_batch(self, end_of_data: bool, epoch: int | None, withheld: bool) -> bool:
        """Count one batch and return whether it ends the window, unless the end is withheld."""
        if self.batches == 0:
            self.steps = self.config.steps_for(epoch, self.updates, self.tokens)
        self.batches += 1
        full = self.batches >= self.steps or (end_of_data and self.config.sync_with_dataloader)
        return full and not withheld

    def take_back_batch(self) -> None:
        """Forget the current batch, of which nothing was added."""
        self.batches -= 1

    def end_window(self) -> None:
        """Begin anew with the next batch."""
        self.batches = 0

    def count_update(self, weight: float) -> None:
        """Count an update."""
        self.updates += 1
        self.tokens += weight
