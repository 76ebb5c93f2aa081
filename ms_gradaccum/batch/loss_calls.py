"""Calls of MindSpore's losses in the code of a network, with their arguments as far as it shows them.

And those of `batch_norm`, after which no loss is a mean over rows.
"""

import ast
import functools
import inspect
import itertools
import linecache
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from mindspore import mint, nn, ops

from ms_gradaccum.backend.network_code import (
    ClosureValues,
    NetworkCode,
    attributes_of,
    codes_in,
    is_a,
    is_user,
    methods_of,
    names_in,
    unwrapped,
)

# Those whose mean is one over labels that count.
_NAMES = {"cross_entropy", "nll_loss"}
_MODULES = (ops, mint.nn.functional)
# All losses, which can add up their rows.
_FUNCTIONS = [
    function
    for module in _MODULES
    for function in vars(module).values()
    if is_a(function, FunctionType) and "reduction" in inspect.signature(function).parameters
]
_LOSSES = {name for module in _MODULES for name, function in vars(module).items() if function in _FUNCTIONS}
_HOLDERS = (FunctionType, partial, staticmethod)
# What is known only when the code runs.
UNKNOWN = object()


class LossCall(NamedTuple):
    """A call of a function that takes the mean over rows or labels, or their sum.

    Attributes:
        name: The function.
        weight: By which class weights it divides; None for none.
        ignored: The label that it leaves out; None for none.
        is_sum: Whether the loss is the sum that it returns.
    """

    name: str
    weight: Any = None
    ignored: Any = UNKNOWN
    is_sum: bool = False


def loss_calls(code: NetworkCode) -> list[LossCall]:
    """Return the calls in the code of a network that take a mean over labels, and those whose sum is its loss."""
    methods = {kind: methods_of(kind) for kind in set(map(type, code.reached)) if is_user(kind)}
    unused = _unused(code, itertools.chain(*methods.values()))
    held = _held_by_name(code)
    names = _LOSSES | {name for name, _ in held}
    found: list[LossCall] = []
    explained = {id(part) for _, value in held for part in (value, _taken_apart(value)[1])}
    for function in code.functions:
        if function not in unused and not names_in(codes_in(function.__code__)).isdisjoint(names):
            for owner in [each for each in code.reached if function in methods.get(type(each), ())] or [UNKNOWN]:
                found += _Calls(code, function, owner).found(names, explained)
    return found + [call for each in code.reached for call in _held_elsewhere(each, explained)]


def normalises_batches(code: NetworkCode) -> bool:
    """Return whether the code calls `batch_norm`, and may let it take the statistics of the batch."""
    functions = [each for each in code.functions if "batch_norm" in names_in(codes_in(each.__code__))]
    calls = [node for function in functions for node in _nodes_of(function) if isinstance(node, ast.Call)]
    for call in calls:
        if _name_of(call.func) == "batch_norm":
            named = [each.value for each in call.keywords if each.arg in ("training", None)]
            training = [*call.args[5:6], *named]
            if training and not (isinstance(training[0], ast.Constant) and not training[0].value):
                return True
    return False


def _unused(code: NetworkCode, methods: Iterable[FunctionType]) -> set[FunctionType]:
    """Return the methods that nothing names: they are there for something else, such as an evaluation."""
    bound = {each.__func__ for each in code.reached if is_a(each, MethodType)}
    used = code.names | {"construct"}
    return {each for each in methods if each.__name__ not in used and not each.__name__.startswith("__")} - bound


def _held_by_name(code: NetworkCode) -> list[tuple[str, Any]]:
    """Return such functions that are globals of the program or attributes of its cells and classes, by these names."""
    spaces = {id(each.__globals__): each.__globals__ for each in code.functions}
    spaces |= {id(each): attributes_of(each) for each in code.reached if is_a(each, nn.Cell)}
    spaces |= {id(each): dict(vars(each)) for each in code.reached if is_a(each, type) and is_user(each)}
    items = [item for space in spaces.values() for item in space.items() if type(item[1]) in _HOLDERS]
    return [(name, unwrapped(value)) for name, value in items if _taken_apart(unwrapped(value))[0]]


def _held_elsewhere(value: Any, explained: set[int]) -> Iterator[LossCall]:
    """Yield what is known of such a function that the program has in a registry, for example, if no call has it."""
    name, function, args, kwargs = _taken_apart(value)
    if name in _NAMES and id(value) not in explained:
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        if arguments.get("reduction") != "none":
            yield LossCall(name, arguments.get("weight"), arguments.get("ignore_index", -100))


