"""Run the program that the compiler has partitioned for several devices on as many CPU processes.

CPU has AllReduce of float sums in any group, and AllGather over all processes. The other collective operators are
replaced by an AllGather over all processes and local operators.
"""

import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import create_group, get_group_size
from mindspore.parallel._tensor import _load_tensor_by_layout
from mindspore.train import mind_ir_pb2

from ms_gradaccum.parallel.world import gather_values
from simulation.partition import COLLECTIVES, WORLD_GROUP, attribute_of, collectives_of

Values = dict[str, np.ndarray[Any, Any]]
_CPU_WORLD_GROUP = "mccl_world_group"
_Kind = mind_ir_pb2.AttributeProto.AttributeType
_FUNCTION = mind_ir_pb2.PrimitiveProto.PrimType.Value("PRIMITIVE_FUNCTION")
_DataType = mind_ir_pb2.TensorProto.DataType
_FLOATS = (_DataType.Value("FLOAT"), _DataType.Value("FLOAT16"))
_created = set()


def own_part(value, layout, rank):
    """Return the part of a parameter that ``rank`` holds. The groups of its program must exist."""
    if layout is None:
        return value
    return np.ascontiguousarray(_load_tensor_by_layout(Tensor(value), tuple(layout), rank).asnumpy())


class CpuProgram:
    """One rank's part of a training step, with its parts of the whole ``values``. All ranks must build and call it."""

    def __init__(self, model, values, layouts, rank):
        members = _create_groups({sent.group for sent in collectives_of(model)}, rank)
        replica = deepcopy(model)
        _Rewriter(replica, members, rank, get_group_size()).rewrite()
        shapes = {plain_name(parameter.name): tuple(parameter.dims) for parameter in model.graph.parameter}
        parts = own_parts({name: values[name] for name in shapes}, layouts, rank)
        if {name: part.shape for name, part in parts.items()} != shapes:
            raise ValueError(f"the parts of the parameters have other shapes than the program's: {shapes}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.mindir"
            path.write_bytes(replica.SerializeToString())
            own = {name: Tensor(part) for name, part in parts.items()}
            self.cell = nn.GraphCell(ms.load(str(path)), params_init=own)

    def __call__(self, *inputs):
        return self.cell(*inputs)

    def values(self):
        return {plain_name(parameter.name): parameter.asnumpy() for parameter in self.cell.get_parameters()}


def whole_values(cell):
    """Return the parameters of ``cell`` before the compiler splits them."""
    for parameter in cell.get_parameters():
        parameter.init_data()
    return {parameter.name: parameter.asnumpy().copy() for parameter in cell.get_parameters()}


def plain_name(name):
    return name.rpartition(":")[2]


def own_parts(values, layouts, rank):
    return {name: own_part(value, layouts.get(name), rank) for name, value in values.items()}


def _create_groups(names, rank):
    """Create the groups of this rank's program, and return their members: the ranks with that group. Collective."""
    everyone = gather_values("builds its groups", sorted(names))
    members = {name: tuple(i for i, theirs in enumerate(everyone) if name in theirs) for name in everyone[rank]}
    # All ranks create the groups in the same order, or they would wait for each other.
    for name in sorted(members.keys() - _created - {WORLD_GROUP}):
        create_group(name, list(members[name]))
        _created.add(name)
    return members


class _Rewriter:
    def __init__(self, model, members, rank, size):
        self.model, self.members, self.rank, self.everyone = model, members, rank, tuple(range(size))
        # The nodes that replace one collective operator, and the total number of constants.
        self.made, self.constants = list[Any](), 0

    def rewrite(self):
        collectives = {f"REF::{each.name}": each for each in self.model.primitives if each.op_type in COLLECTIVES}
        for graph in [self.model.graph, *self.model.functions]:
            nodes = list(graph.node)
            del graph.node[:]
            for node in nodes:
                primitive = collectives.get(node.op_type)
                graph.node.extend([node] if primitive is None else self._on_cpu(node, primitive))
        for primitive in collectives.values():
            for attribute in primitive.attribute:
                if attribute.name == "group" and attribute_of(primitive, "group", "") == WORLD_GROUP:
                    attribute.s = _CPU_WORLD_GROUP.encode()

    def _on_cpu(self, node, primitive):
        self.made = []
        operator, reduction = primitive.op_type, attribute_of(primitive, "op", "sum")
        tensor = next(attribute for attribute in node.attribute if attribute.name == "shape").tensors[0]
        if operator not in ("AllReduce", "AllGather", "ReduceScatter") or reduction != "sum":
            raise NotImplementedError(f"{operator} with {reduction}, which these programs do not have")
        if tensor.data_type not in _FLOATS:
            raise NotImplementedError(f"{operator} of {_DataType.Name(tensor.data_type)}, which CPU lacks")
        if operator == "AllReduce":
            return [node]
        ranks = self.members[attribute_of(primitive, "group", "")]
        (rows, *rest), value, output, count = list(tensor.dims), node.input[0], node.output[0], len(ranks)
        if operator == "AllGather":
            parts = self._of_ranks(value, [rows // count, *rest], ranks, output)
            self._add("Reshape", [parts, self._constant([rows, *rest])], output)
            return self.made
        whole = self._of_ranks(value, [rows * count, *rest], ranks, output)
        begin, zeros = ranks.index(self.rank) * rows, [0] * len(rest)
        own = self._slice(whole, [0, begin, *zeros], [count, begin + rows, *rest], f"{output}_parts")
        # Whether to keep the axis, and whether to skip an empty one.
        self._add("ReduceSum", [own, self._constant([0]), *[self._constant(False)] * 2], output)
        return self.made

    def _of_ranks(self, value, shape, ranks, output):
        """Add nodes that gather the values of ``ranks`` in their order, on a new axis. Return their name."""
        row = self._add("Reshape", [value, self._constant([1, *shape])], f"{output}_row")
        size = len(self.everyone)
        rows = self._add("AllGather", [row], f"{output}_rows", group=_CPU_WORLD_GROUP, rank_size=size)
        if ranks == self.everyone:
            return rows
        zeros = [0] * len(shape)
        parts = [self._slice(rows, [i, *zeros], [i + 1, *shape], f"{output}_row_{i}") for i in ranks]
        some = self._add("MakeTuple", parts, f"{output}_tuple")
        return self._add("Concat", [some, self._constant(0)], f"{output}_some")

    def _slice(self, value, begin, end, output):
        bounds = [self._constant(bound) for bound in (begin, end, [1] * len(begin))]
        return self._add("StridedSlice", [value, *bounds, *[self._constant(0)] * 5], output)

    def _add(self, operator, inputs, output, **attributes):
        """Add a node and its primitive; return the name of its output."""
        name = f"{operator}:cpu{len(self.model.primitives)}"
        primitive = self.model.primitives.add(name=name, op_type=operator, prim_type=_FUNCTION)
        for key, value in attributes.items():
            content = {"s": value.encode()} if isinstance(value, str) else {"i": value}
            primitive.attribute.add(name=key, type=_Kind.Value("STRING" if "s" in content else "INT64"), **content)
        self.made.append(mind_ir_pb2.NodeProto(name=output, output=[output], op_type=f"REF::{name}", input=inputs))
        return output

    def _constant(self, value):
        name = f"cpu_constant_{self.constants}"
        self.constants += 1
        node = mind_ir_pb2.NodeProto(name=name, output=[name], op_type="Constant")
        kind = "TUPLE" if isinstance(value, list) else "BOOL" if isinstance(value, bool) else "INT64"
        attribute = node.attribute.add(name="value", type=_Kind.Value(kind))
        if isinstance(value, list):
            for item in value:
                attribute.values.add(ints=[item], type=_Kind.Value("INT64"))
        else:
            attribute.i = int(value)
        self.made.append(node)
        return name
