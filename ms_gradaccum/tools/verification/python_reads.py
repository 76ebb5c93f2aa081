"""What the Python code of a network reads, and may change, besides its inputs and Parameters."""

import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspore import nn, ops

from ms_gradaccum.backend.network_code import ClosureValues, NetworkCode, codes_of, is_a, is_user, names_in, unique

# What every cell has of its own, whatever its class.
_OF_ALL_CELLS = frozenset((*vars(nn.Cell()), "_cell_init_args", "_is_top_cell"))


@dataclass(frozen=True)
class Space:
    """Where names have values: the attributes of an object or a class, the globals of a module, a closure.

    Attributes:
        label: How a name in it is called, with ``{}`` for the name.
        group: What those have in common that one change is made to at once, such as the class of cells.
        values: The names and their values, which can be assigned to.
        names: The names that count; None for all that come and go.
        reads: The names that the code reads.
        own: Whether it is the user's, and not a library's.
    """

    label: str
    group: str
    values: Any
    names: frozenset[str] | None
    reads: frozenset[str]
    own: bool = True

    def keys(self) -> list[str]:
        """Return the names that have a value now."""
        if self.names is not None:
            return [name for name in sorted(self.names) if name in self.values]
        return [name for name in self.values if name not in _OF_ALL_CELLS]

    def call(self, name: str) -> str:
        """Return how a text calls a name."""
        return self.label.format(name)


class ClassValues:
    """The attributes of a class as a mapping."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __contains__(self, name: object) -> bool:
        return name in vars(self.kind)

    def __getitem__(self, name: str) -> Any:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)


class PythonReads(NetworkCode):
    """The code of a network, and the spaces that it reads.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(network)
        self.spaces = [*self._of_cells(), *self._of_classes(), *self._of_functions()]

    def changes_in_place(self) -> bool:
        """Whether the code has an operator such as ``*=``."""
        return any(
            each.opname.startswith("INPLACE_") or (each.opname == "BINARY_OP" and each.argrepr.endswith("="))
            for code in self.codes
            for each in dis.get_instructions(code)
        )

    def has_gradient_hook(self) -> bool:
        """Whether something is called in the backward pass: an operator, or a hook of a tensor."""
        by_operator = any(is_a(value, ops.HookBackward) for value in self.reached)
        return by_operator or bool(self.names & {"HookBackward", "register_hook"})

    def _of_cells(self) -> Iterator[Space]:
        seen: set[int] = set()
        for name, cell in self.cells.items():
            kind, of = type(cell), f"of {name}" if name else "of the network"
            own = is_user(kind)
            reads = self.names if own else self.names | names_in(codes_of(kind))
            yield Space(f"the attribute {{}} {of}", kind.__qualname__, vars(cell), None, reads, own)
            yield Space(f"the cell {{}} {of}", kind.__qualname__, cell._cells, None, frozenset(), own)
            helpers = vars(cell).items() if own else ()
            for attribute, value in helpers:
                if attribute not in _OF_ALL_CELLS and _is_record(value) and id(value) not in seen:
                    seen.add(id(value))
                    yield Space(f"{attribute}.{{}} {of}", kind.__qualname__ + attribute, vars(value), None, self.names)

    def _of_classes(self) -> Iterator[Space]:
        for kind in self.classes:
            names = frozenset(name for name in vars(kind) if name in self.names and not name.startswith("__"))
            label = f"the attribute {{}} of the class {kind.__name__}"
            yield Space(label, kind.__qualname__, ClassValues(kind), names, names)

    def _of_functions(self) -> Iterator[Space]:
        for module in unique(function.__module__ for function in self.functions):
            values = vars(sys.modules[module]) if module in sys.modules else {}
            yield Space(f"the global {{}} of {module}", module, values, self.names, self.names)
        for function in self.functions:
            if function.__closure__:
                names = frozenset(function.__code__.co_freevars) - {"__class__"}
                label = f"the variable {{}} around {function.__qualname__}"
                yield Space(label, function.__qualname__, ClosureValues(function), names, names)


def _is_record(value: Any) -> bool:
    """Whether it is an object of plain attributes, such as a dataclass with settings."""
    known = is_user(type(value)) and not callable(value)
    return known and hasattr(value, "__dict__") and not isinstance(value, nn.Cell)


def reads_mode(cell: nn.Cell) -> bool:
    """Whether the code of a cell asks whether it is in training."""
    return "training" in names_in(codes_of(type(cell)))
