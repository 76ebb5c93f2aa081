"""What any compiled graph keeps from its first run, whatever the network's own code does."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mindspore import Parameter, Tensor, nn

from ms_gradaccum.tools.verification.comparison import norm_of
from ms_gradaccum.tools.verification.eager_and_compiled import EagerAndCompiled
from ms_gradaccum.tools.verification.experiment import Start
from ms_gradaccum.tools.verification.python_reads import PythonReads, reads_mode
from ms_gradaccum.tools.verification.python_state import changing

_TRIED = 5


_FROZEN = (
    "Frozen by set_train(False) in a network that is in training mode: {names}. They were left so here, as "
    "TrainOneStepCell and Accumulator leave them; Model.train sets all cells in training mode when it begins. "
    "BatchNorm with use_batch_statistics=False stays frozen either way."
)


def notes_of_modes(reads: PythonReads, start: Start) -> Iterator[str]:
    """Yield what there is to say of cells that one way of training leaves in evaluation mode, and another does not."""
    trained = {id(cell): trained for cell, trained in zip(start.cells, start.trained)}
    frozen = [name for name, cell in reads.cells.items() if not trained[id(cell)] and _goes_by_mode(cell)]
    if frozen:
        more = f" and {len(frozen) - _TRIED} more" if len(frozen) > _TRIED else ""
        yield _FROZEN.format(names=", ".join(frozen[:_TRIED]) + more)


def _goes_by_mode(cell: nn.Cell) -> bool:
    settled = getattr(cell, "use_batch_statistics", None) is not None or getattr(cell, "p", None) == 0
    return reads_mode(cell) and not settled


class Louder(nn.Cell):
    """What stands in for a cell: it returns more."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        output = self.cell(*args, **kwargs)
        return output * 1.5 if isinstance(output, Tensor) else output


def kept_by_graphs(runs: EagerAndCompiled) -> Iterator[str]:
    """Yield what eager runs obey a change of, and compiled ones do not."""
    norms = [norm_of(grad) for grad in runs.window(runs.eager).grads]
    weight = runs.eager.parameters[norms.index(max(norms))]
    if runs.ignores(partial(_without_gradient, weight)):
        yield "requires_grad of parameters"
    modes = list(_mode_names(runs))
    if modes:
        yield f"the mode (set_train) of {', '.join(modes[:_TRIED])}"
    cell = next(_cell_names(runs), None)
    if cell is not None:
        yield f"the cells inside, such as {cell}"
    for places in runs.state.readable(own=False):
        if runs.ignores(partial(changing, places)):
            yield places[0].text()


@contextmanager
def _without_gradient(weight: Parameter) -> Iterator[None]:
    weight.requires_grad = False
    try:
        yield
    finally:
        weight.requires_grad = True


def _mode_names(runs: EagerAndCompiled) -> Iterator[str]:
    """Yield the names of cells whose mode makes a difference, one per class."""
    by_class: dict[type, list[str]] = {}
    for name, cell in runs.reads.cells.items():
        if reads_mode(cell):
            by_class.setdefault(type(cell), []).append(name)
    for names in by_class.values():
        cells = [runs.reads.cells[name] for name in names]
        others = [cell for cell in runs.dropouts if all(cell is not each for each in cells)]
        # Dropout is off in all the other runs.
        is_off = any(cell is each for cell in cells for each in runs.dropouts)
        if runs.ignores(partial(runs.frozen, others if is_off else [*others, *cells])):
            yield names[0] or "the network"


def _cell_names(runs: EagerAndCompiled) -> Iterator[str]:
    """Yield the names of cells in whose place another one is obeyed eagerly alone."""
    inner = [
        (outer, attribute, f"{name}.{attribute}" if name else attribute)
        for name, outer in runs.reads.cells.items()
        for attribute, cell in outer._cells.items()
        if cell is not None
    ]
    for outer, attribute, name in inner[:_TRIED]:
        if runs.ignores(partial(_replaced, outer, attribute)):
            yield name


@contextmanager
def _replaced(outer: nn.Cell, attribute: str) -> Iterator[None]:
    cell = outer._cells[attribute]
    try:
        outer._cells[attribute] = Louder(cell)
        yield
    finally:
        outer._cells[attribute] = cell
