"""A process of a simulation: it builds the step, compiles it, and runs it if asked to."""

import json
import os
import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
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
from ms_gradaccum.tools.jobs import Meeting
from ms_gradaccum.tools.processes import depend_on
from ms_gradaccum.tools.simulation.collectives import collectives_of, groups_of, tensor_bytes
from ms_gradaccum.tools.simulation.cpu_program import CpuProgram, differences, own_part, plain_name, whole_values
from ms_gradaccum.tools.simulation.job import OWNER
from ms_gradaccum.tools.simulation.partition import WORLD_GROUP, connect, gpu_target, partition
from ms_gradaccum.tools.whole_batch import WholeBatchStep
from ms_gradaccum.training.partitioned_step import PartitionedStep
from ms_gradaccum.training.train_step import TrainOneStepCell

_BUFFER = "accu_grads."


def main(folder: str, task: str) -> None:
    """Do what ``task`` says together with the other processes, report it in ``folder``, and wait to be ended."""
    depend_on(os.getppid())
    rank, size = connect()
    meeting = Meeting(folder, rank, size)
    try:
        meeting.report(_Rank(meeting, **json.loads(task)).work())
    except Exception as error:
        meeting.error(type(error).__name__, first_line(error), traceback.format_exc())
    # Not by an exit of its own: without its GPU, MindSpore would end with an error.
    time.sleep(1e8)


class _Rank:
    """One process of the job, and what it has to do."""

    def __init__(
        self, meeting: Meeting, builder: list[Any], home: str, target: str, updates: int, compare: bool
    ) -> None:
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self.builder = Builder(*builder)
        # Where the user's function is called; all else is in a folder that goes with the job.
        self.home = home
        self.target = target
        self.updates = updates
        self.compare = compare

    def work(self) -> dict[str, Any]:
        """Return what this rank has found."""
        found: dict[str, Any] = {}
        self.meeting.phase("building")
        if self.rank == 1 and self.compare:
            # At the same time as other ranks compile ours: alone it would be faster than ours, and as the second
            # compilation of this process it would seem to take more memory.
            self.meeting.phase("compiling MindSpore's own cell")
            found["stock"] = self._stock()
        # All devices get programs of the same size, so one of them stands for all unless they run.
        if self.rank == 0 or self.updates:
            found |= self._ours()
        return found

    def _ours(self) -> dict[str, Any]:
        step, batch = self._build()
        if self.updates:
            self._write_start(step)
        self.meeting.phase(f"compiling for {self.size} devices")
        model, program = _compiled(step, self._pieces(step, batch))
        program["bytes"] = _bytes_of(model, {parameter.name for parameter in step.network.get_parameters()})
        found = {"ours": program}
        if self.updates:
            found["run"] = self._run(step, model, batch)
        return found

    def _build(self) -> tuple[TrainOneStepCell, tuple[Any, ...]]:
        """Return what the user's function builds: the step, and the batch as the network takes it."""
        with built_for(self.target), _inside(self.home):
            made = self.builder.call()
        if not isinstance(made, tuple) or len(made) != 2:
            remedy = "Return (TrainOneStepCell(AutoParallel(...), optimizer), batch), or a Model in its place."
            raise TypeError(
                argument_error(OWNER, "build", "a function that returns (step, batch)", _kind(made), remedy)
            )
        step, batch = made
        step = _step_of(step) if isinstance(step, Model) else step
        if not isinstance(step, TrainOneStepCell):
            rule = "a function that returns a TrainOneStepCell or a Model of ms_gradaccum, and a batch"
            raise TypeError(argument_error(OWNER, "build", rule, f"{_kind(step)} and a batch", "Build one of these."))
        if not isinstance(step.body, PartitionedStep):
            rule, got = "a function that returns a step which the compiler partitions", "one without AutoParallel"
            raise ValueError(argument_error(OWNER, "build", rule, got, "Put AutoParallel around its GradAccumulation."))
        args, kwargs = as_call(OWNER, batch)
        return step, step.network.positional(args, kwargs)

    def _pieces(self, step: TrainOneStepCell, batch: tuple[Any, ...]) -> list[Any]:
        """Return a piece of each input as large as what the dataset strategy leaves to a device."""
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
                raise ValueError(argument_error(OWNER, "dataset_strategy", rule, strategy, "Give numbers of parts."))
        rest = iter(strategies)
        return [_some_rows(item, next(rest)) if isinstance(item, Tensor) else item for item in batch]

    def _write_start(self, step: TrainOneStepCell) -> None:
        """Write the values of the parameters before the compiler cuts them, with which all ranks start: rank 0's."""
        values = whole_values(step)
        if self.rank == 0:
            np.savez(self.meeting.folder / "start.npz", **values)

    def _run(self, step: TrainOneStepCell, model: Any, batch: tuple[Any, ...]) -> Any:
        """Train with the partitioned program and, on rank 0, with the whole batch. Return how far they are apart."""
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
            ours = program.values()
        path = self.meeting.folder / "whole.npz"
        losses: list[float] = []
        if self.rank == 0:
            self.meeting.phase("training on the whole batch")
            losses, whole = self._train_whole(start, batch, [bool(output[3]) for output in outputs])
            np.savez(path, **whole)
        self.meeting.wait_for("whole")
        weights = dict(np.load(path))
        apart = differences(ours, weights, layouts, self.rank)
        moved = differences(ours, {name: start[name] for name in weights}, layouts, self.rank)
        return {
            "losses": [output[0] for output in outputs],
            "whole_losses": losses,
            "updated": [bool(output[3]) for output in outputs],
            "difference": max(apart.values()),
            "moved": max(moved.values()),
            "farthest": max(apart, key=lambda name: apart[name]),
        }

    def _train_whole(self, start: dict[str, Any], batch: Any, updated: list[bool]) -> tuple[list[float], Any]:
        """Train as one process does with the whole batch; leave out the updates that were skipped."""
        step, _ = self._build()
        if auto_parallel_context().get_parallel_mode() != "stand_alone":
            # Set by the user's function, for the compiler.
            auto_parallel_context().reset()
        whole = WholeBatchStep(step)
        for parameter in whole.get_parameters():
            if parameter.name in start:
                parameter.set_data(Tensor(start[parameter.name], parameter.dtype))
        with graph_mode(), inlined([cell for _, cell in whole.cells_and_names()]):
            losses = [float(whole(*batch).asnumpy()) for done in updated if done]
        return losses, {weight.name: weight.asnumpy() for weight in whole.optimizer.parameters}

    def _stock(self) -> dict[str, Any]:
        """Compile MindSpore's own cell for the same network, or say why it cannot be."""
        try:
            step, batch = self._build()
            with _stock_step(step) as stock:
                return _compiled(stock, self._pieces(step, batch))[1]
        except Exception as error:
            return {"error": first_line(error)}


