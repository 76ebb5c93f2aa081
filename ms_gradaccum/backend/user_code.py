"""The user's code in a graph: its hooks, and its lines in the compiler's errors."""

import inspect
import re
from typing import NoReturn

from mindspore import nn

from ms_gradaccum._checks import LIBRARIES, first_line
from ms_gradaccum.backend.mindspore_private import registered_hooks

# Patterns in compiler errors: an operator without a kernel on this device, and a line of code.
_NO_KERNEL = re.compile(r"Unsupported op \[\w+\] on \w+|The kernel \w+ unregistered")
# A dtype that NumPy has by default, and few operators.
_WIDE = re.compile(r"(int|float)64", re.IGNORECASE)
_PLACE = re.compile(r"In file (\S+?):(\d+)")
# The class names that errors of this package during compilation begin with.
_OWNERS = (
    "GradAccumulation GradCacheLoss ContrastiveLoss TokenMeanLoss TrainOneStepCell Accumulator "
    "MixedPrecision clip"
)
_SENTENCES = tuple(f"For '{name}'" for name in _OWNERS.split())


class UserCode:
    """A cell of the user in a graph, or None. Errors name ``owner``, and call the graph ``what``."""

    def __init__(self, owner: str, what: str, cell: nn.Cell | None) -> None:
        self.owner = owner
        self.what = what
        self.cell = cell
        # Flat lists, because every call in PYNATIVE mode iterates over them.
        self.cells = [] if cell is None else [each for _, each in cell.cells_and_names()]
        self.parameters = [] if cell is None else cell.trainable_params()

    def refuse_hooks(self) -> None:
        """Raise if the cell has hooks, which a graph does not call. Hooks can be registered at any time."""
        names = [parameter.name for parameter in self.parameters if parameter.hooks()]
        names += [cell.cls_name for cell in self.cells if any(registered_hooks(cell))]
        if names:
            raise ValueError(
                f"For '{self.owner}', the argument 'compile' must be None for a network with "
                f"hooks, but got True and a hook of {names[0]}, which a graph would not call. "
                f"Remove the hook, or leave compile out."
            )

    def raise_compile_error(self, error: Exception) -> NoReturn:
        """Raise an error that names the user's line of code and a remedy, below the compiler's own error."""
        first = first_line(error)
        if first.startswith(_SENTENCES):
            raise type(error)(first) from None  # Without the compiler's call stack.
        missing = _NO_KERNEL.search(str(error))
        other_selves = [place for place in map(_other_self, self.cells) if place]
        if missing is not None:
            got = f"{self._place_of(str(error))}{missing[0]}."
            remedy = "Use another device, or operators that have a kernel on this one."
        elif other_selves:
            got = f"{other_selves[0]}."
            remedy = "Rename it to 'self', the only name that the compiler accepts."
        else:
            got = self._place_of(str(error)) + first
            remedy = (
                "Rewrite the code so that it compiles in GRAPH mode, or use PYNATIVE mode without "
                "compile=True."
            )
            wide = _WIDE.search(first)
            if wide is not None:
                remedy = (
                    f"Cast inputs in the dataset, for example with astype(np.{wide[1].lower()}32)."
                )
        kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
        raise kind(
            f"For '{self.owner}', MindSpore cannot compile {self.what}: {got} No parameter was "
            f"changed. {remedy}"
        ) from error

    def _place_of(self, text: str) -> str:
        # The compiler lists the calls from the outermost to the innermost one.
        places = [
            f"{file}:{line}"
            for file, line in _PLACE.findall(text)
            if not file.startswith(LIBRARIES)
        ]
        if places:
            return f"at {places[-1]}: "
        if self.cell is None:
            return ""
        # The compiler names no line of code that it cannot parse.
        construct = type(self.cell).construct
        source = inspect.getsourcefile(construct)
        if source is None or source.startswith(LIBRARIES):
            return ""
        return f"in {type(self.cell).__name__} at {source}:{inspect.getsourcelines(construct)[1]}: "


def _other_self(cell: nn.Cell) -> str:
    """Return the first argument of a cell's `construct` and its line, unless the name is `self`."""
    code = getattr(inspect.unwrap(type(cell).construct), "__code__", None)
    if code is None or code.co_argcount == 0 or code.co_varnames[0] == "self":
        return ""
    place = f"{code.co_filename}:{code.co_firstlineno}"
    return f"a construct of {type(cell).__name__} at {place} with {code.co_varnames[0]!r} first"
