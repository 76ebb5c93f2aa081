"""The micro steps of a network's batches, compiled or op by op, depending on MindSpore's mode."""

import functools
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from mindspore import ParameterTuple, nn

from ms_gradaccum.advice.advisor import SeenBatch, SilentAdvisor
from ms_gradaccum.advice.gradient_exchange import Program
from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.compiled import (
    MAX_FIXED_SHAPES,
    NOTHING,
    Compiled,
    Method,
    RunRecord,
    like_mode,
    runs_eagerly,
)
from ms_gradaccum.backend.device import is_out_of_memory
from ms_gradaccum.backend.network_code import JitParts
from ms_gradaccum.backend.thread_pool import thread_pool_is_faster
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.batch.split import MicroBatch, SplitBatch
from ms_gradaccum.batch.structure import SequenceOf, named_tuple_in
from ms_gradaccum.batch.token_limit import MOST_GRAPHS
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.batch.whole_batch_loss import Preparation
from ms_gradaccum.gradients.buffer import sparse_lookup
from ms_gradaccum.parallel.reduced import check_hooks_run, check_not_late
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.micro_step import (
    BackwardStart,
    EagerMicroStep,
    MicroStep,
    Outputs,
    start_tensors,
)
from ms_gradaccum.training.settings import StepSettings

# The number of cached batch sizes is limited, because they would fill the memory.
_MANY_STARTS = 256
_rows_of = operator.itemgetter(0)


class WindowBatch(NamedTuple):
    """A batch of a window."""

    args: Args
    kwargs: Kwargs
    is_last: bool = False  # True if it ends its window.
    # The caller's weight, in place of the rows of a batch that is not split.
    weight: float | None = None


class BatchProgress(RunRecord):
    """How far a batch has come, which decides what is left to do if it fails. After a run it may be in the sums."""

    rows = 0  # The rows of the batch, once it is split.
    # The number of micro batches whose collectives other ranks may still wait in; -1 before the count.
    rounds_left = -1


