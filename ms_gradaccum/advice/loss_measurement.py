"""The measurement that shows, on the first batches, whether micro batches train what the whole batch trains.

It looks at what accumulation assumes. Two micro batches together must have the mean of their losses (their sums and
weights must add up), a micro batch must have the same loss whatever ran before it, and the gradients of two micro
batches must stay when these exchange rows.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.backend.compiled import Compiled, Eager, runs_eagerly
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.snapshot import Array, Snapshot, SnapshotTensors, as_array, kept, set_mode
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.batch.split import Flattened, MicroBatch
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.gradients.buffer import GradientBuffer

# A relative difference of a gradient that rounding explains.
GRADIENT_TOLERANCE = 1e-3
# All losses that are multiples of a number have been rounded to it, and to some more in the operators before.
NUM_QUANTA = 16
# Losses of whole numbers have such a divisor, too, so that rounding explains no more than this.
MAX_OF_QUANTA = 2.0**-3
# A smaller difference counts only where it exceeds the effect of another order of the rows so many times.
MIN_CERTAIN_ERROR = 1e-2
NUM_ORDERS = 10
# A difference must exceed so many standard deviations of a random loss, from a few passes.
NUM_DEVIATIONS = 10
# Passes of a loss whose random numbers do not come back, and more if its error exceeds a few deviations.
NUM_DRAWS = (4, 12)
NUM_LIKELY = 3
NUM_SEEDS = 3
# Tensors up to this size are always copied, to restore what the forward pass changes.
SMALL_SIZE = 2**16
# A tensor that the forward pass moves is moved back by so many times as far, to see whether the loss reads it.
FAR_BACK = 100.0
_OWNER = "GradAccumulation"
HIDE = "check_loss=False leaves this out."
_PAGE = 'See "Losses and their ways out" on docs/concepts.md.'

# Cells that draw random numbers or take statistics of the batch only in training. nn.BatchNorm3d has one inside.
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm),
    *(mint.nn.BatchNorm1d, mint.nn.BatchNorm2d, mint.nn.BatchNorm3d, mint.nn.SyncBatchNorm),
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout)
IN_TRAINING_ONLY = (*BATCH_NORMS, *DROPOUTS)

AddMicroBatch = Callable[[Rows], object]  # Adds the gradients of rows to the buffers.


class Loss(NamedTuple):
    """The loss of some rows: a mean and its number of rows, or a sum and the weight that the network returns."""

    value: float
    weight: float


class Program(NamedTuple):
    """The training program: its micro step, the same op by op, and the empty buffers of its window."""

    add: AddMicroBatch
    add_eagerly: AddMicroBatch
    buffers: list[GradientBuffer]


class Batch(NamedTuple):
    """A batch that was trained: its micro batches, and their losses as far as they are known."""

    parts: list[Rows]
    losses: list[Loss | None]
    updates: int  # The number of updates before it.


def not_measured(
    reason: str, remedy: str = "verify(network, batch, micro_size) compares a window with its batch."
) -> str:
    """Return the sentence for a loss of which nothing is known."""
    ways_out = f"{remedy} {HIDE}".strip()
    return f"For '{_OWNER}', the loss of micro batches could not be measured: {reason.rstrip('.')}. {ways_out}"


class LossMeasurement:
    """Measure the loss at batches 1, 2, 4, 8 ..., and after changes; warn once of a loss that parts train otherwise.

    Passes run as in training, compiled or op by op, and everything that they change is restored.
    """

    def __init__(
        self,
        network: nn.Cell,
        parameters: Sequence[Parameter],
        compiles: bool,
        half: bool,
        is_distributed: bool = False,
    ) -> None:
        self.network, self.parameters, self.compiles, self.is_distributed = (
            network,
            parameters,
            compiles,
            is_distributed,
        )
        self.dtype = _lowest_dtype(parameters, half)
        self.batches = 0
        self.is_on = True
        # True once a loss was as expected from the very losses of the training: nothing random is in it.
        self.is_exact = False
        # The batch before, from a batch that is due until one that it is joined with.
        self.before: Batch | None = None
        # What the network was before a batch that is due, and the tensors that forward passes have changed so far.
        self.state: Snapshot | None = None
        self.moved: list[Tensor] = []
        self.passes: dict[Hashable, Eager | Compiled] = {}
        self.watch = _Watch(network.network, parameters)
        self.is_batch_due = False
        # The windows that have begun, and the last batch of the first one.
        self.windows = 0
        self.last: Rows | None = None
        self.has_told_shapes = False

    def before_batch(self) -> None:
        """Prepare the measurement of the next batch if it is due."""
        if self.is_on:
            self._guarded(self._prepare)

    @property
    def is_first_windows(self) -> bool:
        """True before the second window has begun."""
        return self.windows < 2

    @property
    def is_due(self) -> bool:
        """True if `after_batch` is to be called for a batch."""
        return self.is_on and (self.windows < 2 or self.state is not None)

    def after_batch(self, parts: list[Rows], outputs: Sequence[Sequence[Tensor]], updates: int) -> None:
        """Measure a batch that is due. ``outputs`` are those of its micro steps, or nothing."""
        self.last = parts[-1] if self.windows < 2 else None
        if self.state is not None:
            self._guarded(lambda: self._measure(self._batch_of(parts, outputs, updates)))

    def rows_of(
        self,
        inputs: tuple[Any, ...],
        micro_batches: Sequence[MicroBatch],
        structure: SequenceOf,
        weight: float | None = None,
    ) -> list[Rows]:
        """Return the rows of the micro batches of a batch, or of its only one with a weight of the caller."""
        axes = Flattened(inputs, self.network.batch_axis).axes
        if weight is None:
            return [Rows(structure, each.tensors, axes, each.rows, each.rows) for each in micro_batches]
        return [Rows(structure, each.tensors, axes, each.rows, weight) for each in micro_batches]

    def _guarded(self, measure: Callable[[], None]) -> None:
        """Call a part of the measurement, whose errors never end a training."""
        try:
            with np.errstate(all="ignore"):
                measure()
        except Exception as error:
            self._tell(not_measured(f"{type(error).__name__}: {first_line(error)}"))

    def _tell(self, text: str) -> None:
        self.is_on = False
        self.state = self.before = self.last = None
        self.passes.clear()
        warn(self.network.with_owner(text))

    def _prepare(self) -> None:
        self.batches += 1
        if self.before is None:
            self.state = None  # A batch that was due may have failed.
        has_changed = self.watch.is_due()
        self.is_batch_due = has_changed or self.batches & (self.batches - 1) == 0
        if self.is_batch_due and self.before is None:
            self._begin()

    def _begin(self) -> None:
        if self.is_distributed and NetworkCode(self.network.network).communicates():
            self._tell(not_measured("its forward pass communicates with other processes"))
            return
        state = Snapshot(self.network.network, copied=self._is_copied)
        if state.iterators:
            kind = type(state.iterators[0]).__name__
            self._tell(not_measured(f"the network reads an iterator ({kind}), which more passes would use up", ""))
        else:
            self.state = state

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether to copy a tensor. Copies of all that the forward pass leaves as it is would be large."""
        return tensor.size <= SMALL_SIZE or any(tensor is each for each in self.moved)

    def _batch_of(self, parts: list[Rows], outputs: Sequence[Sequence[Tensor]], updates: int) -> Batch:
        known: list[Loss | None] = [self._known(*pair) for pair in zip(parts, outputs)]
        known += [None] * (len(parts) - len(known))
        return Batch(parts, known, updates)

    def _known(self, rows: Rows, outputs: Sequence[Tensor]) -> Loss:
        value, weight = float(outputs[0].asnumpy()), float(outputs[1].asnumpy())
        if self.network.weighted:
            return Loss(value, weight)
        return Loss(value / weight if weight else math.nan, rows.weight)

    # ---- the measurement of a batch

    def _measure(self, batch: Batch) -> None:
        state = self.state
        before = self.before
        if state is not None:
            self.moved += [each for each in self._moved_in(state) if each.size > SMALL_SIZE]
        if len(batch.parts) > 1:
            self.state = self.before = None
            text = ""
            for pair in self._pairs_of(batch):
                text = text or self._finding(state, *pair)
        elif before is None:
            self.before = batch  # The next batch is joined with it.
            text = ""
        else:
            self.state = self.before = None
            a, b = before.parts[-1], batch.parts[0]
            losses = before.losses[-1], batch.losses[0]
            if before.updates != batch.updates:  # The parameters have moved.
                state = None
                losses = None, None
            if a.structure != b.structure:  # Python values among the inputs differ: both get those of the second.
                losses = None, None
            text = self._finding(state, a, b, *losses)
            if self.is_batch_due:
                self.before = batch
                self._begin()
        if text:
            self._tell(text)

    def _pairs_of(self, batch: Batch) -> list[Any]:
        """Return two pairs of micro batches of the first batch, and of later ones a pair in turn."""
        pairs = _pairs_that_differ(batch)
        # Where cells act otherwise in training, its losses are of no use, and a pair takes three passes.
        is_cheap = not any(map(_is_left_out, [cell for _, cell in self.network.cells_and_names()]))
        if self.batches == 1 and is_cheap:
            return pairs[:2]
        return [pairs[(self.batches.bit_length() - 1) % len(pairs)]]

    def measure(self, inputs: tuple[Any, ...], micro_batches: Sequence[MicroBatch], structure: SequenceOf) -> str:
        """Return the sentence for a batch that no training has run, or an empty string."""
        parts = self.rows_of(inputs, micro_batches, structure)
        for a, b in itertools.pairwise(parts):
            text = self._finding(None, a, b, None, None)
            if text:
                return text
        return ""

    def _finding(self, state: Snapshot | None, a: Rows, b: Rows, loss_a: Loss | None, loss_b: Loss | None) -> str:
        """Return the sentence for what is wrong with the losses of two micro batches, or an empty string."""
        try:
            both = a.joined(b)
        except RowsDiffer as error:
            return self._of_other_shapes(f"{error}", a.weight == a.size)
        with kept(self.network.network, self._is_copied) as now:
            passes = _Passes(self, now)
            found = self._of_state(passes, state, b)
            if not found:
                found = self._of_joined(passes, a, b, both, loss_a, loss_b)
            return found

    def _of_other_shapes(self, shapes: str, counts_rows: bool) -> str:
        if shapes and counts_rows and not (self.has_told_shapes or self.network.weighted):
            self.has_told_shapes = True
            warn(
                self.network.with_owner(
                    f"For '{_OWNER}', the batches of a window have different lengths ({shapes}), and each counts by "
                    f"its rows. A mean over tokens needs TokenMeanLoss, weighted=True or a weight of the batch. {HIDE}"
                )
            )
        return ""

    def _moved_in(self, before: Snapshot) -> list[Tensor]:
        """Return the tensors that forward passes have changed, but for those of BatchNorm and trained parameters."""
        norms = [cell for cell in before.cells if isinstance(cell, BATCH_NORMS)]
        owned = {id(each) for norm in norms for each in norm.get_parameters()}
        owned |= {id(each) for each in self.parameters}
        changed = [before.tensors.tensors[i] for i in before.tensors.changed()]
        return [each for each in changed if id(each) not in owned]

    def _of_state(self, passes: "_Passes", before: Snapshot | None, rows: Rows) -> str:
        """Return the sentence for a loss that reads what earlier micro batches have changed."""
        if before is None:
            return ""
        tensors = self._moved_in(before)
        copies = [i for i in before.tensors.values if any(before.tensors.tensors[i] is each for each in tensors)]
        if not copies and not before.has_changed_objects():
            return ""
        names = [repr(each.name) for each in tensors if isinstance(each, Parameter)] + before.changed_names()
        now = passes.loss(rows)

        def earlier() -> Loss:
            passes.state.put_back()
            before.put_back_objects()
            passes.prepare()
            for i in copies:
                passes.move_back(before.tensors, i)
            return passes.loss(rows)

        try:
            then = [earlier(), earlier()]
        except Exception:  # The loss may need what it has set.
            return ""
        finally:
            passes.restore()
        noise = abs(then[0].value - then[1].value)
        tolerance = self._tolerance([now, *then]) * max(abs(then[0].value), abs(now.value))
        if not math.isfinite(now.value) or abs(then[0].value - now.value) <= max(tolerance, NUM_DEVIATIONS * noise):
            return ""
        return (
            f"For '{_OWNER}', the forward pass changes {listed(names, 3) or 'an object'}, and the loss depends on it, "
            f"so micro batches see each other's state. Change it once per update, as in a callback's on_update_end()."
        )

    def _of_joined(self, passes: "_Passes", a: Rows, b: Rows, both: Rows, loss_a: Any, loss_b: Any) -> str:
        """Return the sentence for two micro batches whose losses do not make that of both."""
        is_known = loss_a is not None and loss_b is not None and not passes.has_evaluated
        losses = [loss_a, loss_b] if is_known else [passes.loss(a), passes.loss(b)]
        try:
            losses.insert(0, passes.loss(both))
        except Exception as caught:
            return not_measured(f"the network takes {a.size} rows, but not {both.size} ({first_line(caught)})", "")
        error = self._error(*losses)
        if error <= self._tolerance(losses) or not math.isfinite(losses[0].value):
            self.is_exact = is_known
            return ""
        if not runs_eagerly(self.compiles):
            # The program may have changed the network since a graph was compiled: graphs of now are compared.
            self.passes.clear()
            losses[0] = passes.loss(both)
        again = [passes.loss(a), passes.loss(a)]
        noise = _relative(again[0].value - again[1].value, losses)
        if noise > self._tolerance(losses):
            return self._of_random_or_state(passes, a, b, both)
        if not math.isfinite(losses[1].value + losses[2].value):
            return self._sentence(math.inf)
        if _relative(again[0].value - losses[1].value, losses) > self._tolerance(losses):
            return self._of_draws(passes, a, b)  # Other random numbers than in training.
        losses[1:] = again[0], passes.loss(b)
        error = self._error(*losses)
        if error <= self._tolerance(losses):
            return ""
        draws = [passes.loss(both, draws_on=True) for _ in range(NUM_DRAWS[0])]
        if max(_relative(each.value - losses[0].value, losses) for each in draws) > self._tolerance(losses):
            return self._of_draws(passes, a, b)
        if error < MIN_CERTAIN_ERROR:
            turned = [(both, losses[0]), (a, losses[1]), (b, losses[2])]
            rounding = [passes.loss(rows.take(range(rows.size)[::-1])).value - loss.value for rows, loss in turned]
            if error <= NUM_ORDERS * max(_relative(each, losses) for each in rounding):
                return ""
        return self._sentence(error)

    def _of_random_or_state(self, passes: "_Passes", a: Rows, b: Rows, both: Rows) -> str:
        """Return the sentence for a loss that is another one in each pass, beyond what random numbers explain."""
        restored = []
        for _ in range(2):
            passes.restore()
            restored.append(passes.loss(a))
        moving = [passes.loss(a), passes.loss(a)]
        drift = _relative(moving[0].value - moving[1].value, moving)
        if restored[0].value == restored[1].value and drift > self._tolerance(moving):
            return (
                f"For '{_OWNER}', the same rows have another loss in each pass ({_percent(drift)} apart), so micro "
                f"batches see each other's state. Keep state out of the loss, or change it once per update."
            )
        draws: list[list[Loss]] = [[], [], []]
        error = noise = 0.0
        for more in NUM_DRAWS:
            for losses, rows in zip(draws, (both, a, b)):
                losses += [passes.loss(rows, draws_on=True) for _ in range(more)]
            means = [Loss(float(np.mean([each.value for each in losses])), losses[0].weight) for losses in draws]
            spread = max(float(np.std([each.value for each in losses], ddof=1)) for losses in draws)
            noise = _relative(spread, means) / len(draws[0]) ** 0.5
            error = self._error(*means)
            if error <= max(NUM_LIKELY * noise, self._tolerance(means)):
                return ""
        return self._sentence(error) if error > NUM_DEVIATIONS * noise else ""

    def _of_draws(self, passes: "_Passes", a: Rows, b: Rows) -> str:
        """Return the sentence for a loss that draws random numbers, from passes that draw the same ones.

        The first rows of a pass get the same numbers as the first rows of any other pass. Where these are exchanged,
        the loss changes by their share of the rows.
        """
        size = min(a.size, b.size)
        first, second = a.take(range(size)), b.take(range(size))
        shares = []
        for seed in range(NUM_SEEDS):
            some = [first.joined(second), second.joined(second), first, second]
            runs = [passes.loss(rows, seed=seed) for rows in some]
            weights = [1.0 if self.network.weighted else run.weight for run in runs]
            totals = [run.value * weight for run, weight in zip(runs, weights)]
            change = totals[2] - totals[3]
            rounding = self._tolerance(runs) * max(map(abs, totals))
            if abs(change) <= NUM_ORDERS * rounding:
                return ""
            error = (totals[0] - totals[1] - change) / abs(change)
            shares.append(0.0 if abs(error * change) <= rounding else error)
        error = abs(float(np.mean(shares)))
        if error > NUM_DEVIATIONS * float(np.std(shares)):
            return self._sentence(error)
        return ""

    def _error(self, both: Loss, a: Loss, b: Loss) -> float:
        """Return how far the loss of two micro batches is from that of both, relative to the largest of the losses."""
        if not math.isfinite(a.value + b.value):
            return math.inf
        if not self.network.weighted:
            mean = (a.value * a.weight + b.value * b.weight) / (a.weight + b.weight)
            return _relative(both.value - mean, [both, a, b])
        of_weight = abs(both.weight - a.weight - b.weight) / (
            max(abs(both.weight), abs(a.weight), abs(b.weight)) or 1.0
        )
        return max(_relative(both.value - a.value - b.value, [both, a, b]), of_weight)

    def _tolerance(self, losses: Sequence[Loss]) -> float:
        """Return the relative difference that rounding explains."""
        values = np.array([each.value for each in losses])
        quantum = _quantum(values)
        of_quanta = NUM_QUANTA * quantum / np.abs(values).max() if quantum else 0.0
        return max(TOLERANCES[self.dtype].loss, min(float(of_quanta), MAX_OF_QUANTA))

    def _sentence(self, error: float) -> str:
        if self.network.weighted:
            what = "the sums and weights of two micro batches do not add up to those of both together"
        else:
            what = "the loss of two micro batches together is not the mean of their losses"
        return (
            f"For '{_OWNER}', {what} ({_percent(error)} apart): rows interact, a term is a sum, or the mean is over "
            f"something else than rows (tokens, boxes, class weights). {_PAGE}"
        )

    # ---- the gradients of the training program

    def begin_window(self, parts: Sequence[Rows], program: "Program") -> None:
        """At the second window, compare the gradients of two micro batches before and after they exchange rows."""
        self.windows += 1
        if not self.is_on or self.windows != 2:
            return
        if len(parts) == 1 and self.last is not None:
            parts = [self.last, *parts]
        self.last = None
        code = NetworkCode(self.network.network)
        has_hooks = code.has_hooks() or any(parameter.hooks() for parameter in self.parameters)
        # A compiled program that draws random numbers would go on with others.
        can_repeat = self.is_exact or runs_eagerly(self.compiles)
        if can_repeat and len(parts) > 1 and self.dtype == ms.float32 and not (has_hooks or self.is_distributed):
            self._guarded(lambda: self._exchange(program, parts[0], parts[-1]))

    def _exchange(self, program: "Program", a: Rows, b: Rows) -> None:
        size = min(a.size, b.size)
        first, second = a.take(range(size)), b.take(range(size))
        with kept(self.network.network, self._is_copied) as state:
            _Passes(self, state)  # It sets the modes.

            def gradient(add: AddMicroBatch, *some: Rows) -> Array:
                try:
                    for rows in some:
                        state.put_back_random(0)
                        add(rows)
                    return _signed_sums(program.buffers)
                finally:
                    for buffer in program.buffers:
                        buffer.clear()

            try:
                both = first.joined(second)
                exchanged = first.exchanged(second), second.exchanged(first)
            except RowsDiffer:
                return
            own = gradient(program.add, first, second)
            if size > 1:
                error = _distance(own, gradient(program.add, *exchanged))
            elif runs_eagerly(self.compiles):
                error = _distance(own, gradient(program.add_eagerly, both))
            else:
                return
            if not GRADIENT_TOLERANCE < error < math.inf:
                return
            noise = _distance(own, gradient(program.add, first, second))
            # Rows may belong in groups, which an exchange breaks and joining does not.
            error = min(error, _distance(own, gradient(program.add_eagerly, both)))
        if max(GRADIENT_TOLERANCE, NUM_DEVIATIONS * noise) < error < math.inf:
            self._tell(
                f"For '{_OWNER}', the gradient of two micro batches together is not the sum of their gradients "
                f"({_percent(error)} apart): rows interact, also in the backward pass, or a term does not show in the "
                f"loss. {_PAGE}"
            )


