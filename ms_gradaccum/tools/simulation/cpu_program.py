"""Run the program that the compiler partitioned for several devices on as many CPU processes, to see its numbers.

What the CPU lacks is put together of what it has: it adds up in any group, but gathers over all processes only, and it
scatters nothing.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import create_group
from mindspore.parallel._tensor import _load_tensor_by_layout
from mindspore.train import mind_ir_pb2

from ms_gradaccum.parallel.world import gather_values
from ms_gradaccum.tools.simulation.collectives import groups_of, text_of
from ms_gradaccum.tools.simulation.partition import WORLD_GROUP

_CPU_WORLD_GROUP = "mccl_world_group"
_SLICE = "ScatteredRows"
_Kind = mind_ir_pb2.AttributeProto.AttributeType
_FUNCTION = mind_ir_pb2.PrimitiveProto.PrimType.Value("PRIMITIVE_FUNCTION")

Values = dict[str, np.ndarray[Any, Any]]


class CpuProgram:
    """One rank's part of a training step, with its parameters, callable. Collective.

    Args:
        model: The inlined program of this rank.
        values: The whole parameters at the start, by name.
        layouts: How the compiler has laid out parameters over the ranks, by name: ``Cell.parameter_layout_dict``.
        rank: Number of this rank.
    """

    def __init__(self, model: Any, values: Values, layouts: dict[str, Any], rank: int) -> None:
        members = _create_groups(groups_of(model), rank)
        replica = mind_ir_pb2.ModelProto()
        replica.CopyFrom(model)
        _Rewriter(replica, members, rank).rewrite()
        shapes = {plain_name(parameter.name): tuple(parameter.dims) for parameter in model.graph.parameter}
        parts = {name: own_part(values[name], layouts.get(name), rank) for name in shapes}
        for name, shape in shapes.items():
            if parts[name].shape != shape:
                raise ValueError(f"the part of {name} has the shape {parts[name].shape}, but the program's is {shape}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.mindir"
            path.write_bytes(replica.SerializeToString())
            self.cell = nn.GraphCell(
                ms.load(str(path)), params_init={name: Tensor(part) for name, part in parts.items()}
            )

    def __call__(self, *inputs: Tensor) -> Any:
        return self.cell(*inputs)

    def values(self) -> Values:
        """Return this rank's parts of the parameters."""
        return {plain_name(parameter.name): parameter.asnumpy() for parameter in self.cell.get_parameters()}


def whole_values(cell: nn.Cell) -> Values:
    """Return the whole parameters of ``cell``, before a rank takes its part."""
    for parameter in cell.get_parameters():
        parameter.init_data()
    return {parameter.name: parameter.asnumpy().copy() for parameter in cell.get_parameters()}


def plain_name(name: str) -> str:
    """Return the name of a parameter of a program as its cell has it."""
    return name.rpartition(":")[2]


def own_part(value: np.ndarray[Any, Any], layout: Any, rank: int) -> np.ndarray[Any, Any]:
    """Return what ``rank`` holds of a parameter. The groups of its program must exist."""
    if layout is None:
        return value
    return np.ascontiguousarray(_load_tensor_by_layout(Tensor(value), tuple(layout), rank).asnumpy())


