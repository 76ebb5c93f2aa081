"""The messages of a partitioned program: its collective operators, read from the MindIR."""

from typing import Any, NamedTuple

import numpy as np
from mindspore.train import mind_ir_pb2

from ms_gradaccum.tools.simulation.report import MessageKind

WORLD_GROUP = "nccl_world_group"
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll", "Broadcast", "NeighborExchange")

# Parts of the names that the compiler gives to the operators that it inserts, with their purposes. The first match
# counts.
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
_ENUM = mind_ir_pb2.TensorProto.DataType
_BYTES = {
    _ENUM.Value(name): size
    for size, names in {
        1: ("BOOL", "INT8", "UINT8"),
        2: ("FLOAT16", "BFLOAT16", "INT16", "UINT16"),
        4: ("FLOAT", "INT32", "UINT32"),
        8: ("DOUBLE", "FLOAT64", "INT64", "UINT64"),
    }.items()
    for name in names
}


class Collective(NamedTuple):
    """One collective operator of a program.

    Attributes:
        operator: Its class in ``mindspore.ops``.
        group: The name of its group.
        purpose: The purpose for which the compiler inserted it.
        nbytes: Size of the tensor that each rank passes in. Unit: bytes.
    """

    operator: str
    group: str
    purpose: str
    nbytes: int


def collectives_of(model: Any) -> list[Collective]:
    """Return the messages of one run of an inlined program, in the order of the program."""
    primitives = {f"REF::{primitive.name}": primitive for primitive in model.primitives}
    sent = []
    for graph in [model.graph, *model.functions]:
        for node in graph.node:
            primitive = primitives.get(node.op_type)
            if primitive is not None and primitive.op_type in COLLECTIVES:
                ranks = number_of(primitive, "rank_size", 1)
                nbytes = output_bytes(node)
                if primitive.op_type == "AllGather":
                    nbytes //= ranks
                elif primitive.op_type == "ReduceScatter":
                    nbytes *= ranks
                purpose = _purpose(primitive.instance_name)
                sent.append(Collective(primitive.op_type, text_of(primitive, "group"), purpose, nbytes))
    return sent


def messages_of(model: Any, devices: int) -> tuple[MessageKind, ...]:
    """Return the messages of an inlined program by kind, those with the most bytes first."""
    groups = groups_of(model)
    totals: dict[Any, list[int]] = {}
    for sent in collectives_of(model):
        ranks = groups[sent.group]
        # The name of a smaller group begins with its size.
        size = len(ranks) if ranks else devices if sent.group == WORLD_GROUP else int(sent.group.partition("-")[0])
        # MindSpore's cell is compiled for rank 1, whose groups are those of rank 0 with all ranks moved on.
        ranks = tuple(rank - ranks[0] for rank in ranks) if ranks else None
        ranks = tuple(range(devices)) if size == devices else ranks
        total = totals.setdefault((sent.operator, sent.purpose, size, ranks), [0, 0])
        total[0] += 1
        total[1] += sent.nbytes
    kinds = (MessageKind(*kind, *total) for kind, total in totals.items())
    return tuple(sorted(kinds, key=lambda kind: -kind.nbytes))


def groups_of(model: Any) -> dict[str, tuple[int, ...] | None]:
    """Return the groups of a program with their ranks, None where the program does not list them."""
    groups: dict[str, tuple[int, ...] | None] = {}
    for primitive in model.primitives:
        if primitive.op_type in COLLECTIVES:
            name, ranks = text_of(primitive, "group"), text_of(primitive, "group_ranks")
            groups.setdefault(name, None)
            if ranks[:1].isdigit():
                groups[name] = tuple(int(rank) for rank in ranks.split("-"))
    return groups


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, from its shape and its dtype in the program."""
    return int(np.prod(list(tensor.dims), dtype=np.int64)) * _BYTES[tensor.data_type]


def output_bytes(node: Any) -> int:
    """Return the bytes of all outputs of a node."""
    shape = next((attribute for attribute in node.attribute if attribute.name == "shape"), None)
    return 0 if shape is None else sum(map(tensor_bytes, shape.tensors))


def text_of(primitive: Any, name: str) -> str:
    """Return an attribute of a primitive as text, "" if it has none."""
    value = next((attribute.s for attribute in primitive.attribute if attribute.name == name), b"")
    return value.decode() if isinstance(value, bytes) else value


def number_of(primitive: Any, name: str, default: int) -> int:
    """Return an attribute of a primitive as a number, ``default`` if it has none."""
    return next((attribute.i for attribute in primitive.attribute if attribute.name == name), default)


def _purpose(instance_name: str) -> str:
    return next((purpose for part, purpose in _PURPOSES if part in instance_name), "something else")
