"""The measurement that shows, on the first batches, whether micro batches train what the whole batch trains.

It looks at what accumulation assumes. Two micro batches together must have the mean of their losses (their sums and
weights must add up), a micro batch must have the same loss whatever ran before it, and the gradients of two micro
batches must stay when these exchange rows.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.backend.compiled import Compiled, Eager, runs_eagerly
from ms_gradaccum.backend.kept_state import Array, KeptState, as_array, kept, set_mode
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.batch.split import BatchAxis, Flattened, MicroBatch
from ms_gradaccum.gradients.buffer import GradientBuffer

# Relative differences that rounding explains: of a loss in float32, in 16 bits, and of a gradient.
TOLERANCES = {ms.float32: 2.0**-14, ms.float16: 2.0**-6, ms.bfloat16: 2.0**-4}
GRADIENT_TOLERANCE = 1e-3
# All losses that are multiples of a number have been rounded to it, and to some more in the operators before.
NUM_QUANTA = 16
# A smaller difference counts only where it exceeds the effect of another order of the rows so many times.
MIN_CERTAIN_ERROR = 1e-2
NUM_ORDERS = 10
# A difference must exceed so many standard deviations of the losses of as many passes of a random loss.
NUM_DEVIATIONS = 10
NUM_DRAWS = 6
# Tensors up to this size are always copied, to restore what the forward pass changes.
SMALL_SIZE = 2**16
# A tensor that the forward pass moves is moved back by so many times as far, to see whether the loss reads it.
FAR_BACK = 100.0
_OWNER = "GradAccumulation"
_HIDE = "check_loss=False leaves this out."
_PAGE = 'See "Losses and their ways out" on docs/concepts.md.'

# Cells that draw random numbers or take statistics of the batch only in training. nn.BatchNorm3d has one inside.
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm),
    *(mint.nn.BatchNorm1d, mint.nn.BatchNorm2d, mint.nn.BatchNorm3d, mint.nn.SyncBatchNorm),
)
_IN_TRAINING_ONLY = (*BATCH_NORMS, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout)

AddMicroBatch = Callable[[int, tuple[Tensor, ...]], object]  # Adds the gradients of rows, a number, and their tensors.


class Loss(NamedTuple):
    """The loss of some rows: a mean and its number of rows, or a sum and the weight that the network returns."""

    value: float
    weight: float


class Batch(NamedTuple):
    """A batch that was trained: its micro batches, and their losses as far as they are known."""

    parts: list[Rows]
    losses: list[Loss | None]
    updates: int  # The number of updates before it.


def not_measured(reason: str, remedy: str = "verify(network, batch, micro_size) compares a window with its batch.") -> str:
    """Return the sentence for a loss of which nothing is known."""
    return f"For '{_OWNER}', the loss of micro batches could not be measured: {reason.rstrip('.')}. {remedy} {_HIDE}"


class LossMeasurement:
    """Measure the loss at batches 1, 2, 4, 8 ..., and after changes; warn once of a loss that parts train otherwise.

    Passes run as in training, compiled or op by op, and everything that they change is restored.
    """

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter], compiles: bool, half: bool) -> None:
        self.network, self.parameters, self.compiles = network, parameters, compiles
        self.dtype = _lowest_dtype(parameters, half)
        self.batches = 0
        self.is_on = True
        # True once a loss was as expected from the very losses of the training: nothing random is in it.
        self.is_exact = False
        # The batch before, from a batch that is due until one that it is joined with.
        self.before: Batch | None = None
        # What the network was before a batch that is due; and the tensors that a forward pass has changed so far.
        self.state: KeptState | None = None
        self.moved: list[Tensor] = []
        self.passes: dict[Hashable, Eager | Compiled] = {}
        self.watch = _Watch(network.network, parameters)
        self.has_told_shapes = False

    def before_batch(self) -> None:
        """Prepare the measurement of the next batch if it is due."""
        if not self.is_on:
            return
        self.batches += 1
        self.watch.look()
        is_due = self.batches & (self.batches - 1) == 0 or self.watch.is_due
        if is_due or self.before is not None:
            self._guarded(self._begin)

    def after_batch(
        self, inputs: Sequence[object], micro_batches: Sequence[MicroBatch], structure: Hashable, losses: Sequence[Any],
        updates: int,
    ) -> None:
        """Measure a batch that is due. ``losses`` has the outputs of its micro steps, or nothing."""
        if self.state is not None:
            axes = Flattened(tuple(inputs), self.network.batch_axis).axes
            parts = [Rows(structure, each.tensors, axes, each.rows) for each in micro_batches]
            known = [self._known(*pair) for pair in zip(parts, losses)] or [None] * len(parts)
            self._guarded(lambda: self._measure(Batch(parts, known, updates)))
        self.watch.note()

    def _guarded(self, measure: Callable[[], None]) -> None:
        """Call a part of the measurement, whose errors never end a training."""
        try:
            with np.errstate(all="ignore"):
                measure()
        except Exception as error:
            self._tell(not_measured(f"{type(error).__name__}: {first_line(error)}"))

    def _tell(self, text: str) -> None:
        self.is_on = False
        self.state = self.before = None
        self.passes.clear()
        warn(self.network.headed(text))

    def _begin(self) -> None:
        state = KeptState(self.network.network, copied=self._is_copied)
        if state.iterators:
            self._tell(not_measured(f"the network reads {type(state.iterators[0]).__name__}, an iterator", ""))
        else:
            self.state = state

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether to copy a tensor. Copies of all that the forward pass leaves as it is would be large."""
        return tensor.size <= SMALL_SIZE or any(tensor is each for each in self.moved)

    def _known(self, rows: Rows, outputs: Sequence[Tensor]) -> Loss:
        value, weight = float(outputs[0].asnumpy()), float(outputs[1].asnumpy())
        if self.network.weighted:
            return Loss(value, weight)
        return Loss(value / weight if weight else math.nan, rows.size)

    # ---- the measurement of a batch

    def _measure(self, batch: Batch) -> None:
        before, self.before = self.before, None
        state, self.state = self.state, None
        pair = _two_that_differ_most(batch) if len(batch.parts) > 1 else None
        if pair is None and before is None:
            self.before = batch
            self.state = state  # What the network was before the first of the two.
            return
        if pair is None:
            pair = before.parts[-1], batch.parts[0], before.losses[-1], batch.losses[0]
            if before.updates != batch.updates or before.parts[-1].structure != batch.parts[0].structure:
                pair = (*pair[:2], None, None)
        text = self._finding(state, *pair)
        if text:
            self._tell(text)

    def measure(self, inputs: tuple[Any, ...], micro_batches: Sequence[MicroBatch], structure: Hashable) -> str:
        """Return the sentence for a batch that no training has run, or an empty string."""
        axes = Flattened(inputs, self.network.batch_axis).axes
        parts = [Rows(structure, each.tensors, axes, each.rows) for each in micro_batches]
        if len(parts) < 2:
            return ""
        return self._finding(None, parts[0], parts[-1], None, None)

    def _finding(self, state: KeptState | None, a: Rows, b: Rows, loss_a: Loss | None, loss_b: Loss | None) -> str:
        """Return the sentence for what is wrong with the losses of two micro batches, or an empty string."""
        try:
            both = a.joined(b)
        except RowsDiffer as error:
            return self._of_other_shapes(f"{error}")
        with kept(self.network.network, self._is_copied) as now:
            passes = _Passes(self, now)
            found = self._of_state(passes, state, b)
            if not found:
                found = self._of_joined(passes, a, b, both, loss_a, loss_b)
            return found

    def _of_other_shapes(self, shapes: str) -> str:
        if not self.has_told_shapes and not self.network.weighted and shapes:
            self.has_told_shapes = True
            warn(
                self.network.headed(
                    f"For '{_OWNER}', the batches of a window have different lengths ({shapes}), and each counts by "
                    f"its rows. A mean over tokens needs TokenMeanLoss, weighted=True or a weight of the batch. {_HIDE}"
                )
            )
        return ""

    def _of_state(self, passes: "_Passes", before: KeptState | None, rows: Rows) -> str:
        """Return the sentence for a loss that reads what earlier micro batches have changed."""
        if before is None:
            return ""
        changed = before.tensors.changed()
        tensors = [before.tensors.tensors[i] for i in changed]
        norms = [cell for cell in before.cells if isinstance(cell, BATCH_NORMS)]
        own = {id(each) for norm in norms for each in norm.get_parameters()}
        self.moved += [each for each in tensors if id(each) not in own and all(each is not known for known in self.moved)]
        names = before.changed_names()
        places = [i for i in changed if id(before.tensors.tensors[i]) not in own and i in before.tensors.values]
        names = [name for name in names if name not in {repr(getattr(each, "name", "")) for each in tensors if id(each) in own}]
        if not names and not places and not before.has_changed_objects():
            return ""
        now = passes.loss(rows)
        before.put_back_objects()
        for i in places:
            passes.move_back(before.tensors.tensors[i], before.tensors.values[i])
        try:
            then = [passes.loss(rows, keeps_tensors=True) for _ in range(2)]
        except Exception:  # The loss may need what it has set.
            return ""
        finally:
            passes.state.put_back()
            passes.evaluate()
        noise = abs(then[0].value - then[1].value)
        error = abs(then[0].value - now.value)
        scale = max(abs(then[0].value), abs(now.value))
        if math.isfinite(now.value) and not error <= max(self._tolerance([now, *then]) * scale, NUM_DEVIATIONS * noise):
            return (
                f"For '{_OWNER}', the forward pass changes {listed(names, 3) or 'an object'}, and the loss depends on "
                f"it, so micro batches see each other's state. Change it at the end of an update, as in a callback's "
                f"on_update_end()."
            )
        return ""

    def _of_joined(self, passes: "_Passes", a: Rows, b: Rows, both: Rows, loss_a: Any, loss_b: Any) -> str:
        """Return the sentence for two micro batches whose losses do not make that of both."""
        is_known = loss_a is not None and loss_b is not None and not passes.has_evaluated
        try:
            losses = [passes.loss(both), loss_a if is_known else passes.loss(a), loss_b if is_known else passes.loss(b)]
        except Exception as error:
            reason = f"the network takes {a.size} rows, but not {both.size} at once ({first_line(error)})"
            return not_measured(reason, "")
        error = self._error(*losses)
        if error <= self._tolerance(losses) or not math.isfinite(losses[0].value):
            self.is_exact = is_known
            return ""
        again = [passes.loss(a), passes.loss(a)]
        noise = _relative(again[0].value - again[1].value, losses)
        if noise > self._tolerance(losses):
            return self._of_random_or_state(passes, a, b, both)
        if not math.isfinite(losses[1].value + losses[2].value):
            return self._sentence(math.inf)
        if _relative(again[0].value - losses[1].value, losses) > self._tolerance(losses):
            # Other random numbers than in training. All passes here draw the same ones.
            if self._fits_same_draws(passes, a, b):
                return ""
            return self._of_random_or_state(passes, a, b, both)
        losses[1:] = again[0], passes.loss(b)
        error = self._error(*losses)
        if error < MIN_CERTAIN_ERROR:
            others = [passes.loss(b.joined(a)).value - losses[0].value, passes.loss(a.joined(a)).value - losses[1].value]
            rounding = [size for each in others if (size := _relative(each, losses)) < MIN_CERTAIN_ERROR]
            if error <= max(self._tolerance(losses), NUM_ORDERS * max(rounding, default=0.0)):
                return ""
        if passes.has_draws(a) and self._fits_same_draws(passes, a, b):
            return ""
        return self._sentence(error)

    def _of_random_or_state(self, passes: "_Passes", a: Rows, b: Rows, both: Rows) -> str:
        """Return the sentence for a loss that is another one in each pass, beyond what random numbers explain."""
        restored = [passes.loss(a, restores=True) for _ in range(2)]
        moving = [passes.loss(a), passes.loss(a)]
        if restored[0].value == restored[1].value and moving[0].value != moving[1].value:
            drift = _relative(moving[0].value - moving[1].value, moving)
            if drift > self._tolerance(moving):
                return (
                    f"For '{_OWNER}', the same rows have another loss in each pass ({_percent(drift)} apart), so micro "
                    f"batches see each other's state. Keep state out of the loss, or change it at the end of an update."
                )
        draws = [[passes.loss(rows, draws_on=True) for _ in range(NUM_DRAWS)] for rows in (both, a, b)]
        means = [Loss(float(np.mean([each.value for each in some])), some[0].weight) for some in draws]
        noise = max(float(np.std([each.value for each in some], ddof=1)) for some in draws) / NUM_DRAWS**0.5
        error = self._error(*means)
        if error > max(NUM_DEVIATIONS * _relative(noise, means), self._tolerance(means)):
            return self._sentence(error)
        return ""

    def _fits_same_draws(self, passes: "_Passes", a: Rows, b: Rows) -> bool:
        """Return whether exchanging rows changes the loss by their share when each pass draws the same numbers.

        The first rows of a pass get the same numbers as the first rows of any other pass.
        """
        size = min(a.size, b.size)
        first, second = a.take(range(size)), b.take(range(size))
        runs = [passes.loss(rows) for rows in (first.joined(second), second.joined(second), first, second)]
        totals = np.array([[run.value if self.network.weighted else run.value * run.weight, run.weight] for run in runs])
        change = totals[2] - totals[3]
        tolerance = self._tolerance(runs) * np.abs(totals).max(0)
        is_seen = abs(change[0]) > NUM_ORDERS * tolerance[0]
        return bool(is_seen and (np.abs(totals[0] - totals[1] - change) <= tolerance).all())

    def _error(self, both: Loss, a: Loss, b: Loss) -> float:
        """Return how far the loss of two micro batches is from that of both, relative to the largest of the losses."""
        if not math.isfinite(a.value + b.value):
            return math.inf
        if not self.network.weighted:
            mean = (a.value * a.weight + b.value * b.weight) / (a.weight + b.weight)
            return _relative(both.value - mean, [both, a, b])
        of_weight = abs(both.weight - a.weight - b.weight) / (max(abs(both.weight), abs(a.weight), abs(b.weight)) or 1.0)
        return max(_relative(both.value - a.value - b.value, [both, a, b]), of_weight)

    def _tolerance(self, losses: Sequence[Loss]) -> float:
        """Return the relative difference that rounding explains."""
        values = np.array([each.value for each in losses])
        quantum = _quantum(values)
        of_quanta = NUM_QUANTA * quantum / np.abs(values).max() if quantum else 0.0
        return max(TOLERANCES[self.dtype], float(of_quanta))

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

    def exchange(
        self, add: AddMicroBatch, add_eagerly: AddMicroBatch, buffers: Sequence[GradientBuffer], parts: Sequence[Rows],
    ) -> None:
        """Compare the gradients of two micro batches with those after an exchange of rows, in the empty buffers."""
        code = NetworkCode(self.network.network)
        is_hooked = code.has_hooks() or any(parameter.hooks() for parameter in self.parameters)
        is_eager = runs_eagerly(self.compiles)
        if is_hooked or self.dtype != ms.float32 or not (is_eager or self.is_exact) or len(parts) < 2:
            return
        self._guarded(lambda: self._exchange(add, add_eagerly, buffers, parts[0], parts[-1]))

    def _exchange(self, add: AddMicroBatch, add_eagerly: AddMicroBatch, buffers: Any, a: Rows, b: Rows) -> None:
        size = min(a.size, b.size)
        if a.size != b.size:
            a, b = a.take(range(size)), b.take(range(size))
        with kept(self.network.network, self._is_copied) as now:
            passes = _Passes(self, now)

            def gradient(add: AddMicroBatch, *some: Rows) -> Array:
                try:
                    for rows in some:
                        now.put_back_random(seeded=True)
                        add(rows.size, rows.tensors)
                    return _signed_sums(buffers)
                finally:
                    for buffer in buffers:
                        buffer.clear()

            try:
                pairs = [(a, b)] if size == 1 else [(a, b), (a.exchanged(b), b.exchanged(a))]
            except RowsDiffer:
                return
            own = gradient(add, *pairs[0])
            other = gradient(add, *pairs[-1]) if size > 1 else gradient(add_eagerly, a.joined(b))
            error = _distance(own, other)
            if error <= GRADIENT_TOLERANCE or not math.isfinite(error):
                return
            noise = _distance(own, gradient(add, *pairs[0]))
            # Rows may belong in groups, which an exchange breaks and joining does not.
            joined = _distance(own, gradient(add_eagerly, a.joined(b)))
            passes.state.put_back()
            if min(error, joined) > max(GRADIENT_TOLERANCE, NUM_DEVIATIONS * noise):
                self._tell(
                    f"For '{_OWNER}', the gradient of two micro batches together is not the sum of their gradients "
                    f"({_percent(joined)} apart), although their losses fit: rows interact in the backward pass, or a "
                    f"term does not show in the loss. {_PAGE}"
                )


