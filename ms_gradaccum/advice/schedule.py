"""The batches at which a loss is measured."""

from collections.abc import Sequence

from mindspore import Parameter, nn


class Schedule:
    """Batches 1, 2, 4, 8 ... are due, and those after a change of a number of a cell or of a scalar parameter.

    A loop may change these, as the weight of a term. Optimizers do not update them.
    """

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter]) -> None:
        self.batches = 0
        self.is_due = False  # Whether the batch that has begun last is due.
        # The attributes of cells that are numbers: looking these up is cheaper than a walk over all attributes.
        self.places: list[tuple[dict[str, object], str]] = []
        for _, cell in network.cells_and_names():
            attributes = vars(cell)
            names = [name for name, value in attributes.items() if type(value) in (int, float)]
            self.places += [(attributes, name) for name in names if not name.startswith("_")]
        updated = {id(each) for each in parameters}
        self.scalars = [each for each in network.get_parameters() if id(each) not in updated and each.size == 1]
        self.changes = 0
        self.values = ""  # The values at the batch before, as text: a NaN is equal to itself.

    def begin_batch(self) -> None:
        """Count a batch, and decide whether it is due. Of the changes, number 1, 2, 4, 8 ... count."""
        self.batches += 1
        values = [attributes.get(name) for attributes, name in self.places]
        values += [each.asnumpy().item() for each in self.scalars]
        has_changed = self.batches > 1 and self.values != repr(values)
        self.values = repr(values)
        self.changes += has_changed
        self.is_due = self.batches.bit_count() == 1 or (has_changed and self.changes.bit_count() == 1)
