"""A process of a simulation: it builds the step, compiles it, and with `run` trains it."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel._auto_parallel_context import auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import Model, TrainOneStepCell
from ms_gradaccum._checks import argument_error, first_line
from ms_gradaccum.backend.compiled import graph_mode, inlined
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.batch.arguments import as_call
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.partitioned_step import PartitionedStep
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.whole_batch import MeanLoss, WholeBatch
from ms_gradaccum.training.step_output import OutputFields
from simulation.comparison import Values, compare
from simulation.cpu_program import CpuProgram, own_parts, plain_name, whole_values
from simulation.partition import connect, messages_of, partition, tensor_bytes
from simulation.report import Program

_OWNER = "simulate"
_Built = tuple[TrainOneStepCell, tuple[Any, ...]]


class Meeting(NamedTuple):
    """The folder of a job, and the rank of this process."""

    folder: Path
    rank: int


def work(builder: Builder, home: str, updates: int) -> Iterator[dict[str, Any]]:
    """Do the part of one rank, and yield its report."""
    rank, size = connect()
    meeting = Meeting(Path(os.environ["TMPDIR"]), rank)
    found: dict[str, Any] = {}
    build = partial(build_step, builder, home)
    # The programs of all devices have the same size, so without `run` one is enough.
    if rank == 0 or updates:
        step, batch = build()
        if updates:
            start = whole_values(step)
            if rank == 0:
                # All ranks start with the parameters of rank 0 before the compiler splits them.
                np.savez(meeting.folder / "start.npz", **start)
        model, found["ours"] = _compiled(step, batch, size)
        if updates:
            found["run"] = _run(meeting, size, build, step, model, batch, updates)
    yield found


def build_step(builder: Builder, home: str) -> _Built:
    """Call the user's function in its folder. Return the step, and the batch as the network takes it."""
    before = os.getcwd()
    os.chdir(home)
    try:
        with built_for("GPU"):
            made = builder.call()
    finally:
        os.chdir(before)
    parts = made if isinstance(made, tuple) else (made,)
    step = step_of(parts[0]) if isinstance(parts[0], Model) else parts[0]
    if len(parts) != 2 or not isinstance(step, TrainOneStepCell):
        got = f"one that returns {', '.join(type(each).__name__ for each in parts)}"
        remedy = "Return (TrainOneStepCell(AutoParallel(...), optimizer), batch), or a Model in its place."
        raise TypeError(argument_error(_OWNER, "build", "a function that returns (step, batch)", got, remedy))
    if not isinstance(step.body, PartitionedStep):
        raise ValueError(
            f"For '{_OWNER}', the argument 'build' must be a function that returns a partitioned step, "
            f"but got one without AutoParallel. Put its cell inside AutoParallel."
        )
    return step, step.network.positional(*as_call(_OWNER, parts[1]))


def step_of(model: Model) -> nn.Cell:
    """Return the step of a Model, with the modes and settings that the Model sets before training."""
    step = model._train_network.set_train()
    if isinstance(model._network, AutoParallel) and isinstance(step.body, PartitionedStep):
        step.body.kind = SemiAuto(model._network)
    return step


