"""A process of a simulation: it builds the step, compiles it, and runs it if asked to."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel._auto_parallel_context import auto_parallel_context
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, first_line
from ms_gradaccum.backend.compiled import graph_mode, inlined
from ms_gradaccum.backend.device import built_for
from ms_gradaccum.batch.nested_inputs import as_call
from ms_gradaccum.loops.model import Model
from ms_gradaccum.parallel.semi_auto import SemiAuto, forget_accumulation
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import Meeting
from ms_gradaccum.tools.simulation.collectives import messages_of, tensor_bytes
from ms_gradaccum.tools.simulation.cpu_program import CpuProgram, own_part, own_parts, plain_name, whole_values
from ms_gradaccum.tools.simulation.partition import connect, gpu_target, partition
from ms_gradaccum.tools.simulation.report import Program
from ms_gradaccum.tools.whole_batch import ClippedOptimizer, LossOnly, Values, compare, train_whole
from ms_gradaccum.training.partitioned_step import PartitionedStep
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "simulate"
_BUFFER = "accu_grads."


def work(meeting: Meeting, builder: list[Any], home: str, target: str, updates: int, compare: bool) -> dict[str, Any]:
    """Do the part of one rank, and return its report."""
    meeting.join(*connect())
    meeting.phase("building")
    rank, found = Rank(meeting, Builder(*builder), home, target, updates), {}
    if meeting.rank == 1 and compare:
        # Both are compiled at the same time and each first in its process, so that time and memory compare.
        meeting.phase("compiling MindSpore's own cell")
        found["stock"] = rank.stock()
    # The programs of all devices have the same size, so one is enough unless they run.
    if meeting.rank == 0 or updates:
        found |= rank.ours()
    return found


class Rank:
    """One process of the job.

    Args:
        meeting: The files of the job.
        builder: The user's function.
        home: The folder in which it is called. All else is in a folder that is removed with the job.
        target: The kind of device.
        updates: The number of updates to train, 0 to compile only.
    """

    def __init__(self, meeting: Meeting, builder: Builder, home: str, target: str, updates: int) -> None:
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self.builder, self.home, self.target, self.updates = builder, home, target, updates

    def ours(self) -> dict[str, Any]:
        """Compile our step, train with it if that is asked for, and return the reports of both."""
        step, batch = self.build()
        if self.updates and self.rank == 0:
            # All ranks start with the parameters of rank 0 before the compiler splits them.
            np.savez(self.meeting.folder / "start.npz", **whole_values(step))
        elif self.updates:
            whole_values(step)
        self.meeting.phase(f"compiling for {self.size} devices")
        model, program = self._compiled(step, self._pieces(step, batch))
        held = _bytes_of(model, {parameter.name for parameter in step.network.get_parameters()})
        found = {"ours": asdict(replace(program, held_bytes=held))}
        return found | ({"run": self._run(step, model, batch)} if self.updates else {})

    def build(self) -> tuple[TrainOneStepCell, tuple[Any, ...]]:
        """Call the user's function. Return the step, and the batch as the network takes it."""
        with built_for(self.target), _inside(self.home):
            made = self.builder.call()
        if not isinstance(made, tuple) or len(made) != 2:
            remedy = "Return (TrainOneStepCell(AutoParallel(...), optimizer), batch), or a Model in its place."
            raise TypeError(
                argument_error(_OWNER, "build", "a function that returns (step, batch)", _kind(made), remedy)
            )
        step, batch = made
        step = _step_of(step) if isinstance(step, Model) else step
        if not isinstance(step, TrainOneStepCell):
            rule = "a function that returns a TrainOneStepCell or a Model of ms_gradaccum, and a batch"
            raise TypeError(argument_error(_OWNER, "build", rule, f"{_kind(step)} and a batch", "Build one of these."))
        if not isinstance(step.body, PartitionedStep):
            rule, got = "a function that returns a step which the compiler partitions", "one without AutoParallel"
            raise ValueError(
                argument_error(_OWNER, "build", rule, got, "Put AutoParallel around its GradAccumulation.")
            )
        args, kwargs = as_call(_OWNER, batch)
        return step, step.network.positional(args, kwargs)

    def _pieces(self, step: TrainOneStepCell, batch: tuple[Any, ...]) -> list[Any]:
        """Return a piece of each input that is as large as the part of a device in the dataset strategy."""
        strategy = _dataset_strategy(step)
        tensors = [item for item in batch if isinstance(item, Tensor)]
        if strategy == "data_parallel":
            strategies = [(self.size,)] * len(tensors)
        elif strategy == "full_batch":
            strategies = [(1,)] * len(tensors)
        else:
            strategies = list(strategy)
            if len(strategies) != len(tensors) or not all(isinstance(n, int) for parts in strategies for n in parts):
                rule = f"'data_parallel', 'full_batch' or a tuple of ints for each of the {len(tensors)} inputs"
                raise ValueError(argument_error(_OWNER, "dataset_strategy", rule, strategy, "Give numbers of parts."))
        rest = iter(strategies)
        return [_some_rows(item, next(rest)) if isinstance(item, Tensor) else item for item in batch]

    def _run(self, step: TrainOneStepCell, model: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
        """Train with the partitioned program and, on rank 0, with the whole batch, and compare."""
        self.meeting.phase("waiting for the other ranks")
        self.meeting.wait_for("compiled")
        start = dict(np.load(self.meeting.folder / "start.npz"))
        self.meeting.phase(f"training on {self.size} CPU processes")
        layouts = step.parameter_layout_dict
        # Among the layouts are those of the inputs of construct: inputs0, inputs1, and so on.
        parts = [
            Tensor(own_part(item.asnumpy(), layouts.get(f"inputs{i}"), self.rank)) if isinstance(item, Tensor) else item
            for i, item in enumerate(batch)
        ]
        with _on_cpu():
            program = CpuProgram(model, start, layouts, self.rank)
            outputs = [[float(item.asnumpy()) for item in program(*parts)] for _ in range(self.updates)]
        losses, updated = [output[0] for output in outputs], [bool(output[3]) for output in outputs]
        path = self.meeting.folder / "whole.npz"
        whole_losses: list[float] = []
        if self.rank == 0:
            self.meeting.phase("training on the whole batch")
            whole_losses, whole = self._train_whole(start, batch, sum(updated))
            np.savez(path, **whole)
        self.meeting.wait_for("whole")
        whole, start = (own_parts(dict(values), layouts, self.rank) for values in (np.load(path), start))
        found = compare(program.values(), whole, start)._asdict()
        return found | {"losses": losses, "whole_losses": whole_losses, "updated": updated}

    def _train_whole(self, start: Values, batch: Any, updates: int) -> tuple[list[float], Values]:
        """Train with MindSpore's own step on the whole batch. Return the losses and the parameters."""
        step, _ = self.build()
        if auto_parallel_context().get_parallel_mode() != "stand_alone":
            # The user's function has set it, for the compiler.
            auto_parallel_context().reset()
        clip = step.body.clip
        optimizer = ClippedOptimizer(step.optimizer, getattr(clip, "max_norm", None), getattr(clip, "limit", None))
        for parameter in (*step.network.get_parameters(), *step.optimizer.get_parameters()):
            if parameter.name in start:
                parameter.set_data(Tensor(start[parameter.name], parameter.dtype))
        with graph_mode(), inlined([cell for _, cell in step.network.cells_and_names()]):
            reports = train_whole(LossOnly(step.network), optimizer, [batch] * updates, norms=False)
        return [loss for loss, _ in reports], {each.name: each.asnumpy() for each in step.optimizer.parameters}

    def stock(self) -> dict[str, Any]:
        """Compile MindSpore's own cell for the same network, or return the reason why it cannot be compiled."""
        try:
            step, batch = self.build()
            with _stock_step(step) as stock:
                return asdict(self._compiled(stock, self._pieces(step, batch))[1])
        except Exception as error:
            return {"error": first_line(error)}

    def _compiled(self, step: nn.Cell, inputs: list[Any]) -> tuple[Any, Program]:
        """Return the program of this rank, and its report."""
        begin = time.monotonic()
        with gpu_target():
            model = partition(step, *inputs)
        seconds, peak = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return model, Program(messages_of(model, self.size), {}, seconds, peak)


def _step_of(model: Model) -> nn.Cell:
    """Return the step of a Model, with the modes and settings that the Model applies before it trains."""
    step = model._train_network.set_train()
    if isinstance(model._network, AutoParallel) and isinstance(step.body, PartitionedStep):
        step.body.semi_auto = SemiAuto(model._network)
    return step


def _bytes_of(model: Any, network: set[str]) -> dict[str, int]:
    """Return the bytes that a device holds, by kind."""
    held = {"parameters": 0, "optimizer state": 0, "buffer": 0}
    for parameter in model.graph.parameter:
        name = plain_name(parameter.name)
        kind = "buffer" if name.startswith(_BUFFER) else "parameters" if name in network else "optimizer state"
        held[kind] += tensor_bytes(parameter)
    return held


def _some_rows(item: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Return a piece of an input as large as the part of a device. The compiler uses only its shape."""
    for axis, count in enumerate(parts):
        if item.shape[axis] % count:
            rule = f"one whose axis {axis} divides into the {count} parts of its dataset_strategy"
            raise ValueError(
                argument_error(_OWNER, "batch", rule, f"the shape {tuple(item.shape)}", "Give all rows of it.")
            )
    return Tensor(item.asnumpy()[tuple(slice(length // count) for length, count in zip(item.shape, parts))])


def _dataset_strategy(step: TrainOneStepCell) -> Any:
    """Return the dataset strategy of the AutoParallel or, without one, of MindSpore's context."""
    settings = step.body.semi_auto.auto_parallel
    if settings is None:
        return auto_parallel_context().get_dataset_strategy()
    return settings._dataset_strategy_config


@contextmanager
def _stock_step(step: TrainOneStepCell) -> Iterator[nn.Cell]:
    """Build MindSpore's own step for the same network, and apply the same settings inside this context."""
    network = step.network
    loss = LossOnly(network) if network.weighted else network.network
    stock = parallel_nn.GradAccumulation(loss, network.micro_size)
    settings = step.body.semi_auto.auto_parallel
    if settings is not None:
        _init_auto_parallel_context(settings)
    try:
        cell = _TrainGradAccuStepCell(stock, step.optimizer)
        # The compiler accumulates only in training mode. The user's cells keep their modes.
        cell.add_flags(training=True)
        yield cell
    finally:
        if settings is not None:
            _clear_auto_parallel_context(settings)
        forget_accumulation()


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Explain an error of a program that does not run on CPU, mostly because CPU lacks an operator."""
    try:
        yield
    except Exception as error:
        rule, got = "False for a program that does not run on CPU", f"True: {first_line(error).rstrip('.')}"
        remedy = "Without it the step is compiled and counted all the same."
        raise RuntimeError(argument_error(_OWNER, "run", rule, got, remedy)) from error


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Make ``folder`` the current folder inside this context."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _kind(made: Any) -> str:
    """Describe the type of a returned value for an error."""
    return f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