def explain_fixed_rows(network: nn.Cell, inputs: tuple[Any, ...], size: int, error: Exception) -> None:
    """Let the error of a micro batch begin with the reason if the network takes the whole batch alone."""
    batch = Rows.of(inputs, network.batch_axis)
    loss = Eager(network.loss_of(batch.structure), False)

    def takes(rows: Rows) -> bool:
        try:
            with kept(network.network, lambda tensor: tensor.size <= SMALL_SIZE):
                loss(Tensor(1.0, ms.float32), *rows.tensors)[0].asnumpy()
        except Exception:
            return False
        return True

    if takes(batch) and not takes(batch.take(range(size))):
        text = (
            f"For '{_OWNER}', the network takes the {batch.size} rows of the batch, but not the {size} rows of a micro "
            f"batch. Let its shapes follow its inputs, or give smaller batches with accumulation_steps."
        )
        error.args = (f"{network.with_owner(text)}\n{error}", *error.args[1:])


class _Passes:
    """Forward passes of rows from one state of the network, as in training but without Dropout and BatchNorm."""

    def __init__(self, measurement: LossMeasurement, state: Snapshot) -> None:
        self.measurement, self.state = measurement, state
        self.has_evaluated = False
        self.prepare()

    def prepare(self) -> None:
        """Leave out hooks, and set the cells that act otherwise in training to evaluation mode."""
        self.state.leave_out_hooks()
        for cell in self.state.cells:
            if _is_left_out(cell):
                self.has_evaluated = True
                set_mode(cell, False, False if getattr(cell, "use_batch_statistics", None) else None)

    def restore(self) -> None:
        """Take everything back to where it was before the passes."""
        self.state.put_back()
        self.prepare()

    def move_back(self, tensors: SnapshotTensors, place: int) -> None:
        """Give a tensor its old value; one of floating-point numbers moves beyond it."""
        value = tensors.values[place]
        if tensors.tensors[place].is_floating_point():
            now = as_array(tensors.tensors[place])
            value = now + FAR_BACK * (value - now)
        tensors.assign(place, value)

    def loss(self, rows: Rows, draws_on: bool = False, seed: int = 0) -> Loss:
        """Return the loss of rows, with the random numbers of this seed unless they are to go on."""
        if not draws_on:
            self.state.put_back_random(seed)
        run = self._run(rows.structure, rows.axes)
        value, weight = (float(number.asnumpy()) for number in run(Tensor(1.0, ms.float32), *rows.tensors)[:2])
        return Loss(value, weight if self.measurement.network.weighted else rows.weight)

    def _run(self, structure: SequenceOf, axes: tuple[int | None, ...]) -> Eager | Compiled:
        measurement = self.measurement
        is_eager = runs_eagerly(measurement.compiles)
        key = (structure, is_eager)

        def build() -> nn.Cell:
            loss = measurement.network.loss_of(structure)
            loss.reports = False
            loss.phase = "predict"
            return loss

        if key not in measurement.passes:
            # Single passes need one graph for all lengths: of two micro batches, and of each.
            open_axes = (None, *axes) if self.has_evaluated else None
            compiled = Compiled(build, _OWNER, "the network", measurement.network.network, open_axes=open_axes)
            measurement.passes[key] = Eager(build(), False) if is_eager else compiled
        return measurement.passes[key]