class _Passes:
    """Forward passes of rows from one state of the network, as in training but without Dropout and BatchNorm."""

    def __init__(self, measurement: LossMeasurement, state: KeptState) -> None:
        self.measurement, self.state = measurement, state
        self.has_evaluated = False
        self.evaluate()

    def evaluate(self) -> None:
        """Set the cells that act otherwise in training to evaluation mode."""
        for cell in self.state.cells:
            is_theirs = isinstance(cell, _IN_TRAINING_ONLY) and type(cell).__module__.startswith("mindspore.")
            if is_theirs and acts_otherwise_in_training(cell):
                self.has_evaluated = True
                set_mode(cell, False, False if getattr(cell, "use_batch_statistics", None) else None)

    def move_back(self, tensor: Tensor, value: Array) -> None:
        """Give a tensor its old value; one of floating-point numbers moves beyond it."""
        now = as_array(tensor)
        if tensor.is_floating_point():
            value = now + FAR_BACK * (value - now)
        self.state.tensors.assign(tensor, value)

    def has_draws(self, rows: Rows) -> bool:
        """Return whether passes that draw on have other losses."""
        losses = [self.loss(rows, draws_on=True) for _ in range(2)]
        return losses[0].value != losses[1].value

    def loss(
        self, rows: Rows, restores: bool = False, draws_on: bool = False, keeps_tensors: bool = False
    ) -> Loss:
        """Return the loss of rows. Tensors and random numbers are as at the begin, unless they are to go on."""
        if restores:
            self.state.put_back()
            self.evaluate()
        if not draws_on:
            self.state.put_back_random(seeded=True)
        run = self._run(rows.structure, rows.axes)
        value, weight = (float(number.asnumpy()) for number in run(Tensor(1.0, ms.float32), *rows.tensors)[:2])
        return Loss(value, weight if self.measurement.network.weighted else rows.size)

    def _run(self, structure: Hashable, axes: tuple[int | None, ...]) -> Eager | Compiled:
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
    """The numbers and tensors of the user's cells that a loop changes between batches, such as the weight of a term."""

    def __init__(self, network: nn.Cell, parameters: Sequence[Parameter]) -> None:
        updated = {id(each) for each in parameters}
        self.cells = [cell for _, cell in network.cells_and_names()]
        self.scalars = [each for each in network.get_parameters() if id(each) not in updated and each.size == 1]
        self.changes = 0
        self.is_due = False
        self.noted = self._values()

    def _values(self) -> list[object]:
        numbers = [value for cell in self.cells for name, value in vars(cell).items() if _is_number(name, value)]
        return [*numbers, *(float(each.asnumpy()) for each in self.scalars)]

    def look(self) -> None:
        """Look for changes since the end of the batch before. Changes 1, 2, 4, 8 ... are due for a measurement."""
        if self._values() != self.noted:
            self.changes += 1
            self.is_due = self.changes & (self.changes - 1) == 0

    def note(self) -> None:
        """Note the values at the end of a batch, which may change some itself."""
        self.is_due = False
        self.noted = self._values()


