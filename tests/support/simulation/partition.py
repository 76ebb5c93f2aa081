"""Compile for several GPUs on processes that have none, and count the messages of the program.

Functions from `lazy_inline` are inlined here: the CPU back end cannot call them, and their messages must be counted
once per call. MindSpore itself inlines them in a graph around the loaded one, without their attributes cell_reuse,
no_inline and defer_inline, but Adam is then wrong from its second update on (2.10.0).
"""

from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import mindspore as ms
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.graph.api import _cell_graph_executor
from mindspore.train import mind_ir_pb2

from ms_gradaccum.backend.compiled import graph_mode

_CALL = "REF::"
WORLD_GROUP = "nccl_world_group"
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll", "Broadcast", "NeighborExchange")

# Parts of the names of operators that the compiler inserts. The first match gives the purpose.
_PURPOSES = (
    ("grad_mirror", "gradients"),
    ("_grad_accumulation_shard_grad", "gradients"),
    ("grad_parallel_optimizer", "gradients"),
    ("parallel_optimizer", "weights"),
    ("global_norm", "norm"),
    ("PARALLEL_GLOBALNORM", "norm"),
    ("gradforward_op", "backward of a sharded operator"),
    ("forward_op", "forward of a sharded operator"),
    ("gradredistribution_op", "another layout, backward"),
    ("redistribution_op", "another layout, forward"),
)


def connect():
    """Connect this process to the others; return its rank and their number."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    # The compiler reads the ranks of the group that NCCL would have created.
    create_group(WORLD_GROUP, list(range(get_group_size())))
    return get_rank(), get_group_size()


@contextmanager
def gpu_target():
    """Make the compiler see a GPU as the device of this machine."""
    context = MSContext.get_instance()
    before = context.get_param(ms_ctx_param.device_target)
    context.set_param(ms_ctx_param.device_target, "GPU")
    try:
        yield
    finally:
        context.set_param(ms_ctx_param.device_target, before)


def partition(cell, *inputs):
    """Return the GPU program that the compiler makes from ``cell`` for this rank, as a MindIR model without calls."""
    # In an export phase, the back end, which would look for the device, does not run.
    cell.phase = "export.train"
    with gpu_target(), graph_mode():
        cell.compile(*inputs)
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(_cell_graph_executor._get_func_graph_proto(cell, cell.current_phase, "mind_ir"))
    _inline(model)
    return model


def _inline(model):
    """Inline all calls in a model, except those of a Switch's branches."""
    inliner = _Inliner(model)
    nodes = (node for graph in [*model.functions, model.graph] for node in graph.node)
    constants = {node.output[0]: deepcopy(node) for node in nodes if node.op_type == "Constant"}
    for graph in [model.graph, *model.functions]:
        # Any graph may use the constants of others. The main graph, which is read first, gets all of them.
        inliner.rewrite(graph, constants.values(), keeps=graph is model.graph)
    _drop_unused(model)


def operator_names(model):
    return {f"{_CALL}{primitive.name}": primitive.op_type for primitive in model.primitives}