class _Watch:
    """The numbers of cells, and scalars that no optimizer updates, that a loop changes, as the weight of a term."""

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter]) -> None:
        updated = {id(each) for each in parameters}
        cells = [vars(cell) for _, cell in network.cells_and_names()]
        # A lookup of each number costs a fraction of what a walk over all attributes costs.
        self.places = [
            (attributes, name) for attributes in cells for name in attributes if _is_number(attributes, name)
        ]
        self.scalars = [each for each in network.get_parameters() if id(each) not in updated and each.size == 1]
        self.changes = 0
        self.values: list[object] = []

    def is_due(self) -> bool:
        """Return whether values have changed since the last call, for the first time or as often as 2, 4, 8 ..."""
        values = [attributes.get(name) for attributes, name in self.places]
        values += [each.asnumpy().item() for each in self.scalars]
        # Written as text, a value that is not a number is equal to itself.
        has_changed = bool(self.values) and repr(values) != repr(self.values)
        self.values = values
        self.changes += has_changed
        return has_changed and self.changes & (self.changes - 1) == 0


def _is_number(attributes: dict[str, object], name: str) -> bool:
    return type(attributes[name]) in (int, float) and not name.startswith("_")


def _is_left_out(cell: nn.Cell) -> bool:
    """Return whether passes set a cell to evaluation mode: MindSpore's own, and never a class of the user's."""
    is_theirs = isinstance(cell, IN_TRAINING_ONLY) and type(cell).__module__.startswith("mindspore.")
    return is_theirs and acts_otherwise_in_training(cell)


