"""The micro steps of a network's batches, compiled or op by op, depending on MindSpore's mode."""

import functools
import logging
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from mindspore import nn

from ms_gradaccum._checks import require, warn
from ms_gradaccum.advice.loss_measurement import LossMeasurement, Program, explain_fixed_rows
from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.compiled import NOTHING, Compiled, Method, like_mode, runs_eagerly
from ms_gradaccum.backend.device import warn_of_slow_convolutions
from ms_gradaccum.backend.network_code import JitParts, has_backward_hook
from ms_gradaccum.backend.thread_pool import thread_pool_is_faster
from ms_gradaccum.batch.ambiguous_inputs import warn_of_split
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.batch.split import MicroBatch, SplitBatch
from ms_gradaccum.batch.structure import SequenceOf, named_tuple_in
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.batch.whole_batch_loss import Preparation
from ms_gradaccum.gradients.buffer import sparse_lookup
from ms_gradaccum.parallel.factory import warn_of_reductions
from ms_gradaccum.parallel.reduced import check_hooks_run, check_not_late
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.events import Events
from ms_gradaccum.training.micro_step import BackwardStart, EagerMicroStep, MicroStep, Outputs, StepParts, start_tensors
from ms_gradaccum.training.network_modes import warn_custom_backward, warn_of_modes
from ms_gradaccum.training.settings import StepSettings

_MANY_STRUCTURES = 8
# The number of cached batch sizes is limited, because they would fill the memory.
_MANY_STARTS = 256
_rows_of = operator.itemgetter(0)
_LOGGER = logging.getLogger("ms_gradaccum")


class StepKind(NamedTuple):
    """The kind of a micro step that runs op by op."""

    is_empty: bool  # True if the caller has given its batch the weight 0.
    is_last: bool = False  # True in the last micro batch of a window, in which the network reduces its gradients.


PLAIN = StepKind(is_empty=False)