def _pieces(step: TrainOneStepCell, batch: tuple[Any, ...], size: int) -> list[Any]:
    """Return a piece of each input with the size of one device's part in the dataset strategy."""
    settings = step.body.kind.auto_parallel
    context = auto_parallel_context()
    strategy = context.get_dataset_strategy() if settings is None else settings._dataset_strategy_config
    count, rows = sum(isinstance(item, Tensor) for item in batch), 1 if strategy == "full_batch" else size
    strategies = [(rows,)] * count if isinstance(strategy, str) else list(strategy)
    if len(strategies) != count or not all(isinstance(n, int) for parts in strategies for n in parts):
        rule = f"'data_parallel', 'full_batch' or a tuple of ints for each of the {count} inputs"
        raise ValueError(argument_error(_OWNER, "dataset_strategy", rule, strategy, "Give numbers of parts."))
    pieces, rest = list(batch), iter(strategies)
    for i, item in enumerate(batch):
        if isinstance(item, Tensor):
            parts, shape = next(rest), item.shape
            if any(length % n for length, n in zip(shape, parts)):
                rule = f"divisible into {' x '.join(map(str, parts))} parts, its dataset_strategy"
                raise ValueError(argument_error(_OWNER, "batch", rule, f"the shape {shape}", "Give all rows of it."))
            # The compiler uses only its shape.
            pieces[i] = Tensor(item.asnumpy()[tuple(slice(length // n) for length, n in zip(shape, parts))])
    return pieces


def _compiled(step: TrainOneStepCell, batch: tuple[Any, ...], size: int) -> tuple[Any, Program]:
    """Return this rank's program of a step, and its report."""
    inputs, names = _pieces(step, batch, size), {parameter.name for parameter in step.network.get_parameters()}
    begin = time.monotonic()
    model = partition(step, *inputs)
    seconds, peak = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = {"parameters": 0, "optimizer state": 0, "buffer": 0}
    for parameter in model.graph.parameter:
        name = plain_name(parameter.name)
        kind = "buffer" if name.startswith("accu_grads.") else "parameters" if name in names else "optimizer state"
        held[kind] += tensor_bytes(parameter)
    return model, Program(messages_of(model, size), held, seconds, peak)


def _run(
    meeting: Meeting,
    size: int,
    build: Callable[[], _Built],
    step: Any,
    model: Any,
    batch: tuple[Any, ...],
    updates: int,
) -> dict[str, Any]:
    """Train with the partitioned program and, on rank 0, with the whole batch, and compare."""
    _wait_for("compiled", meeting, size)
    rank, layouts, path = meeting.rank, step.parameter_layout_dict, meeting.folder / "whole.npz"
    start: Values = dict(np.load(meeting.folder / "start.npz"))
    # The layouts include those of the inputs of construct: inputs0, inputs1, and so on.
    inputs = {f"inputs{i}": item.asnumpy() for i, item in enumerate(batch) if isinstance(item, Tensor)}
    parts = {name: Tensor(part) for name, part in own_parts(inputs, layouts, rank).items()}
    with on_cpu():
        program = CpuProgram(model, start, layouts, rank)
        own = [parts.get(f"inputs{i}", item) for i, item in enumerate(batch)]
        reports = [OutputFields(*(float(item.asnumpy()) for item in program(*own))) for _ in range(updates)]
    losses, updated = [report.loss for report in reports], [bool(report.updated) for report in reports]
    found = {"losses": losses, "updated": updated}
    if rank == 0:
        found["whole_losses"], whole = _train_whole(build()[0], start, batch, sum(updated))
        np.savez(path, **whole)
    _wait_for("whole", meeting, size)
    whole, start = (own_parts(values, layouts, rank) for values in (dict(np.load(path)), start))
    return found | compare(program.values(), whole, start)._asdict()


def _wait_for(name: str, meeting: Meeting, size: int) -> None:
    """Wait until all ranks have reached this point. A collective would time out while others compile."""
    (meeting.folder / f"at_{name}_{meeting.rank}").touch()
    while len(list(meeting.folder.glob(f"at_{name}_*"))) < size:
        time.sleep(0.2)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Explain the error of a program that does not run on CPU, mostly because CPU lacks an operator."""
    try:
        yield
    except Exception as error:
        rule, got = "False for a program that does not run on CPU", f"True: {first_line(error).rstrip('.')}"
        remedy = "Without it the step is compiled and counted all the same."
        raise RuntimeError(argument_error(_OWNER, "run", rule, got, remedy)) from error


def _train_whole(step: Any, start: Values, batch: Any, updates: int) -> tuple[list[float], Values]:
    """Train with MindSpore's own step on the whole batch. Return the losses and the parameters."""
    # The user's function may have set another mode.
    auto_parallel_context().reset()
    for parameter in (*step.network.get_parameters(), *step.optimizer.get_parameters()):
        if parameter.name in start:
            parameter.set_data(Tensor(start[parameter.name], parameter.dtype))
    with graph_mode(), inlined([cell for _, cell in step.network.cells_and_names()]):
        parameters = step.optimizer.parameters
        loss_cell = MeanLoss(step.network.whole_loss_of())
        whole = WholeBatch(_OWNER, loss_cell, parameters, step.optimizer, getattr(step.body.clip, "max_norm", None))
        losses = [whole.train(*batch)[0] for _ in range(updates)]
    return losses, {each.name: each.asnumpy() for each in step.optimizer.parameters}
