"""Run the program that the compiler partitioned for several GPUs on as many CPU processes, to see its numbers."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2

from ms_gradaccum.tools.simulation.partition import GPU_GROUP, graphs_of

# Of the same length: nothing else in the file has to move.
CPU_GROUP = GPU_GROUP.replace("nccl", "mccl")
_SLICE = "ScatteredRows"


class PartitionedProgram:
    """One rank's part of a training step, with its parameters, callable."""

    def __init__(self, model: Any, values: dict[str, np.ndarray[Any, Any]], rank: int, path: str) -> None:
        replica = mind_ir_pb2.ModelProto()
        replica.CopyFrom(model)
        _for_cpu(replica, rank)
        with open(path, "wb") as file:
            file.write(replica.SerializeToString())
        shapes = {_plain(parameter.name): tuple(parameter.dims) for parameter in model.graph.parameter}
        parts = {name: Tensor(part_of(values[name], shape, rank)) for name, shape in shapes.items()}
        self.cell = nn.GraphCell(ms.load(path), params_init=parts)
        self.full_shapes = {name: values[name].shape for name in shapes}

    def __call__(self, *inputs: Tensor) -> Any:
        return self.cell(*inputs)

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return this rank's parts of the parameters."""
        return {_plain(parameter.name): parameter.asnumpy() for parameter in self.cell.get_parameters()}


def values_of(cell: nn.Cell) -> dict[str, np.ndarray[Any, Any]]:
    """Return the whole parameters of ``cell``, before a rank takes its part."""
    for parameter in cell.get_parameters():
        parameter.init_data()
    return {parameter.name: parameter.asnumpy().copy() for parameter in cell.get_parameters()}


def _plain(name: str) -> str:
    return name.rpartition(":")[2]


def part_of(value: np.ndarray[Any, Any], shape: tuple[int, ...], rank: int) -> np.ndarray[Any, Any]:
    """Return the rows that ``rank`` holds; parameters are sharded on axis 0."""
    if value.shape == shape:
        return value
    parts = value.shape[0] // shape[0]
    return np.ascontiguousarray(np.split(value, parts)[rank % parts])


def _for_cpu(model: Any, rank: int) -> None:
    scatters = set()
    for primitive in model.primitives:
        for attribute in primitive.attribute:
            if attribute.s == GPU_GROUP.encode() or attribute.s == GPU_GROUP:
                attribute.s = CPU_GROUP if isinstance(attribute.s, str) else CPU_GROUP.encode()
        if primitive.op_type == "ReduceScatter":
            scatters.add(f"REF::{primitive.name}")
            _make_all_reduce(primitive)
    if scatters:
        model.primitives.add(
            name=_SLICE,
            op_type="StridedSlice",
            prim_type=mind_ir_pb2.PrimitiveProto.PrimType.Value("PRIMITIVE_FUNCTION"),
        )
    for graph in graphs_of(model):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            graph.node.extend(_scattered(node, rank) if node.op_type in scatters else [node])


def _make_all_reduce(primitive: Any) -> None:
    primitive.op_type = "AllReduce"
    kept = [attribute for attribute in primitive.attribute if attribute.name != "rank_size"]
    del primitive.attribute[:]
    primitive.attribute.extend(kept)


def _scattered(node: Any, rank: int) -> list[Any]:
    """Return the nodes that do on CPU, which has no ReduceScatter, what ``node`` did: sum all, keep one's rows."""
    part = list(next(attribute for attribute in node.attribute if attribute.name == "shape").tensors[0].dims)
    total = mind_ir_pb2.NodeProto()
    total.CopyFrom(node)
    total.name, total.output[0] = node.name + "_total", node.output[0] + "_total"
    begin = [rank * part[0]] + [0] * (len(part) - 1)
    bounds = [begin, [first + length for first, length in zip(begin, part)], [1] * len(part)]
    constants = [_constant(f"{node.output[0]}_bound{i}", bound) for i, bound in enumerate(bounds)]
    masks = [_constant(f"{node.output[0]}_mask", 0)]
    rows = mind_ir_pb2.NodeProto()
    rows.CopyFrom(node)
    rows.op_type = f"REF::{_SLICE}"
    del rows.input[:]
    rows.input.extend([total.output[0], *(constant.name for constant in constants), *[masks[0].name] * 5])
    return [*constants, *masks, total, rows]


def _constant(name: str, value: Any) -> Any:
    node = mind_ir_pb2.NodeProto(name=name, output=[name], op_type="Constant")
    kinds = mind_ir_pb2.AttributeProto.AttributeType
    if isinstance(value, int):
        node.attribute.add(name="value", i=value, type=kinds.Value("INT64"))
        return node
    attribute = node.attribute.add(name="value", type=kinds.Value("TUPLE"))
    for item in value:
        attribute.values.add(ints=[item], type=kinds.Value("INT64"))
    return node
