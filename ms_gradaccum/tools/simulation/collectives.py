"""The messages of a partitioned program: its collective operators, read from the MindIR."""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from mindspore.train import mind_ir_pb2

from ms_gradaccum.tools.simulation.report import MessageKind

WORLD_GROUP = "nccl_world_group"
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll", "Broadcast", "NeighborExchange")

# Parts of the names that the compiler gives to the operators that it inserts. The first match tells their purpose.
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
# The dtypes of 1, 2, 4 and 8 bytes.
_NAMES = ("BOOL INT8 UINT8", "FLOAT16 BFLOAT16 INT16 UINT16", "FLOAT INT32 UINT32", "DOUBLE FLOAT64 INT64 UINT64")
_DTYPES = mind_ir_pb2.TensorProto.DataType
_BYTES = {_DTYPES.Value(name): 1 << i for i, names in enumerate(_NAMES) for name in names.split()}


class Collective(NamedTuple):
    """A collective operator: its class, its group, its purpose, and the bytes of the tensor that each rank passes."""

    operator: str
    group: str
    # None if this operator does not list them.
    ranks: tuple[int, ...] | None
    purpose: str
    nbytes: int


def collectives_of(model: Any) -> list[Collective]:
    """Return the messages of one run of an inlined program, in the order of the program."""
    primitives = {f"REF::{each.name}": each for each in model.primitives if each.op_type in COLLECTIVES}
    sent = []
    for node in (node for graph in [model.graph, *model.functions] for node in graph.node):
        if node.op_type in primitives:
            primitive = primitives[node.op_type]
            group, listed = attribute_of(primitive, "group", ""), attribute_of(primitive, "group_ranks", "")
            ranks = tuple(map(int, listed.split("-"))) if listed[:1].isdigit() else None
            purposes = (purpose for part, purpose in _PURPOSES if part in primitive.instance_name)
            outputs = (tensor for each in node.attribute if each.name == "shape" for tensor in each.tensors)
            nbytes, size = sum(map(tensor_bytes, outputs)), attribute_of(primitive, "rank_size", 1)
            nbytes = {"AllGather": nbytes // size, "ReduceScatter": nbytes * size}.get(primitive.op_type, nbytes)
            sent.append(Collective(primitive.op_type, group, ranks, next(purposes, "something else"), nbytes))
    return sent


def messages_of(model: Any, devices: int) -> tuple[MessageKind, ...]:
    """Return the messages of an inlined program by kind, those with the most bytes first."""
    collectives = collectives_of(model)
    groups = {sent.group: sent.ranks for sent in collectives if sent.ranks}
    totals: dict[tuple[str, str, int, tuple[int, ...] | None], list[int]] = defaultdict(list)
    for sent in collectives:
        ranks = groups.get(sent.group)
        # The name of a smaller group begins with its size.
        size = len(ranks) if ranks else devices if sent.group == WORLD_GROUP else int(sent.group.partition("-")[0])
        # MindSpore's cell is compiled for rank 1, whose groups are those of rank 0 with all ranks moved on.
        ranks = (
            tuple(range(devices)) if size == devices else tuple(rank - ranks[0] for rank in ranks) if ranks else None
        )
        totals[sent.operator, sent.purpose, size, ranks].append(sent.nbytes)
    kinds = (MessageKind(*kind, len(sizes), sum(sizes)) for kind, sizes in totals.items())
    return tuple(sorted(kinds, key=lambda kind: -kind.nbytes))


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, from its shape and its dtype in the program."""
    return int(np.prod(list(tensor.dims), dtype=np.int64)) * _BYTES[tensor.data_type]


def attribute_of(primitive: Any, name: str, default: str | int) -> Any:
    """Return an attribute of a primitive, which is a text or a number as the default is, or the default."""
    found = next((attribute for attribute in primitive.attribute if attribute.name == name), None)
    value = default if found is None else found.s if isinstance(default, str) else found.i
    return value.decode() if isinstance(value, bytes) else value
