"""The batches at which a loss is measured."""

from collections.abc import Callable, Sequence
from functools import partial

from mindspore import Parameter, nn


class Schedule:
    """Batches 1, 2, 4, 8 ... are due, and those after a change of a number of a cell or of a scalar parameter.

    A loop may change these, as the weight of a term. Optimizers do not update them.
    """

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter]) -> None:
        self.batches = 0
        self.is_due = False  # Whether the batch that has begun last is due.
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
        self.values = ""  # The values at the batch before, as text: a NaN is equal to itself.

    def begin_batch(self) -> None:
        """Count a batch, and decide whether it is due. Of the changes, number 1, 2, 4, 8 ... count."""
        self.batches += 1
        values = repr([read() for read in self.readers])
        has_changed = self.batches > 1 and self.values != values
        self.values = values
        self.changes += has_changed
        self.is_due = self.batches.bit_count() == 1 or (has_changed and self.changes.bit_count() == 1)