def _is_number(name: str, value: object) -> bool:
    return type(value) in (int, float) and not name.startswith("_")


def acts_otherwise_in_training(cell: nn.Cell) -> bool:
    """Return whether a BatchNorm takes statistics of its batch, or a Dropout drops something."""
    fixed = getattr(cell, "use_batch_statistics", None)
    if fixed is not None:
        return bool(fixed)
    return bool(cell.training and getattr(cell, "p", None) != 0)


def _two_that_differ_most(batch: Batch) -> tuple[Rows, Rows, Loss | None, Loss | None] | None:
    """Return two micro batches and their losses: the smallest and the largest mean; None if none has a loss."""
    means = [math.nan if each is None else each.value for each in batch.losses]
    order = [int(i) for i in np.argsort(means)]
    low, high = order[0], order[-1]
    if math.isnan(means[high]) and not math.isnan(means[low]):
        pass  # A loss that is not a number is compared with one that is.
    if low == high:
        low, high = 0, len(means) - 1
    return batch.parts[low], batch.parts[high], batch.losses[low], batch.losses[high]


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
    quanta = []
    for value in found:
        numerator, denominator = value.as_integer_ratio()
        quanta.append((numerator & -numerator) / denominator)
    return min(quanta)


def _relative(difference: float, losses: Sequence[Loss]) -> float:
    scale = max(abs(each.value) for each in losses)
    return abs(difference) / scale if scale else 0.0


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %" if error < 0.1 else f"{100 * error:.0f} %"


def _signed_sums(buffers: Sequence[GradientBuffer]) -> Array:
    """Return some sums of each gradient with random signs, which are enough to compare it."""
    flat = [as_array(total).reshape(-1) for buffer in buffers for total in buffer.sums]
    return np.concatenate([[grad @ np.resize(signs, grad.size) for signs in _SIGNS] for grad in flat])


_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, 9973))


def _distance(a: Array, b: Array) -> float:
    size = max(np.linalg.norm(a), np.linalg.norm(b))
    return float(np.linalg.norm(a - b) / size) if size else 0.0
