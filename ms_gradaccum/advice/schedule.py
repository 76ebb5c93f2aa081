"""The batches at which a loss is measured."""

from collections.abc import Callable, Sequence
from functools import partial

from mindspore import Parameter, nn


class Schedule:
    """Batches 1, 2, 4, 8 ... are due, and those before which a number of a cell or a scalar parameter has changed.

    A loop may change these, as the weight of a term. Optimizers do not update them, and what a forward pass changes
    does not count.
    """

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter]) -> None:
        self.batches = 0
        # Whether the batch that has begun last is due, and whether that is because of a change.
        self.is_due = False
        self.follows_change = False
        # What returns the numbers: looking these up is cheaper than a walk over all attributes.
        self.readers: list[Callable[[], object]] = []
        for _, cell in network.cells_and_names():
            for name, value in vars(cell).items():
                if type(value) in (int, float) and not name.startswith("_"):
                    self.readers.append(partial(vars(cell).get, name))
        updated = {id(each) for each in parameters}
        for each in network.get_parameters():
            if each.size == 1 and id(each) not in updated:
                self.readers.append(each.asnumpy)
        self.changes = 0
        self.values = ""  # The values after the batch before.

    def begin_batch(self) -> None:
        """Count a batch, and decide whether it is due. Of the changes, number 1, 2, 4, 8 ... count."""
        self.batches += 1
        has_changed = self.batches > 1 and self.values != self._read()
        self.changes += has_changed
        self.follows_change = has_changed and self.changes.bit_count() == 1
        self.is_due = self.follows_change or self.batches.bit_count() == 1

    def end_batch(self) -> None:
        self.values = self._read()

    def _read(self) -> str:
        """Return the values as text, in which a NaN is equal to itself."""
        return repr([read() for read in self.readers])