def _step_of(model: Model) -> nn.Cell:
    """Return the step of a Model, with the modes and the settings that the Model sets before it trains."""
    step = model._train_network.set_train()
    if isinstance(model._network, AutoParallel) and isinstance(step.body, PartitionedStep):
        step.body.semi_auto = SemiAuto(model._network)
    return step


def _compiled(step: nn.Cell, inputs: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the program of this rank, and what there is to say about it."""
    begin = time.monotonic()
    with gpu_target():
        model = partition(step, *inputs)
    seconds = time.monotonic() - begin
    members = groups_of(model)
    counts = Counter(collectives_of(model))
    messages = [
        {
            "operator": sent.operator,
            "purpose": sent.purpose,
            "ranks": list(ranks) if (ranks := members[sent.group]) else None,
            "size": len(ranks) if ranks else _size_of(sent.group),
            "bytes": sent.nbytes,
            "count": count,
        }
        for sent, count in counts.items()
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return model, {"seconds": seconds, "peak": peak, "messages": messages}


def _size_of(group: str) -> int | None:
    """Return the number of ranks of a group, of which the name of a smaller one begins. None: all."""
    return None if group == WORLD_GROUP else int(group.partition("-")[0])


def _bytes_of(model: Any, network: set[str]) -> dict[str, int]:
    """Return what a device holds, by kind."""
    held = {"parameters": 0, "optimizer state": 0, "buffer": 0}
    for parameter in model.graph.parameter:
        name = plain_name(parameter.name)
        kind = "buffer" if name.startswith(_BUFFER) else "parameters" if name in network else "optimizer state"
        held[kind] += tensor_bytes(parameter)
    return held


def _some_rows(item: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Return a piece of an input as large as the part of a device. The compiler looks at its shape alone."""
    for axis, count in enumerate(parts):
        if item.shape[axis] % count:
            rule = f"one whose axis {axis} divides into the {count} parts of its dataset_strategy"
            raise ValueError(
                argument_error(OWNER, "batch", rule, f"the shape {tuple(item.shape)}", "Give all rows of it.")
            )
    return Tensor(item.asnumpy()[tuple(slice(length // count) for length, count in zip(item.shape, parts))])


def _dataset_strategy(step: TrainOneStepCell) -> Any:
    """Return how the data are cut, as the AutoParallel or, without one, MindSpore's context says it."""
    settings = step.body.semi_auto.auto_parallel
    if settings is None:
        return auto_parallel_context().get_dataset_strategy()
    return settings._dataset_strategy_config


@contextmanager
def _stock_step(step: TrainOneStepCell) -> Iterator[nn.Cell]:
    """Build MindSpore's own step of the same network, with the same settings in force."""
    network = step.network
    loss = _MeanOfMicroBatch(network.network) if network.weighted else network.network
    stock = parallel_nn.GradAccumulation(loss, network.micro_size)
    settings = step.body.semi_auto.auto_parallel
    if settings is not None:
        _init_auto_parallel_context(settings)
    try:
        cell = _TrainGradAccuStepCell(stock, step.optimizer)
        # The compiler knows accumulation in training alone. The user's cells keep the modes that they have.
        cell.add_flags(training=True)
        yield cell
    finally:
        if settings is not None:
            _clear_auto_parallel_context(settings)
        forget_accumulation()


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Say what to do if the program does not run on CPU, mostly for an operator that CPU lacks."""
    try:
        yield
    except Exception as error:
        rule, got = "False for a program that does not run on CPU", f"True: {first_line(error).rstrip('.')}"
        remedy = "Without it the step is compiled and counted all the same."
        raise RuntimeError(argument_error(OWNER, "run", rule, got, remedy)) from error


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Let relative paths begin in ``folder``."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class _MeanOfMicroBatch(nn.Cell):
    """Mean loss of each micro batch, since MindSpore's cell cannot take a loss with a weight."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs: Any) -> Tensor:
        loss_sum, weight = self.network(*inputs)
        return ops.div(loss_sum, weight)


def _kind(made: Any) -> str:
    """Return the type of what a function has returned, for an error."""
    return f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
