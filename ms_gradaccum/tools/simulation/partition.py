"""Compile for several GPUs on processes that have none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.train import mind_ir_pb2

from ms_gradaccum.backend.compiled import graph_mode, program_of
from ms_gradaccum.tools.simulation.collectives import WORLD_GROUP
from ms_gradaccum.tools.simulation.inlining import inlined


def connect() -> tuple[int, int]:
    """Connect this process to the others; return its rank and their number."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    # The compiler asks for the ranks of the group that NCCL would have made.
    create_group(WORLD_GROUP, list(range(get_group_size())))
    return get_rank(), get_group_size()


@contextmanager
def gpu_target() -> Iterator[None]:
    """Make the compiler see a GPU as the device of this machine."""
    context = MSContext.get_instance()
    context.set_param(ms_ctx_param.device_target, "GPU")
    try:
        yield
    finally:
        context.set_param(ms_ctx_param.device_target, "CPU")


def partition(cell: nn.Cell, *inputs: Tensor) -> Any:
    """Return the program that the compiler makes for this rank out of ``cell``, as a MindIR model without calls."""
    # In a phase of export the back end does not run, which would look for the device.
    cell.phase = "export.train"
    with graph_mode():
        cell.compile(*inputs)
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(program_of(cell))
    return inlined(model)