def acts_otherwise_in_training(cell: nn.Cell) -> bool:
    """Return whether a BatchNorm takes statistics of its batch, or a Dropout drops something."""
    fixed = getattr(cell, "use_batch_statistics", None)
    if fixed is not None:
        return bool(fixed)
    return bool(cell.training and getattr(cell, "p", None) != 0)


def _pairs_that_differ(batch: Batch) -> list[tuple[Rows, Rows, Loss | None, Loss | None]]:
    """Return pairs that each micro batch is in, with their losses: the smallest and the largest, then those between."""
    means = [math.nan if each is None else each.value / (each.weight or 1.0) for each in batch.losses]
    order = np.argsort(means, kind="stable").tolist()
    places = [(order[i], order[-1 - i]) for i in range(len(order) // 2)]
    if len(order) % 2:
        places.append((order[len(order) // 2], order[-1]))
    return [(batch.parts[a], batch.parts[b], batch.losses[a], batch.losses[b]) for a, b in places]


def _lowest_dtype(parameters: Sequence[Parameter], half: bool) -> ms.Type:
    dtypes = {parameter.dtype for parameter in parameters}
    if ms.bfloat16 in dtypes:
        return ms.bfloat16
    return ms.float16 if half or ms.float16 in dtypes else ms.float32


def _quantum(values: Array) -> float:
    """Return the largest power of two that divides all values; 0 if one of them is not finite or all are 0."""
    found = [abs(value) for value in values.tolist() if value]
    if not found or not np.isfinite(values).all():
        return 0.0
    quanta: list[float] = []
    for value in found:
        numerator, denominator = value.as_integer_ratio()
        quanta.append((numerator & -numerator) / denominator)
    return min(quanta)


def _relative(difference: float, losses: Sequence[Loss]) -> float:
    scale = max(abs(each.value) for each in losses)
    return float(abs(difference) / scale) if scale else 0.0


def _percent(error: float) -> str:
    if not math.isfinite(error):
        return "one has no finite loss,"
    return f"{100 * error:.2g} %" if error < 0.1 else f"{100 * error:.0f} %"


def _signed_sums(buffers: Sequence[GradientBuffer]) -> Array:
    """Return some sums of each gradient with random signs, which are enough to compare it."""
    flat = [as_array(total).reshape(-1) for buffer in buffers for total in buffer.sums]
    return np.concatenate([[grad @ np.resize(signs, grad.size) for signs in _SIGNS] for grad in flat])


_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, 9973))


def _distance(a: Array, b: Array) -> float:
    size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / size if size else 0.0
