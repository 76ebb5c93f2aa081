"""Inline the functions that `lazy_inline` has left in a program.

The CPU back end cannot run calls of them, and messages inside a function must be counted once per call.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from mindspore.train import mind_ir_pb2

_CALL = "REF::"


class _Partial(NamedTuple):
    """A function, by name, with its first arguments."""

    function: str
    arguments: tuple[str, ...]


def inlined(model: Any) -> Any:
    """Return a copy of a MindIR model in which the only calls are those of a Switch's branches."""
    copy = mind_ir_pb2.ModelProto()
    copy.CopyFrom(model)
    inliner = _Inliner(copy)
    constants = _constants_of(copy)
    for graph in [copy.graph, *copy.functions]:
        # Any graph may use the constants of others; the main graph, which is read first, gets them all.
        inliner.rewrite(graph, constants, keeps=graph is copy.graph)
    _drop_unused(copy)
    return copy


def operator_names(model: Any) -> dict[str, str]:
    """Return the name of the operator of each type of node."""
    return {f"{_CALL}{primitive.name}": primitive.op_type for primitive in model.primitives}


class _Inliner:
    """Rewrites the graphs of a model, with copies of its original functions."""

    def __init__(self, model: Any) -> None:
        self.operators = operator_names(model)
        self.functions: dict[str, Any] = {}
        for function in model.functions:
            self.functions[function.name] = mind_ir_pb2.GraphProto()
            self.functions[function.name].CopyFrom(function)
        self.copies = 0

    def rewrite(self, graph: Any, constants: list[Any], keeps: bool) -> None:
        """Replace calls in ``graph`` by the nodes of the functions. With ``keeps`` it also gets the constants."""
        nodes = list(graph.node)
        del graph.node[:]
        # Known values by name: the items of a tuple, a function with its first arguments, or a number.
        self.known: dict[str, Any] = {}
        self.out = graph.node
        self.names: dict[str, str] = {}
        for constant in constants:
            self._learn("Constant", constant)
        if keeps:
            graph.node.extend(constants)
        self._emit(nodes, self.names, "")
        for output in graph.output:
            output.name = self.names.get(output.name, output.name)

    def _emit(self, nodes: Iterable[Any], names: dict[str, str], suffix: str) -> None:
        """Add copies of ``nodes``, renamed by ``names``; ``suffix`` is appended to the names of their outputs."""
        for node in nodes:
            if node.op_type == "Constant":
                continue
            inputs = [names.get(name, name) for name in node.input]
            if node.op_type.startswith(_CALL) and node.op_type not in self.operators:
                callee = node.op_type.removeprefix(_CALL)
                callee = names.get(callee, callee)
                target = _Partial(callee, ()) if callee in self.functions else self.known.get(callee)
                if isinstance(target, _Partial):
                    self._call(node, target, inputs, names)
                    continue
                node = _copied(node, inputs, suffix, names)
                node.op_type = f"{_CALL}{callee}"
                self.out.append(node)
                continue
            operator = self.operators.get(node.op_type, node.op_type)
            items = self.known.get(inputs[0]) if operator == "TupleGetItem" else None
            if isinstance(items, list):
                item = items[self.known[inputs[1]]]
                names[node.output[0]] = item
                continue
            node = _copied(node, inputs, suffix, names)
            self.out.append(node)
            self._learn(operator, node)

    def _learn(self, operator: str, node: Any) -> None:
        """Remember the output of a node, if a call or an item of a tuple may need it later."""
        name, inputs = node.output[0], list(node.input)
        if operator == "MakeTuple":
            self.known[name] = inputs
        elif operator == "Partial":
            self.known[name] = _Partial(inputs[0], tuple(inputs[1:]))
        elif operator == "Constant":
            value = next((attribute for attribute in node.attribute if attribute.name == "value"), None)
            if value is not None and value.type == mind_ir_pb2.AttributeProto.INT64:
                self.known[name] = value.i
        elif operator == "Depend" and isinstance(self.known.get(inputs[0]), _Partial):
            # Each node of the function would have to wait for that value.
            raise NotImplementedError("a function that waits for another value")

    def _call(self, node: Any, target: _Partial, inputs: list[str], names: dict[str, str]) -> None:
        """Add the nodes of a function with these inputs; the name of the call then stands for its result."""
        function = self.functions[target.function]
        self.copies += 1
        arguments = [*target.arguments, *inputs]
        inner = dict(zip((value.name for value in function.input), arguments, strict=True))
        self._emit(function.node, inner, f"#{self.copies}")
        result = function.output[0].name
        names[node.output[0]] = inner.get(result, result)


def _copied(node: Any, inputs: list[str], suffix: str, names: dict[str, str]) -> Any:
    """Return a copy of ``node`` with these inputs and new outputs, which are entered in ``names``."""
    copy = mind_ir_pb2.NodeProto()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(inputs)
    if suffix:
        copy.name += suffix
        for i, output in enumerate(node.output):
            names[output] = copy.output[i] = output + suffix
    return copy


def _constants_of(model: Any) -> list[Any]:
    """Return the constants of all graphs, each once."""
    found: dict[str, Any] = {}
    for graph in [model.graph, *model.functions]:
        for node in graph.node:
            if node.op_type == "Constant":
                found.setdefault(node.output[0], mind_ir_pb2.NodeProto()).CopyFrom(node)
    return list(found.values())


def _drop_unused(model: Any) -> None:
    """Drop unused constants, functions and tuples of functions."""
    operators = operator_names(model)
    needed: set[str] = set()
    # The main graph has the constants, so it comes after the graphs that may need one.
    for graph in [*model.functions, model.graph]:
        needed.update(output.name for output in graph.output)
        kept = []
        for node in reversed(graph.node):
            operator = operators.get(node.op_type, node.op_type)
            if operator not in ("MakeTuple", "Partial", "Constant") or needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
                needed.add(node.op_type.removeprefix(_CALL))
        del graph.node[:]
        graph.node.extend(reversed(kept))
    functions = {function.name: function for function in model.functions}
    reached: set[str] = set()
    new = [model.graph]
    while new:
        names = {name for node in new.pop().node for name in node.input if name in functions}
        new += [functions[name] for name in names - reached]
        reached |= names
    for name in functions.keys() - reached:
        model.functions.remove(functions[name])
