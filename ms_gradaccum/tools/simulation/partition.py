"""Compile for several GPUs on a machine that has none, and count what the compiler made of a cell."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.graph.api import _cell_graph_executor
from mindspore.train import mind_ir_pb2

from ms_gradaccum.backend.compiled import graph_mode

GPU_GROUP = "nccl_world_group"


def connect() -> tuple[int, int]:
    """Connect this process to the others; return its rank and their number."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    # The compiler asks for the ranks of the group that NCCL would have made.
    create_group(GPU_GROUP, list(range(get_group_size())))
    return get_rank(), get_group_size()


@contextmanager
def gpu_target() -> Iterator[None]:
    """Let the compiler believe in GPUs."""
    context = MSContext.get_instance()
    context.set_param(ms_ctx_param.device_target, "GPU")
    try:
        yield
    finally:
        context.set_param(ms_ctx_param.device_target, "CPU")


def partition(cell: nn.Cell, *inputs: Tensor) -> Any:
    """Return the program that the compiler makes for this rank out of ``cell``, as a MindIR model."""
    # A phase of export: what follows, the back end, would look for the device.
    cell.phase = "export.train"
    with graph_mode():
        cell.compile(*inputs)
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(_cell_graph_executor._get_func_graph_proto(cell, cell.current_phase, "mind_ir"))
    return model


def graphs_of(model: Any) -> list[Any]:
    """Return the main graph of a program and those that it calls."""
    return [model.graph, *model.functions]


def count_operators(model: Any) -> dict[str, int]:
    """Count the operators of a program by name, and its gradient reductions under the name of their purpose."""
    primitives = {f"REF::{primitive.name}": primitive for primitive in model.primitives}
    counts: Counter[str] = Counter()
    for graph in graphs_of(model):
        for node in graph.node:
            primitive = primitives.get(node.op_type)
            if primitive is None:
                continue
            counts[primitive.op_type] += 1
            if primitive.op_type in ("AllReduce", "ReduceScatter", "AllGather"):
                counts[f"{primitive.op_type} {_purpose(primitive.instance_name)}"] += 1
    return dict(counts)


def _purpose(instance_name: str) -> str:
    """Return why the compiler put a communication operator there."""
    if instance_name.startswith(("grad_mirror", "grad_parallel_optimizer", "_grad_accumulation_shard_grad")):
        return "of gradients"
    if "global_norm" in instance_name or "PARALLEL_GLOBALNORM" in instance_name:
        return "of the norm"
    return "of something else"
