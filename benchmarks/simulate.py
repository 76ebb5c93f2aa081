"""Compile a training step for several GPUs on a machine without them, and list what each of them sends and holds."""

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from mindspore import Tensor
from mindspore.parallel._auto_parallel_context import auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import mind_ir_pb2

from ms_gradaccum import Model, TrainOneStepCell
from ms_gradaccum.batch.arguments import as_call
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import Job

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from built_for import built_for  # noqa: E402
from simulation.cpu_program import plain_name  # noqa: E402
from simulation.cuda_stubs import stand_ins  # noqa: E402
from simulation.partition import (  # noqa: E402
    WORLD_GROUP,
    Collective,
    attribute_of,
    collectives_of,
    connect,
    partition,
)

_OWNER = "simulate"
# The dtypes of 1, 2, 4 and 8 bytes.
_NAMES = ("BOOL INT8 UINT8", "FLOAT16 BFLOAT16 INT16 UINT16", "FLOAT INT32 UINT32", "DOUBLE FLOAT64 INT64 UINT64")
_DTYPES = mind_ir_pb2.TensorProto.DataType
_BYTES = {_DTYPES.Value(name): 1 << i for i, names in enumerate(_NAMES) for name in names.split()}


class MessageKind(NamedTuple):
    """The messages of an update with the same operator, purpose and group: that of rank 0, of so many ranks."""

    operator: str
    purpose: str
    size: int
    ranks: tuple[int, ...] | None
    count: int
    nbytes: int


class Program(NamedTuple):
    """The compiled step of one device: its messages, what it holds between updates, and what compiling took."""

    messages: tuple[MessageKind, ...]
    held_bytes: dict[str, int]
    compile_seconds: float
    compile_bytes: int


def simulate(build: str, devices: int = 8, timeout: float = 3600.0) -> Program:
    """Return the program of the first of so many devices. ``build`` is the place of a function as 'train.py:build'.

    The function returns a training step, or a Model, and the batch of all devices together.
    """
    builder = Builder.of(build)._replace(device=["CPU"])
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, stand_ins(Path(folder))):
        with Job(devices, work, builder, os.getcwd()) as job:
            program: Program = job.wait(timeout)[0]
            return program


def work(builder: Builder, home: str) -> Iterator[Program | None]:
    """Do the part of one rank. The programs of all devices have the same size, so one is enough."""
    rank, size = connect()
    yield compiled(*built(builder, home), size) if rank == 0 else None


def built(builder: Builder, home: str) -> tuple[TrainOneStepCell, tuple[Any, ...]]:
    """Call the function in its folder. Return the step, and the batch as the network takes it."""
    before = os.getcwd()
    os.chdir(home)
    try:
        with built_for("GPU"):
            made, batch = builder.call()
    finally:
        os.chdir(before)
    step = made
    if isinstance(made, Model):
        step = made._train_network.set_train()
        if isinstance(made._network, AutoParallel):
            step.body.kind = SemiAuto(made._network)
    args, kwargs = as_call(_OWNER, batch)
    return step, step.network.positional(args, kwargs)


def pieces_of(step: TrainOneStepCell, batch: tuple[Any, ...], size: int) -> list[Any]:
    """Return a piece of each input with the size of one device's part in the dataset strategy."""
    settings = step.body.kind.auto_parallel
    strategy = auto_parallel_context().get_dataset_strategy()
    if settings is not None:
        strategy = settings._dataset_strategy_config
    if isinstance(strategy, str):
        rows = 1 if strategy == "full_batch" else size
        strategy = [(rows,)] * len(batch)
    pieces = []
    for item, parts in zip(batch, strategy, strict=True):
        part = tuple(slice(length // n) for length, n in zip(item.shape, parts))
        # The compiler uses only its shape.
        pieces.append(Tensor(item.asnumpy()[part]))
    return pieces


def compiled(step: TrainOneStepCell, batch: tuple[Any, ...], size: int) -> Program:
    """Return the program of a step."""
    inputs = pieces_of(step, batch, size)
    names = {parameter.name for parameter in step.network.get_parameters()}
    begin = time.monotonic()
    model = partition(step, *inputs)
    seconds = time.monotonic() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = {"parameters": 0, "optimizer state": 0, "buffer": 0}
    for parameter in model.graph.parameter:
        name = plain_name(parameter.name)
        kind = "parameters" if name in names else "optimizer state"
        held["buffer" if name.startswith("accu_grads.") else kind] += tensor_bytes(parameter)
    return Program(messages_of(model, size), held, seconds, peak)


def messages_of(model: Any, devices: int) -> tuple[MessageKind, ...]:
    """Return the messages of an inlined program by kind, with the most bytes first."""
    collectives = collectives_of(model)
    groups = {sent.group: ranks for sent in collectives if (ranks := ranks_of(sent))}
    totals: dict[tuple[str, str, int, tuple[int, ...] | None], list[int]] = defaultdict(list)
    for sent in collectives:
        ranks = groups.get(sent.group)
        # The name of a smaller group begins with its size.
        size = len(ranks) if ranks else devices if sent.group == WORLD_GROUP else int(sent.group.partition("-")[0])
        ranks = tuple(range(devices)) if size == devices else ranks
        totals[sent.operator, sent.purpose, size, ranks].append(bytes_of(sent))
    kinds = (MessageKind(*kind, len(sizes), sum(sizes)) for kind, sizes in totals.items())
    return tuple(sorted(kinds, key=lambda kind: -kind.nbytes))


def ranks_of(sent: Collective) -> tuple[int, ...] | None:
    """Return the ranks of a group, if its operator lists them."""
    listed = attribute_of(sent.primitive, "group_ranks", "")
    return tuple(map(int, listed.split("-"))) if listed[:1].isdigit() else None


def bytes_of(sent: Collective) -> int:
    """Return the bytes that each rank sends."""
    outputs = (tensor for each in sent.node.attribute if each.name == "shape" for tensor in each.tensors)
    nbytes, size = sum(map(tensor_bytes, outputs)), attribute_of(sent.primitive, "rank_size", 1)
    return {"AllGather": nbytes // size, "ReduceScatter": nbytes * size}.get(sent.operator, nbytes)


def tensor_bytes(tensor: Any) -> int:
    return int(np.prod(list(tensor.dims), dtype=np.int64)) * _BYTES[tensor.data_type]
