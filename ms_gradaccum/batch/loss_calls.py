"""Calls of MindSpore's means over labels in the code of a network, with their arguments as far as it shows them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from mindspore import mint, nn, ops

from ms_gradaccum.backend.network_code import ClosureValues, NetworkCode, codes_in, is_method_of, names_in

_NAMES = {"cross_entropy", "nll_loss"}
_FUNCTIONS = [getattr(module, name) for module in (ops, mint.nn.functional) for name in sorted(_NAMES)]
# What is known only when the code runs.
UNKNOWN = object()


class LossCall(NamedTuple):
    """A call of a function that takes the mean over labels, or their sum.

    Attributes:
        name: The function.
        weight: By which class weights it divides; None for none.
        ignored: The label that it leaves out.
    """

    name: str
    weight: Any
    ignored: Any


def loss_calls(network: nn.Cell) -> list[LossCall]:
    """Return such calls, wherever the network has them; not those with reduction='none', which take no mean."""
    code = NetworkCode(network)
    cells = list(code.cells.values())
    attributes = (item for cell in cells for item in vars(cell).items() if type(item[1]) in (FunctionType, partial))
    held = {name for name, value in attributes if _taken_apart(value)[0]}
    functions = [each for each in code.functions if not names_in(codes_in(each.__code__)).isdisjoint(_NAMES | held)]
    return [call for each in functions for call in _calls_in(each, cells)]


def _taken_apart(value: Any) -> tuple[str, Any, Sequence[Any], dict[str, Any]]:
    """Return the name of such a function, "" for all else, the function, and what arguments it has been given."""
    args, kwargs = (value.args, value.keywords) if type(value) is partial else ((), {})
    function = value.func if type(value) is partial else value
    is_one = any(function is each for each in _FUNCTIONS)
    return function.__name__.removesuffix("_ext") if is_one else "", function, args, kwargs


def _calls_in(function: FunctionType, cells: list[nn.Cell]) -> Iterator[LossCall]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # There is no source, or only a part of a line.
        yield LossCall("cross_entropy", None, UNKNOWN)
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for owner in [cell for cell in cells if is_method_of(function, cell)] or [None]:
        values = _Values(function, owner)
        yield from (found for call in calls if (found := values.of_call(call)))


class _Values:
    """What expressions in a function mean.

    Args:
        function: The function.
        owner: The cell whose method it is, if it is one.
    """

    def __init__(self, function: FunctionType, owner: nn.Cell | None) -> None:
        parameters = inspect.signature(function).parameters
        names = dict.fromkeys(function.__code__.co_varnames, UNKNOWN)
        names |= {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        if owner is not None:
            names[next(iter(parameters), "")] = owner
        self.spaces = (names, ClosureValues(function), function.__globals__)

    def of_call(self, call: ast.Call) -> LossCall | None:
        """Return what is known of a call, or None if it is none of these functions or takes no mean."""
        name, function, args, kwargs = _taken_apart(self._function_of(call.func))
        if not name:
            return None
        signature = inspect.signature(function)
        named = {each.arg: self.of(each.value) for each in call.keywords if each.arg}
        if len(named) < len(call.keywords) or any(isinstance(each, ast.Starred) for each in call.args):
            # Those of * and ** can be any.
            args, kwargs = (), dict.fromkeys(signature.parameters, UNKNOWN)
        else:
            args = (*args, *map(self.of, call.args))
        try:
            bound = signature.bind(*args, **{**kwargs, **named})
        except TypeError:  # It fails when it runs.
            return None
        bound.apply_defaults()
        reduction = bound.arguments["reduction"]
        weight = None if reduction == "sum" else bound.arguments["weight"]
        return None if reduction == "none" else LossCall(name, weight, bound.arguments["ignore_index"])

    def _function_of(self, node: ast.expr) -> Any:
        """Return the value of what is called; where it is unknown its name decides."""
        called = self.of(node)
        name = getattr(node, "attr", getattr(node, "id", None))
        return getattr(ops, name) if called is UNKNOWN and name in _NAMES else called

    def of(self, node: ast.expr) -> Any:
        """Return the value of an expression, or `UNKNOWN`."""
        if isinstance(node, ast.Name):
            return next((space[node.id] for space in self.spaces if node.id in space), UNKNOWN)
        if isinstance(node, ast.Attribute):
            base = self.of(node.value)
            # What a property does is the user's.
            is_property = isinstance(getattr(type(base), node.attr, None), property)
            return UNKNOWN if is_property else getattr(base, node.attr, UNKNOWN)
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):
            return UNKNOWN