class MicroSteps:
    """The way of a network's batches into the sums of a window, by micro steps that are built for their first batch."""

    def __init__(
        self,
        network: nn.Cell,
        reducers: Sequence[GradientReducer],
        settings: StepSettings,
        events: Events,
        advisor: SilentAdvisor,
    ) -> None:
        self.network = network
        self.reducers = reducers
        self.settings = settings
        self.events = events
        self.advisor = advisor
        if reducers[0].grads_are_reduced:
            _check_reduced(settings)
        # The micro step as part of a larger graph, which takes nested inputs.
        self.cell = MicroStep(network.weighted_loss, reducers, settings, eager=False)
        # The keys are the structure of the inputs, nearly always a single one, and a flag for batches of weight 0.
        self.compiled: dict[tuple[SequenceOf, bool], Compiled] = {}
        self.eager: dict[bool, EagerMicroStep] = {}  # The keys are that flag.
        self.preparation: Preparation = network.preparation(settings, self.cell, reducers[0])
        # The first inputs of a micro step. The keys are the backward start, its rows and the rows of its batch.
        self.starts = functools.lru_cache(_MANY_STARTS)(start_tensors)
        self.empty_step = Compiled(
            lambda: Method(self.cell.adding, "add_nothing"), settings.owner, "the empty step"
        )
        self.jit_parts = JitParts(
            [cell for _, cell in network.cells_and_names()], network.get_parameters()
        )

    @property
    def parameters(self) -> ParameterTuple:
        """The whole parameters that are updated."""
        return self.cell.parameters

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        return [
            self.cell,
            self.empty_step,
            *self.compiled.values(),
            *self.preparation.compiled_cells(),
        ]

    def _step_for(
        self, split: SplitBatch, is_eager: bool, is_empty: bool
    ) -> Compiled | EagerMicroStep:
        """Return the callable that runs the micro batches of a batch."""
        if is_eager:
            if is_empty not in self.eager:
                lookup = sparse_lookup(self.network)
                if lookup is not None:
                    raise ValueError(
                        f"For '{self.settings.owner}', the argument 'network' must have dense "
                        f"gradients in PYNATIVE mode, but got a sparse lookup in {lookup}. Use "
                        f"nn.Embedding, or give compile=True."
                    )
                cell = MicroStep(
                    self.network.weighted_loss, self.reducers, self.settings, True, is_empty
                )
                self.eager[is_empty] = EagerMicroStep(self.settings.owner, cell)
            return self.eager[is_empty]
        known = self.compiled.get((split.structure, is_empty))
        return known or self._compile(split.structure, split.micro_batches[0], is_empty)

    def _compile(self, structure: SequenceOf, micro_batch: MicroBatch, is_empty: bool) -> Compiled:
        """Build the micro step for a structure. Its first batch decides whether the thread pool runs it."""
        name = named_tuple_in(structure)
        if name:
            raise ValueError(
                f"For '{self.settings.owner}', the argument 'compile' must be None for this batch, "
                f"but got True and {name}, a NamedTuple, which loses its gradient in a graph. Give "
                f"a tuple or a dict, or leave compile out."
            )
        # Several ranks share the cores, and their messages must keep one order.
        is_pooled = not self.reducers[0].is_distributed and thread_pool_is_faster(
            self.network, self.cell.parameters, *micro_batch, self.cell.jit_config_dict
        )

        def build() -> nn.Cell:
            loss: WeightedLoss = self.network.loss_of(structure)
            cell = MicroStep(loss, self.reducers, self.settings, False, is_empty)
            cell.is_pooled = is_pooled
            return like_mode(cell, self.cell)

        most_graphs = MAX_FIXED_SHAPES if self.network.token_limit is None else MOST_GRAPHS
        compiled = Compiled(
            build, self.settings.owner, "the network", self.network.network, most_fixed=most_graphs
        )
        self.compiled[structure, is_empty] = compiled
        self.advisor.after_build(len(self.compiled))
        return compiled

    def run(self, batch: WindowBatch, progress: BatchProgress) -> list[Outputs]:
        """Add one batch. Return the outputs of its micro steps. If this raises, ``progress`` says how far it came."""
        is_eager = runs_eagerly(self.settings.compiles)
        if is_eager:
            self.jit_parts.follow()
        if is_eager or not self.compiled:
            self.check_hooks(is_eager)
        inputs = self.network.positional(batch.args, batch.kwargs)
        try:
            whole = self.network.split(*inputs)
        except Exception:
            if self.reducers[0].grads_are_reduced:
                # The other ranks compare their numbers of micro batches, and raise for this 0.
                with suppress(ValueError, RuntimeError):
                    self.reducers[0].max_micro_batches(0)
            raise
        rows = sum(map(_rows_of, whole.micro_batches))
        progress.rows = rows
        split = whole
        batch_rows = rows
        if self.network.needs_all_rows:
            split, batch_rows = self.preparation.prepare(inputs, whole, rows, is_eager)
        step = self._step_for(split, is_eager, batch.weight == 0.0)
        progress.rounds_left = len(split.micro_batches)
        if self.reducers[0].is_distributed:
            # This comes first, because all ranks must send their messages in the same order.
            progress.rounds_left = self.reducers[0].max_micro_batches(progress.rounds_left)
        # After its first batches, a compiled training may have nothing left to be warned of.
        is_seen = is_eager or self.advisor.is_on
        if is_seen:
            seen = SeenBatch(inputs, whole, batch.weight, batch.is_last, is_eager)
            is_part = len(split.micro_batches) > 1
            make_program = functools.partial(self._program, step, batch_rows if is_part else None)
            self.advisor.before_batch(seen, make_program)
        if isinstance(step, EagerMicroStep):
            # After the advisor, which may have measured other rows with this step.
            step.begin_batch(split.structure, len(split.micro_batches), batch.is_last)
        parts = self._parts_of(
            split.micro_batches, step.cell.backward_start, batch_rows, batch.weight
        )
        outputs = self._run_all(step, parts, inputs, progress)
        if is_seen:
            self.advisor.after_batch(outputs, self.events.updates + self.events.skipped_updates)
        return outputs

    def check_hooks(self, is_eager: bool) -> None:
        """Raise for hooks of the network that reduce its gradients, where nobody calls them or they come too late."""
        if self.reducers[0].grads_are_reduced:
            check_hooks_run(self.settings.owner, is_eager)
            return
        is_first = not (self.compiled or self.eager)
        if is_first or any(parameter.hooks() for parameter in self.parameters):
            check_not_late(self.settings.owner, self.network)

    def _parts_of(
        self,
        micro_batches: Sequence[MicroBatch],
        start: BackwardStart,
        batch_rows: float,
        weight: float | None,
    ) -> list[MicroBatch]:
        """Return the micro batches with all inputs of a micro step."""
        if weight is not None and start == "batch":
            start = "mean"  # The share of the only micro batch is 1, also for 0 / 0.
        parts = []
        for rows, tensors in micro_batches:
            first = self.starts(start, rows if weight is None else weight, batch_rows)
            parts.append(MicroBatch(rows, (*first, *tensors)))
        return parts

    def _program(self, step: Compiled | EagerMicroStep, batch_rows: float | None) -> Program:
        """Return what adds the gradients of any rows, to measure it. With no ``batch_rows``, they are a batch."""

        def add(rows: Rows, step: Compiled | EagerMicroStep = step) -> None:
            if isinstance(step, EagerMicroStep):
                step.begin_batch(rows.structure, 2)
            first = self.starts(step.cell.backward_start, rows.size, batch_rows or rows.size)
            step(*first, *rows.tensors)

        def add_anew(rows: Rows) -> None:
            if isinstance(step, EagerMicroStep):
                add(rows)
                return
            # A graph of its own: more shapes would have the training's step compiled for dynamic ones.
            add(
                rows,
                Compiled(step.make_cell, self.settings.owner, "the network", self.network.network),
            )

        return Program(add, add_anew, [each.buffer for each in self.reducers])

    def _run_all(
        self,
        step: Compiled | EagerMicroStep,
        parts: Sequence[MicroBatch],
        inputs: Args,
        progress: BatchProgress,
    ) -> list[Outputs]:
        """Run each micro batch, tell the listeners, and join the micro batches that only other ranks have."""
        outputs: list[Outputs] = []
        done = self.events.micro_batches
        is_running = False
        try:
            for index, (rows, tensors) in enumerate(parts):
                if self.events.listeners:
                    self.events.tell("on_micro_batch_begin", index, rows)
                is_running = True
                outputs.append(step(*tensors, record=progress))
                is_running = False
                progress.rounds_left -= 1
                if self.events.listeners:
                    self.events.micro_batch_end(index, rows)
            self.events.micro_batches = done + len(parts)
            if self.network.needs_all_rows:
                self.preparation.check(outputs)
        except BaseException as error:
            self.events.micro_batches = done
            if isinstance(error, Exception) and not is_out_of_memory(
                type(error).__name__, f"{error}"
            ):
                # The rows of a first micro batch that has failed alone.
                rows_of_first = 0
                if is_running and not progress.has_run and len(parts) > 1:
                    rows_of_first = parts[0].rows
                self.advisor.explain(error, inputs, rows_of_first)
            raise
        if progress.rounds_left:
            self.join(progress.rounds_left)
        return outputs

    def join(self, rounds: int = -1) -> None:
        """Join the collectives of ``rounds`` micro batches, or of a whole batch with no local data."""
        if rounds < 0:
            self.preparation.join()
            rounds = self.reducers[0].max_micro_batches(0)
        for _ in range(rounds):
            self.empty_step(NOTHING)


def _check_reduced(settings: StepSettings) -> None:
    """Raise for settings that do not work with gradients that are already reduced over all ranks."""
    for name, is_given, rule in (
        ("bad_micro_batch", settings.drop_non_finite, "'skip_window'"),
        ("mixed_precision", settings.precision.level != "O0", "None or a loss scale"),
        ("compile", settings.compiles, "None"),
    ):
        if is_given:
            raise ValueError(
                f"For '{settings.owner}', the argument '{name}' must be {rule} for a network that "
                f"reduces its own gradients. Leave it out; convert a network before hsdp() cuts it."
            )