class MicroSteps:
    """The micro steps of the batches of a network."""

    has_begun = has_split = False  # True once the network, and a split batch, have been checked.
    has_added = False  # True if the last batch may have been added in part before it failed.
    rows: float = 0  # The rows or the weight of the last batch.
    gives_mean = False  # True if the only micro batch of the last batch has returned its mean loss.
    hooks = -1  # The largest number of hooks in the backward pass so far; -1 before the first batch.
    rounds = -1  # Number of micro batches whose collectives other ranks may still wait in; -1 before the count.

    def __init__(
        self, network: nn.Cell, reducers: Sequence[GradientReducer], settings: StepSettings, events: Events
    ) -> None:
        self.owner, self.network, self.reducers = settings.owner, network, reducers
        self.settings, self.events = settings, events
        is_distributed, self.grads_are_reduced = reducers[0].is_distributed, reducers[0].grads_are_reduced
        if self.grads_are_reduced:
            _check_reduced(self.owner, network, settings)
        warn_of_slow_convolutions(self.owner, network)
        # The micro step as part of a larger graph, which takes nested inputs.
        self.cell = self._build(network.weighted_loss)
        self.parameters, half = self.cell.parameters, self.cell.micro_loss.half
        self.preparation: Preparation = network.preparation(settings, self.cell, reducers[0])
        # The keys are the structure of the inputs, nearly always a single one, and a flag for batches of weight 0.
        self.by_structure: dict[tuple[SequenceOf, bool], Compiled] = {}
        self.eager: dict[StepKind, EagerMicroStep] = {}
        # The first inputs of a micro step. The keys are the backward start, its rows and the rows of its batch.
        self.starts = functools.lru_cache(_MANY_STARTS)(start_tensors)
        # True if other ranks may have more micro batches in a batch.
        self.waits_for_others = is_distributed or self.grads_are_reduced
        self.empty_step = Compiled(lambda: Method(self.cell.adding, "add_nothing"), self.owner, "the empty step")
        self.cells = [cell for _, cell in network.cells_and_names()]
        self.jit_parts = JitParts(self.cells, network.get_parameters())
        self.measurement = LossMeasurement(network, self.parameters, settings.compiles, half, is_distributed)
        adds_parts = network.micro_size > 1 or settings.accumulation_steps > 1 or is_distributed
        # Where a network reduces its gradients itself, its forward passes communicate.
        can_measure = not (network.needs_all_rows or self.grads_are_reduced)
        self.measurement.is_on = settings.check_loss and adds_parts and can_measure

    def compiled_cells(self) -> list[nn.Cell | Compiled]:
        return [self.cell, self.empty_step, *self.by_structure.values(), *self.preparation.compiled_cells()]

    def run(
        self, args: Args, kwargs: Kwargs, is_last: bool = False, weight: float | None = None, is_first: bool = False
    ) -> list[Outputs]:
        """Add one batch, maybe the first or the last of its window, and return the outputs of its micro steps.

        The caller's ``weight`` takes the place of the rows of a batch that is not split.
        """
        self.has_added, self.rounds = False, -1
        eager = runs_eagerly(self.settings.compiles)
        if eager:
            self.jit_parts.follow()
        if self.grads_are_reduced:
            check_hooks_run(self.owner, eager)
        elif eager or not self.has_begun:
            self._look_at_hooks()
        inputs = self.network.positional(args, kwargs)
        split = self._split(inputs, eager)
        self.rows = rows = sum(map(_rows_of, split.micro_batches))
        (structure, micro_batches), batch_rows = self.preparation.prepare(inputs, split, rows, eager)
        kind = StepKind(is_empty=weight == 0.0)
        step = self._micro_step(structure, micro_batches, eager, kind)
        start: BackwardStart = (step.cell if isinstance(step, Compiled) else step).backward_start
        # This comes first, because all ranks must send their messages in the same order.
        count = len(micro_batches)
        self.rounds = self.reducers[0].max_micro_batches(count) if self.waits_for_others else count
        last = step
        if is_last and self.reducers[0].accumulates:
            last = self._micro_step(structure, micro_batches, eager, kind._replace(is_last=True))
        self.gives_mean = isinstance(last, EagerMicroStep) and last.gives_mean
        is_measured = self.measurement.is_on
        if is_measured and is_first and self.measurement.is_first_windows:
            measured = self.measurement.rows_of(inputs, micro_batches, structure, weight)
            self.measurement.begin_window(measured, self._program(step, batch_rows))
        if is_measured:
            self.measurement.before_batch()
        if weight is not None:
            self.rows = weight
            start = start if start == "sum" else "mean"  # The share of the only micro batch, also for 0 / 0.
            parts = [(rows, (*self.starts(start, weight, weight), *tensors)) for rows, tensors in micro_batches]
        else:
            parts = [(rows, (*self.starts(start, rows, batch_rows), *tensors)) for rows, tensors in micro_batches]
        outputs = self._run_all([step] * (count - 1) + [last], parts, inputs)
        if is_measured and weight != 0.0 and self.measurement.is_due:
            measured = self.measurement.rows_of(inputs, micro_batches, structure, weight)
            self.measurement.after_batch(measured, outputs, self.events.updates + self.events.skipped_updates)
        return outputs

    def _program(self, step: Compiled | EagerMicroStep, batch_rows: float) -> Program:
        """Return what adds the gradients of any rows, to measure it."""

        def run(step: Compiled | EagerMicroStep, rows: Rows) -> None:
            start = (step.cell if isinstance(step, Compiled) else step).backward_start
            step(*self.starts(start, rows.size, batch_rows), *rows.tensors)

        def run_eagerly(rows: Rows) -> None:
            eager = self.eager.get(PLAIN) or self._build_eager(PLAIN)
            eager.begin_batch(rows.structure, 2)
            run(eager, rows)

        return Program(functools.partial(run, step), run_eagerly, [each.buffer for each in self.reducers])

    def _run_all(
        self,
        steps: Sequence[Compiled | EagerMicroStep],
        parts: Sequence[tuple[int, Outputs]],
        inputs: Args,
    ) -> list[Outputs]:
        outputs: list[Outputs] = []
        done, heard = self.events.micro_batches, self.events.heard
        # A callback may raise before the micro step has run once.
        steps[0].has_run = False
        is_running = False
        try:
            for index, (step, (rows, tensors)) in enumerate(zip(steps, parts)):
                if heard:
                    self.events.tell("on_micro_batch_begin", index, rows)
                is_running = True
                outputs.append(step(*tensors))
                is_running = False
                self.rounds -= 1
                if heard:
                    self.events.micro_batch_end(index, rows)
            self.events.micro_batches = done + len(steps)
            self.preparation.check(outputs)
        except BaseException as error:
            self.has_added = bool(outputs) or steps[0].has_run
            self.events.micro_batches = done
            if isinstance(error, Exception):
                is_explained = self.network.explain_split(error, inputs)
                if is_running and not (is_explained or self.has_added) and len(steps) > 1:
                    explain_fixed_rows(self.network, inputs, parts[0][0], error)
            raise
        if self.rounds:
            self.join(self.rounds)
        return outputs

    def _split(self, inputs: tuple[object, ...], eager: bool) -> SplitBatch:
        try:
            return self.network.split(*inputs) if self.has_split else self._first_split(inputs, eager)
        except Exception:
            if self.grads_are_reduced:
                # The other ranks compare their numbers of micro batches, and raise for this 0.
                with suppress(ValueError, RuntimeError):
                    self.reducers[0].max_micro_batches(0)
            raise

    def _first_split(self, inputs: tuple[object, ...], eager: bool) -> SplitBatch:
        """Split one of the first batches, and warn of doubtful inputs and of a network that trains differently."""
        is_first, self.has_begun = not self.has_begun, True
        if is_first:
            warn_of_modes(self.owner, self.network, self.settings.accumulation_steps > 1)
            if eager and not self.grads_are_reduced:
                _LOGGER.warning(
                    "%s: PYNATIVE mode runs the network op by op. Compiled it is often several times as fast: "
                    "verify(network, batch, micro_size, compile=True) says whether it then trains the same.",
                    self.owner,
                )
        batch: SplitBatch = self.network.split(*inputs)
        self.has_split = warn_of_split(self.network, inputs, len(batch.micro_batches), is_first)
        return batch

    def look(self) -> None:
        """Warn of a network that trains differently in micro batches."""
        warn_of_modes(self.owner, self.network, self.settings.accumulation_steps > 1)
        self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        """Warn of code in the backward pass at the first batch, and where hooks have come later."""
        hooks = [hook for parameter in self.parameters for hook in parameter.hooks()]
        found = len(hooks) + sum(map(has_backward_hook, self.cells))
        if found > self.hooks:
            self.hooks = found
            check_not_late(self.owner, self.network)
            warn_custom_backward(self.owner, self.network, self.parameters, self.settings.accumulation_steps > 1)
            if self.waits_for_others:
                warn_of_reductions(self.owner, "the hook of a parameter", hooks, self.network)

    def measure_loss(self, batch: tuple[object, ...]) -> None:
        """Measure the loss of a batch before a graph trains it."""
        inputs = self.network.positional(batch, {})
        structure, micro_batches = self.network.split(*inputs)
        self.measurement.before_batch()
        self.measurement.after_batch(self.measurement.rows_of(inputs, micro_batches, structure), [], 0)

    def join(self, rounds: int = -1) -> None:
        """Join the collectives of ``rounds`` micro batches, or of a whole batch with no local data."""
        if rounds < 0:
            self.preparation.join()
            rounds = self.reducers[0].max_micro_batches(0)
        for _ in range(rounds):
            self.empty_step(NOTHING)

    def _micro_step(
        self, structure: SequenceOf, micro_batches: list[MicroBatch], eager: bool, kind: StepKind
    ) -> Compiled | EagerMicroStep:
        """Return the callable that runs a micro batch of this structure."""
        if not eager:
            known = self.by_structure.get((structure, kind.is_empty))
            return known or self._compiled(structure, micro_batches, kind.is_empty)
        step = self.eager.get(kind) or self._build_eager(kind)
        step.begin_batch(structure, len(micro_batches))
        return step

    def _build_eager(self, kind: StepKind) -> EagerMicroStep:
        lookup, remedy = sparse_lookup(self.network), "Use nn.Embedding, or give compile=True."
        rule = "one of dense gradients in PYNATIVE mode, where MindSpore forgets the rows of sparse ones"
        require(lookup is None, self.owner, "network", rule, f"a sparse lookup in {lookup}", remedy)
        parts = StepParts.of(self.network.weighted_loss, self.reducers, self.settings, True, kind.is_empty)
        self.eager[kind] = EagerMicroStep(self.owner, parts, kind.is_last)
        return self.eager[kind]

    def _compiled(self, structure: SequenceOf, micro_batches: list[MicroBatch], is_empty: bool) -> Compiled:
        """Build the micro step for a structure. Its first batch decides whether the thread pool runs it."""
        name = named_tuple_in(structure)
        why_not = name and f"its inputs hold {name}, a NamedTuple, which loses its gradient in a graph"
        remedy = "Give a tuple or a dict, or leave compile out."
        require(not why_not, self.owner, "compile", "None for inputs that no graph takes", why_not, remedy)
        # Several ranks share the cores, and their messages must keep one order.
        is_pooled = not self.reducers[0].is_distributed and thread_pool_is_faster(
            self.network, self.parameters, *micro_batches[0], self.cell.jit_config_dict
        )

        def build() -> MicroStep:
            cell = self._build(self.network.loss_of(structure), is_empty)
            cell.is_pooled = is_pooled
            return cell

        compiled = Compiled(build, self.owner, "the network", self.network.network)
        self.by_structure[structure, is_empty] = compiled
        if len(self.by_structure) == _MANY_STRUCTURES:
            warn(
                f"For '{self.owner}', the inputs must keep their structure and Python values, but got "
                f"{_MANY_STRUCTURES} different ones, each compiled on its own. Make values that change tensors."
            )
        return compiled

    def _build(self, loss: WeightedLoss, is_empty: bool = False) -> MicroStep:
        cell = MicroStep(StepParts.of(loss, self.reducers, self.settings, False, is_empty))
        if hasattr(self, "cell"):
            like_mode(cell, self.cell)
        return cell


def _check_reduced(owner: str, network: nn.Cell, settings: StepSettings) -> None:
    """Raise for settings that do not work with gradients that are already reduced over all ranks."""
    for name, is_given, rule in (
        ("bad_micro_batch", settings.drop_non_finite, "'skip_window'"),
        ("mixed_precision", settings.precision.level != "O0", "None or a loss scale"),
        ("compile", settings.compiles, "None"),
    ):
        rule = f"{rule} where gradients come reduced"
        remedy = "Leave it out, and convert a network before hsdp() cuts it."
        require(not is_given, owner, name, rule, "something else", remedy)