def _taken_apart(value: Any) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Return the name of such a function, "" for all else, the function, and what arguments it has been given."""
    args, kwargs = (value.args, value.keywords) if type(value) is partial else ((), {})
    function = value.func if type(value) is partial else value
    is_one = is_a(function, FunctionType) and function in _FUNCTIONS
    return function.__name__.removesuffix("_ext") if is_one else "", function, args, kwargs


@functools.lru_cache(maxsize=256)
def _functions_in(file: str) -> dict[tuple[int, str], list[ast.AST]]:
    """Return the functions in a source file by their first line, decorators included, and their name."""
    found: dict[tuple[int, str], list[ast.AST]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault((node.lineno, "<lambda>"), []).append(node)
    return found


def _nodes_of(function: FunctionType) -> list[ast.AST]:
    """Return all that is in the source of a function; nothing if there is none."""
    code = function.__code__
    found = _functions_in(code.co_filename).get((code.co_firstlineno, code.co_name), [])
    return [node for each in found for node in ast.walk(each)]


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Calls:
    """The calls in a function.

    Args:
        code: The code that has it.
        function: The function.
        owner: The object whose method it is, `UNKNOWN` if it is none.
    """

    def __init__(self, code: NetworkCode, function: FunctionType, owner: Any) -> None:
        self.code = code
        self.function = function
        self.nodes = _nodes_of(function)
        codes = list(codes_in(function.__code__))
        self.named = names_in(codes)
        self.locals = {name: UNKNOWN for each in codes for name in (*each.co_varnames, *each.co_cellvars)}
        stored = [each.id for each in self.nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        parameters = inspect.signature(function, follow_wrapped=False).parameters
        for place, (name, each) in enumerate(parameters.items()):
            if name == "self" and place == 0:
                self.locals[name] = owner
            elif each.default is not each.empty and name not in stored and not self._is_given(name, place):
                self.locals[name] = each.default
        # What is assigned once has that value.
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                name = _name_of(node.targets[0])
                if stored.count(name) == 1 and name not in parameters:
                    self.locals[name] = self.of(node.value)

    def _is_given(self, name: str, place: int) -> bool:
        """Return whether some call of this function gives it the parameter that has a default."""
        own = self.function.__name__
        others = [each for each in self.code.functions if own in names_in(codes_in(each.__code__))]
        calls = [node for each in others for node in _nodes_of(each) if isinstance(node, ast.Call)]
        return any(
            len(each.args) + isinstance(each.func, ast.Attribute) > place
            or any(it.arg in (name, None) for it in each.keywords)
            for each in calls
            if _name_of(each.func) == own
        )

    def found(self, names: set[str], explained: set[int]) -> Iterator[LossCall]:
        """Yield the calls; and one of which nothing is known for each of the ``names`` that no call explains.

        Note what is called as ``explained``.
        """
        returned = {id(each.value) for each in self.nodes if isinstance(each, ast.Return)}
        unexplained = set(names & self.named) - (_LOSSES - _NAMES)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                callee = self._callee(node)
                name, arguments = self._called(callee, node)
                explained |= {id(callee), id(_taken_apart(callee)[1])}
                if callee is not UNKNOWN:
                    unexplained -= {name, _name_of(node.func)}
                if arguments and arguments["reduction"] != "none":
                    is_sum = arguments["reduction"] == "sum"
                    is_loss = id(node) in returned and self.function.__name__ == "construct"
                    if name in _NAMES:
                        weight = None if is_sum else arguments["weight"]
                        yield LossCall(name, weight, arguments["ignore_index"], is_sum and is_loss)
                    elif is_sum and is_loss:
                        yield LossCall(name, ignored=None, is_sum=True)
        yield from (LossCall(name) for name in sorted(unexplained))

    def _callee(self, call: ast.Call) -> Any:
        """Return what is called, or `UNKNOWN`."""
        callee, name = self.of(call.func), _name_of(call.func)
        is_own = isinstance(call.func, ast.Attribute) and _name_of(call.func.value) == "self"
        # As of a module that is imported inside.
        return getattr(ops, name) if callee is UNKNOWN and name in _NAMES and not is_own else callee

    def _called(self, callee: Any, call: ast.Call) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of a call of such a function."""
        name, function, args, kwargs = _taken_apart(callee)
        if not name:
            return _name_of(call.func), {}
        signature = inspect.signature(function)
        is_open = any(isinstance(each, ast.Starred) for each in call.args)
        args = () if is_open else (*args, *map(self.of, call.args))
        others = dict.fromkeys([*signature.parameters][len(args) :], UNKNOWN)
        given = others if is_open else kwargs
        for each in call.keywords:
            value = self.of(each.value)
            given = given | ({each.arg: value} if each.arg else value if is_a(value, dict) else others)
        try:
            bound = signature.bind(*args, **given)
        except TypeError:  # It fails when it runs.
            return name, {}
        bound.apply_defaults()
        return name, bound.arguments

    def of(self, node: ast.AST) -> Any:
        """Return the value of an expression, or `UNKNOWN`. No code of the program's runs."""
        try:
            return self._of(node)
        except Exception:  # Objects may do anything when they are looked at.
            return UNKNOWN

    def _of(self, node: Any) -> Any:
        if isinstance(node, ast.Name):
            spaces = (self.locals, ClosureValues(self.function), self.function.__globals__)
            return next((space[node.id] for space in spaces if node.id in space), UNKNOWN)
        if isinstance(node, ast.Attribute):
            return _attribute(self.of(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return _item(self.of(node.value), self.of(node.slice))
        if isinstance(node, ast.IfExp):
            test = self.of(node.test)
            return UNKNOWN if test is UNKNOWN else self.of(node.body if test else node.orelse)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            found = _item(self.of(node.func.value), self.of(node.args[0]), missing=None)
            return self.of(node.args[1]) if found is None and len(node.args) > 1 else found
        if isinstance(node, ast.Call) and _name_of(node.func) in ("int", "float"):
            return self.of(node.args[0])
        return ast.literal_eval(node)


def _attribute(base: Any, name: str) -> Any:
    if is_a(base, ModuleType):
        return vars(base).get(name, UNKNOWN)
    own = attributes_of(base)
    for space in (own, own.get("_cells"), own.get("_params"), base if is_a(base, dict) else None):
        if space and name in space:
            return space[name]
    found = inspect.getattr_static(base if is_a(base, type) else type(base), name, UNKNOWN)
    # What a property does is the user's.
    return UNKNOWN if is_a(found, (property, functools.cached_property)) else unwrapped(found)


def _item(base: Any, index: Any, missing: Any = UNKNOWN) -> Any:
    if is_a(base, dict):
        return dict.get(base, index, missing)
    return base[index] if is_a(base, (tuple, list)) and is_a(index, int) else UNKNOWN
