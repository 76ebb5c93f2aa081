"""The hook of a loss cell whose batches are prepared before they are trained."""

from collections.abc import Sequence
from typing import Any, Protocol

from mindspore import Tensor, nn

from ms_gradaccum.batch.split import BatchAxis, SplitBatch
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.weighted_loss import WeightedLoss


class BatchSettings(Protocol):
    """The settings of a step that decide whether a batch can be prepared."""

    @property
    def owner(self) -> str: ...

    @property
    def drop_non_finite(self) -> bool: ...


class Preparation:
    """The work on a batch before and after its micro steps. These methods do nothing."""

    def compiled_cells(self) -> list[Any]:
        """Return what has been compiled."""
        return []

    def prepare(
        self, inputs: tuple[object, ...], batch: SplitBatch, rows: int, eager: bool
    ) -> tuple[SplitBatch, int]:
        """Return the micro batches for the micro steps, and the number of rows that their loss is a mean of."""
        return batch, rows

    def check(self, outputs: Sequence[tuple[Tensor, ...]]) -> None:
        """Raise if the micro steps have not computed what the preparation has."""

    def join(self) -> None:
        """Take part in the collectives of `prepare` on a rank without rows."""


class WholeBatchLoss(nn.Cell):
    """Base class of loss cells that need all rows of a batch together, so that no sum over micro batches is the loss.

    A subclass prepares each batch, and says what a micro batch differentiates then.
    """

    def preparation(
        self, batch_axis: BatchAxis, settings: BatchSettings, like: nn.Cell, reducer: nn.Cell
    ) -> Preparation:
        """Return the preparation of a step with these settings, compiled as the micro step ``like`` is."""
        raise NotImplementedError

    def prepared_loss(
        self, structure: SequenceOf | None, weighted: object, losses: object
    ) -> WeightedLoss:
        """Return the loss of a prepared micro batch, or raise for arguments of `GradAccumulation` that do not fit."""
        raise NotImplementedError

    def around(self, backbone: nn.Cell) -> "WholeBatchLoss":
        """Return this loss with another `backbone`, the network that is converted to half precision."""
        raise NotImplementedError