def _create_groups(names: Iterable[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Create the groups of this rank's program, and return their members. Collective.

    A name stands for its ranks, so its members are the ranks that have it. Not each program says them.
    """
    everyone = gather_values(sorted(names))
    members = {name: tuple(i for i, theirs in enumerate(everyone) if name in theirs) for name in everyone[rank]}
    for name, ranks in members.items():
        if name not in _created and name != WORLD_GROUP:
            create_group(name, list(ranks))
            _created.add(name)
    return members


_created: set[str] = set()


class _Rewriter:
    """Puts operators that the CPU has in the place of those that it has not."""

    def __init__(self, model: Any, members: dict[str, tuple[int, ...]], rank: int) -> None:
        self.model = model
        self.members = members
        self.rank = rank
        self.gathers: dict[str, tuple[int, ...]] = {}
        self.scatters: dict[str, tuple[int, ...]] = {}

    def rewrite(self) -> None:
        for primitive in self.model.primitives:
            self._rewrite_primitive(primitive)
        if self.scatters:
            self.model.primitives.add(name=_SLICE, op_type="StridedSlice", prim_type=_FUNCTION)
        for graph in [self.model.graph, *self.model.functions]:
            nodes = list(graph.node)
            del graph.node[:]
            for node in nodes:
                graph.node.extend(self._replaced(node))

    def _rewrite_primitive(self, primitive: Any) -> None:
        group = text_of(primitive, "group")
        if primitive.op_type in ("AlltoAll", "AllToAll", "NeighborExchange"):
            raise NotImplementedError(f"{primitive.op_type}, which CPU lacks")
        if primitive.op_type == "ReduceScatter":
            self.scatters[f"REF::{primitive.name}"] = self.members[group]
            _make_all_reduce(primitive)
        elif primitive.op_type == "AllGather" and group != WORLD_GROUP:
            self.gathers[f"REF::{primitive.name}"] = self.members[group]
            _make_all_reduce(primitive)
        for attribute in primitive.attribute:
            if attribute.name == "group" and group == WORLD_GROUP:
                attribute.s = _CPU_WORLD_GROUP.encode()

    def _replaced(self, node: Any) -> list[Any]:
        if node.op_type in self.scatters:
            return self._scattered(node, self.scatters[node.op_type])
        if node.op_type in self.gathers:
            return self._gathered(node, self.gathers[node.op_type])
        return [node]

    def _scattered(self, node: Any, ranks: tuple[int, ...]) -> list[Any]:
        """Return nodes that add up the whole and keep one's rows."""
        part = _shape_of(node)
        total = mind_ir_pb2.NodeProto()
        total.CopyFrom(node)
        total.name, total.output[0] = node.name + "_total", node.output[0] + "_total"
        begin = [ranks.index(self.rank) * part[0]] + [0] * (len(part) - 1)
        bounds = [begin, [first + length for first, length in zip(begin, part)], [1] * len(part)]
        constants = [_constant(f"{node.output[0]}_bound{i}", bound) for i, bound in enumerate(bounds)]
        mask = _constant(f"{node.output[0]}_mask", 0)
        rows = mind_ir_pb2.NodeProto()
        rows.CopyFrom(node)
        rows.op_type = f"REF::{_SLICE}"
        del rows.input[:]
        rows.input.extend([total.output[0], *(constant.name for constant in constants), *[mask.name] * 5])
        return [*constants, mask, total, rows]

    def _gathered(self, node: Any, ranks: tuple[int, ...]) -> list[Any]:
        """Return nodes that put one's rows between zeros and add up."""
        whole = _shape_of(node)
        rows = whole[0] // len(ranks)
        before = ranks.index(self.rank) * rows
        pads = [(before, whole[0] - rows - before)] + [(0, 0)] * (len(whole) - 1)
        name = f"PaddedRows:{len(self.model.primitives)}"
        pad = self.model.primitives.add(name=name, op_type="Pad", prim_type=_FUNCTION)
        paddings = pad.attribute.add(name="paddings", type=_Kind.Value("TUPLE"))
        for pair in pads:
            values = paddings.values.add(type=_Kind.Value("TUPLE"))
            for number in pair:
                values.values.add(ints=[number], type=_Kind.Value("INT64"))
        padded = mind_ir_pb2.NodeProto()
        padded.CopyFrom(node)
        padded.op_type = f"REF::{name}"
        padded.name, padded.output[0] = node.name + "_padded", node.output[0] + "_padded"
        node.input[0] = padded.output[0]
        return [padded, node]


def _make_all_reduce(primitive: Any) -> None:
    primitive.op_type = "AllReduce"
    kept = [attribute for attribute in primitive.attribute if attribute.name not in ("rank_size", "op")]
    del primitive.attribute[:]
    primitive.attribute.extend(kept)
    primitive.attribute.add(name="op", s=b"sum", type=_Kind.Value("STRING"))


def _shape_of(node: Any) -> list[int]:
    return list(next(attribute for attribute in node.attribute if attribute.name == "shape").tensors[0].dims)


def _constant(name: str, value: int | list[int]) -> Any:
    node = mind_ir_pb2.NodeProto(name=name, output=[name], op_type="Constant")
    if isinstance(value, int):
        node.attribute.add(name="value", i=value, type=_Kind.Value("INT64"))
        return node
    attribute = node.attribute.add(name="value", type=_Kind.Value("TUPLE"))
    for item in value:
        attribute.values.add(ints=[item], type=_Kind.Value("INT64"))
    return node