class _Inliner:
    """Rewrites the graphs of a model, with copies of its original functions."""

    def __init__(self, model):
        self.operators = operator_names(model)
        self.functions = {function.name: deepcopy(function) for function in model.functions}
        self.copies = 0

    def rewrite(self, graph, constants, keeps):
        """Replace calls in ``graph`` by the nodes of the functions. With ``keeps`` it also gets the constants."""
        nodes, names = list(graph.node), dict[str, str]()
        del graph.node[:]
        # Known values by name: a list is a tuple's items, a tuple is a function and its first arguments, a number
        # itself.
        self.known = {}
        self.out = graph.node
        for constant in constants:
            self._learn("Constant", constant)
        graph.node.extend(constants if keeps else [])
        self._emit(nodes, names, "")
        for output in graph.output:
            output.name = names.get(output.name, output.name)

    def _emit(self, nodes, names, suffix):
        """Add copies of ``nodes``, renamed by ``names``; ``suffix`` is appended to the names of their outputs."""
        for node in nodes:
            inputs = [names.get(name, name) for name in node.input]
            operator = self.operators.get(node.op_type, node.op_type)
            items = self.known.get(inputs[0]) if operator == "TupleGetItem" else None
            is_call = operator.startswith(_CALL)
            callee = operator.removeprefix(_CALL)
            callee = names.get(callee, callee)
            target = (callee,) if callee in self.functions else self.known.get(callee)
            if operator == "Constant":
                continue
            if isinstance(items, list):
                names[node.output[0]] = items[self.known[inputs[1]]]
            elif is_call and isinstance(target, tuple):
                # The name of the call becomes the name of the function's result.
                function = self.functions[target[0]]
                self.copies += 1
                inner = dict(zip((value.name for value in function.input), [*target[1:], *inputs], strict=True))
                self._emit(function.node, inner, f"#{self.copies}")
                result = function.output[0].name
                names[node.output[0]] = inner.get(result, result)
            else:
                node = _renamed(node, inputs, suffix, names)
                if is_call:
                    node.op_type = f"{_CALL}{callee}"
                else:
                    self._learn(operator, node)
                self.out.append(node)

    def _learn(self, operator, node):
        """Remember the output of a node, if a call or an item of a tuple may need it later."""
        name, inputs = node.output[0], list(node.input)
        if operator == "MakeTuple":
            self.known[name] = inputs
        elif operator == "Partial":
            self.known[name] = tuple(inputs)
        elif operator == "Constant":
            value = next((attribute for attribute in node.attribute if attribute.name == "value"), None)
            if value is not None and value.type == mind_ir_pb2.AttributeProto.INT64:
                self.known[name] = value.i
        elif operator == "Depend" and isinstance(self.known.get(inputs[0]), tuple):
            # Each node of the function would have to wait for this value.
            raise NotImplementedError("a function that waits for another value")


def _renamed(node, inputs, suffix, names):
    """Return a copy of ``node`` with these inputs and new outputs, which are entered in ``names``."""
    copy = deepcopy(node)
    del copy.input[:]
    copy.input.extend(inputs)
    if suffix:
        copy.name += suffix
        for i, output in enumerate(node.output):
            names[output] = copy.output[i] = output + suffix
    return copy


def _drop_unused(model):
    """Drop unused constants, functions and tuples of functions."""
    operators = operator_names(model)
    needed = set()
    # The main graph has the constants, so process it after the graphs that may need one.
    for graph in [*model.functions, model.graph]:
        needed.update(output.name for output in graph.output)
        kept = []
        for node in reversed(graph.node):
            operator = operators.get(node.op_type, node.op_type)
            if operator not in ("MakeTuple", "Partial", "Constant") or needed.intersection(node.output):
                kept.append(node)
                needed.update([*node.input, node.op_type.removeprefix(_CALL)])
        del graph.node[:]
        graph.node.extend(reversed(kept))
    functions = {function.name: function for function in model.functions}
    reached = set()
    new = [model.graph]
    while new:
        names = {name for node in new.pop().node for name in node.input if name in functions} - reached
        new += [functions[name] for name in names]
        reached |= names
    for name in functions.keys() - reached:
        model.functions.remove(functions[name])


class Collective(NamedTuple):
    """A collective operator: its class, its group, its purpose, and its node and primitive in the program."""

    operator: str
    group: str
    purpose: str
    node: Any
    primitive: Any


def collectives_of(model):
    primitives = {f"{_CALL}{each.name}": each for each in model.primitives if each.op_type in COLLECTIVES}
    sent = []
    for node in (node for graph in [model.graph, *model.functions] for node in graph.node):
        if node.op_type in primitives:
            primitive = primitives[node.op_type]
            purposes = (purpose for part, purpose in _PURPOSES if part in primitive.instance_name)
            purpose, group = next(purposes, "something else"), attribute_of(primitive, "group", "")
            sent.append(Collective(primitive.op_type, group, purpose, node, primitive))
    return sent


def attribute_of(primitive, name, default):
    """Return an attribute of a primitive (a string or a number, as ``default``), or ``default``."""
    found = next((attribute for attribute in primitive.attribute if attribute.name == name), None)
    value = default if found is None else found.s if isinstance(default, str) else found.i
    return value.decode() if isinstance(value, bytes) else value
