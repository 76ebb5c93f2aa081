"""The measurement that shows, on the first batches, whether micro batches train what the whole batch trains.

It looks at what accumulation assumes. Two micro batches together must have the mean of their losses (their sums and
weights must add up), a micro batch must have the same loss whatever ran before it, and the gradients of two micro
batches must stay when these exchange rows.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.advice.gradient_exchange import NUM_DEVIATIONS, Program, gradient_error
from ms_gradaccum.advice.loss_of_rows import Loss, LossOfRows, Passes, relative
from ms_gradaccum.advice.rows import Padded, Rows, RowsDiffer
from ms_gradaccum.advice.schedule import Schedule
from ms_gradaccum.backend.snapshot import Snapshot, kept
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import BATCH_NORMS
from ms_gradaccum.batch.split import Flattened, SplitBatch

# A smaller difference counts only where it exceeds the effect of another order of the rows so many times.
MIN_CERTAIN_ERROR = 1e-2
NUM_ORDERS = 10
NUM_SEEDS = 3  # How many sets of random numbers are tried, each with all four passes.
NUM_OTHERS = 2  # Passes with further random numbers, which seldom are the same as the first by chance.
# Passes of a loss whose random numbers do not come back, and more if its error exceeds a few deviations.
NUM_DRAWS = (4, 12)
NUM_LIKELY = 3
# Tensors up to this size are always copied, to restore what the forward pass changes.
SMALL_SIZE = 2**16
_OWNER = "GradAccumulation"
HIDE = "check_loss=False leaves this out."
_PAGE = 'See "Losses and their ways out" on docs/concepts.md.'


class Batch(NamedTuple):
    """A batch that was trained: its micro batches, and their losses as far as they are known."""

    parts: list[Rows]
    losses: list[Loss]
    updates: int  # The number of updates before it.


class Pair(NamedTuple):
    """Two micro batches, and their losses in the training; none where they tell nothing of both together."""

    a: Rows
    b: Rows
    losses: tuple[Loss, ...] = ()


def not_measured(
    reason: str, remedy: str = "verify(network, batch, micro_size) compares a window with its batch."
) -> str:
    """Return the sentence for a loss of which nothing is known."""
    ways_out = f"{remedy} {HIDE}".strip()
    return f"For '{_OWNER}', the loss of micro batches could not be measured: {reason.rstrip('.')}. {ways_out}"


class LossMeasurement:
    """Measure the loss at batches 1, 2, 4, 8 ..., and after changes; warn once of a loss that parts train otherwise.

    Everything that its passes change is restored.
    """

    def __init__(
        self,
        network: nn.Cell,
        parameters: Sequence[Parameter],
        compiles: bool,
        half: bool,
        is_distributed: bool = False,
    ) -> None:
        self.network = network
        self.parameters = parameters
        self.is_distributed = is_distributed
        self.losses = LossOfRows(network, parameters, compiles, half)
        self.schedule = Schedule(network.network, parameters)
        self.is_on = True  # False after a finding.
        self.has_told_shapes = False
        # The network before a batch that is due, until that is measured.
        self.state: Snapshot | None = None
        # A batch of one micro batch that is due, until the next batch is joined with it.
        self.before: Batch | None = None
        self.moved: list[Tensor] = []  # The tensors that forward passes have changed so far.
        # The windows that have begun, and a micro batch of the first one until the second begins.
        self.windows = 0
        self.first: Rows | None = None

    @property
    def is_first_windows(self) -> bool:
        """True before the second window has begun."""
        return self.windows < 2

    @property
    def is_due(self) -> bool:
        """True if `after_batch` is to be called for a batch."""
        return self.is_on and (self.state is not None or self.before is not None)

    def before_batch(self) -> None:
        """Prepare the measurement of the next batch if it is due."""
        if self.is_on:
            self._guarded(self._prepare)

    def after_batch(self, parts: list[Rows], outputs: Sequence[Sequence[Tensor]], updates: int) -> None:
        """Measure a batch that is due. ``outputs`` are those of its micro steps, or nothing."""
        known = [self.losses.known(*pair) for pair in zip(parts, outputs)]
        self._guarded(lambda: self._measure(Batch(parts, known, updates)))

    def rows_of(self, inputs: tuple[Any, ...], split: SplitBatch, weight: float | None = None) -> list[Rows]:
        """Return the rows of the micro batches of a batch, or of its only one with a weight of the caller."""
        axes = Flattened(inputs, self.network.batch_axis).axes
        parts = []
        for rows, tensors in split.micro_batches:
            parts.append(Rows(split.structure, tensors, axes, rows, rows if weight is None else weight))
        if not split.places:
            return parts
        whole = Rows.of(inputs, self.network.batch_axis)
        most = max(1, self.network.token_limit.micro_tokens // (2 * split.longest))
        for i, places in enumerate(split.places):
            parts[i] = parts[i]._replace(padded=Padded(whole, places, most))
        return parts

    def measure(self, inputs: tuple[Any, ...], split: SplitBatch) -> str:
        """Return the sentence for a batch that no training has run, or an empty string."""
        for a, b in itertools.pairwise(self.rows_of(inputs, split)):
            text = self._finding(Pair(a, b), None)
            if text:
                return text
        return ""

    def _guarded(self, measure: Callable[[], None]) -> None:
        """Call a part of the measurement, whose errors never end a training."""
        try:
            with np.errstate(all="ignore"):
                measure()
        except Exception as error:
            self._tell(not_measured(f"{type(error).__name__}: {first_line(error)}"))

    def _tell(self, text: str) -> None:
        self.is_on = False
        self.state = None
        self.before = None
        self.losses.programs.clear()
        warn(self.network.with_owner(text))

    def _prepare(self) -> None:
        self.schedule.begin_batch()
        if self.before is None:
            self.state = None  # A batch that was due may have failed.
            if self.schedule.is_due:
                self._take_snapshot()

    def _take_snapshot(self) -> None:
        state = Snapshot(self.network.network, copied=self._is_copied)
        if self.is_distributed and state.codes[0].communicates():
            self._tell(not_measured("its forward pass communicates with other processes"))
        elif state.iterators:
            kind = type(state.iterators[0]).__name__
            self._tell(not_measured(f"the network reads an iterator ({kind}), which more passes would use up", ""))
        else:
            self.state = state

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether to copy a tensor. Copies of all that the forward pass leaves as it is would be large."""
        return tensor.size <= SMALL_SIZE or any(tensor is each for each in self.moved)

    # ---- the measurement of a batch

    def _measure(self, batch: Batch) -> None:
        state = self.state
        before = self.before
        if len(batch.parts) > 1:
            pair = self._pair_of(batch)
        elif before is None:
            self.before = batch
            return
        else:
            pair = Pair(before.parts[-1], batch.parts[0], (*before.losses, *batch.losses))
            if pair.a.structure != pair.b.structure:  # Python values differ: both micro batches get those of the last.
                pair = pair._replace(losses=())
            if before.updates != batch.updates:  # The parameters have moved.
                pair = pair._replace(losses=())
                state = None
        self.state = None
        self.before = None
        text = self._finding(pair, state)
        if text:
            self._tell(text)
        elif before is not None and self.schedule.is_due:
            self.before = batch
            self._take_snapshot()

    def _pair_of(self, batch: Batch) -> Pair:
        """Return the micro batches with the smallest and the largest loss, and in later batches those between."""
        means = [loss.value / (loss.weight or 1.0) for loss in batch.losses]
        order = np.argsort(means or range(len(batch.parts)), kind="stable").tolist()
        turn = self.schedule.batches.bit_length() - 1
        low = order[turn % ((len(order) + 1) // 2)]
        high = order[-1 - turn % (len(order) // 2)]
        losses = (batch.losses[low], batch.losses[high]) if means else ()
        return Pair(batch.parts[low], batch.parts[high], losses)

    def _finding(self, pair: Pair, before: Snapshot | None) -> str:
        """Return the sentence for what is wrong with the losses of two micro batches, or an empty string."""
        few = Pair(pair.a.few(), pair.b.few())
        if few.a.size < pair.a.size or few.b.size < pair.b.size:
            pair = few
        try:
            both = pair.a.joined(pair.b)
        except RowsDiffer as error:
            return self._of_other_shapes(f"{error}", pair.a.weight == pair.a.size)
        moved: list[int] = []
        names: list[str] = []
        if before is not None:
            moved = self._moved_in(before)
            names = before.changed_names()
        with kept(self.network.network, self._is_copied) as now:
            passes = Passes(self.losses, now)
            text = ""
            if before is not None and (moved or names):
                text = self._of_state(passes, before, moved, names, pair.b)
            return text or self._of_joined(passes, both, pair)

    def _of_other_shapes(self, shapes: str, counts_rows: bool) -> str:
        if shapes and counts_rows and not (self.has_told_shapes or self.network.weighted):
            self.has_told_shapes = True
            text = (
                f"For '{_OWNER}', the batches of a window have different lengths ({shapes}), and each counts by "
                f"its rows. A mean over tokens needs TokenMeanLoss, weighted=True or a weight of the batch. {HIDE}"
            )
            warn(self.network.with_owner(text))
        return ""

    def _moved_in(self, before: Snapshot) -> list[int]:
        """Return the places of tensors that forward passes have changed, but for BatchNorm's and trained parameters."""
        owned = set(map(id, self.parameters))
        for cell in before.cells:
            if isinstance(cell, BATCH_NORMS):
                owned |= set(map(id, cell.get_parameters()))
        moved = []
        for i in before.tensors.changed():
            tensor = before.tensors.tensors[i]
            if id(tensor) not in owned:
                moved.append(i)
                self.moved.append(tensor)
        return moved

    def _of_state(self, passes: Passes, before: Snapshot, moved: list[int], names: list[str], rows: Rows) -> str:
        """Return the sentence for a loss that reads what earlier micro batches have changed."""
        tensors = before.tensors
        for i in moved:
            names.append(repr(getattr(tensors.tensors[i], "name", "a tensor")))

        def earlier() -> Loss:
            passes.restore()
            before.put_back_objects()
            for i in moved:
                if i in tensors.values:
                    tensors.put_back_one(i)
            passes.prepare()
            return passes.loss(rows)

        now = passes.loss(rows)
        try:
            then = earlier()
            again = earlier()
        except Exception:  # The loss may need what it has set.
            return ""
        finally:
            passes.restore()
        noise = NUM_DEVIATIONS * abs(then.value - again.value)
        rounding = self.losses.rounding(now, then) * max(abs(now.value), abs(then.value))
        if not abs(now.value - then.value) > max(rounding, noise):
            return ""
        return (
            f"For '{_OWNER}', the forward pass changes {listed(names, 3)}, and the loss depends on it, so micro "
            f"batches see each other's state. Change it once per update, as in a callback's on_update_end()."
        )

    def _of_joined(self, passes: Passes, both: Rows, pair: Pair) -> str:
        """Return the sentence for two micro batches whose losses do not make that of both."""
        is_known = len(pair.losses) == 2 and not passes.has_evaluated
        parts = pair.losses if is_known else (passes.loss(pair.a), passes.loss(pair.b))
        try:
            whole = passes.loss(both)
        except Exception as caught:
            sizes = f"the network takes {pair.a.size} rows, but not {both.size}"
            return not_measured(f"{sizes} ({first_line(caught)})", "")
        if not math.isfinite(whole.value):
            return ""
        if self.losses.error(whole, *parts) <= self.losses.rounding(whole, *parts):
            self.losses.is_exact = is_known
            return ""
        # A graph may be older than a change of the network, and its random numbers do not come back.
        passes.is_eager = True
        whole, first, second, again = [passes.loss(rows) for rows in (both, pair.a, pair.b, pair.a)]
        rounding = self.losses.rounding(whole, first, second)
        drift = relative(first.value - again.value, first.value, again.value)
        if drift > rounding:
            return self._of_drift(passes, both, pair, drift)
        error = self.losses.error(whole, first, second)
        if error <= rounding:
            return ""
        others = [passes.loss(both, seed=None) for _ in range(NUM_OTHERS)]
        if max(relative(each.value - whole.value, whole.value) for each in others) > rounding:
            return self._of_draws(passes, pair)
        if error < MIN_CERTAIN_ERROR:
            turned = [passes.loss(rows.take(range(rows.size)[::-1])) for rows in (both, pair.a, pair.b)]
            orders = [relative(x.value - y.value, x.value) for x, y in zip(turned, (whole, first, second))]
            if error <= NUM_ORDERS * max(orders):
                return ""
        return self._sentence(error)

    def _of_drift(self, passes: Passes, both: Rows, pair: Pair, drift: float) -> str:
        """Return the sentence for a loss that is another one in each pass: it has state, or its draws never repeat."""
        restored = set()
        for _ in range(2):
            passes.restore()
            restored.add(passes.loss(pair.a).value)
        if len(restored) > 1:
            return self._of_noise(passes, both, pair)
        return (
            f"For '{_OWNER}', the same rows have another loss in each pass ({_apart(drift)}), so micro "
            f"batches see each other's state. Keep state out of the loss, or change it once per update."
        )

    def _of_noise(self, passes: Passes, both: Rows, pair: Pair) -> str:
        """Return the sentence for a loss whose draws never repeat: its means over some passes must add up."""
        draws: list[list[Loss]] = [[], [], []]
        error = 0.0
        noise = 0.0
        for count in NUM_DRAWS:
            for runs, rows in zip(draws, (both, pair.a, pair.b)):
                runs += [passes.loss(rows, seed=None) for _ in range(count)]
            means = [Loss(*each) for each in np.mean(draws, axis=1).tolist()]
            deviations = np.std(draws, axis=1, ddof=1)[:, 0]
            error = self.losses.error(*means)
            noise = relative(float(deviations.max()), *[mean.value for mean in means]) / len(draws[0]) ** 0.5
            if error <= max(NUM_LIKELY * noise, self.losses.rounding(*means)):
                return ""
        if error > NUM_DEVIATIONS * noise:
            return self._sentence(error)
        return ""

    def _of_draws(self, passes: Passes, pair: Pair) -> str:
        """Return the sentence for a loss that draws random numbers, from passes that draw the same ones.

        The first rows of a pass get the same numbers as the first rows of any other pass. Where these are exchanged,
        the loss changes by their share of the rows.
        """
        size = min(pair.a.size, pair.b.size)
        first = pair.a.take(range(size))
        second = pair.b.take(range(size))
        errors = []
        limit = 0.0
        for seed in range(NUM_SEEDS):
            some = (first.joined(second), second.joined(second), first, second)
            runs = [passes.loss(rows, seed) for rows in some]
            totals = np.array(list(map(self.losses.total, runs)))
            change = totals[2] - totals[3]
            errors.append((totals[0] - totals[1]) / change - 1)
            # The rounding of the totals, as a share of the change.
            limit = max(limit, NUM_ORDERS * self.losses.rounding(*runs) * float(np.abs(totals / change).max()))
        error = abs(float(np.mean(errors)))
        if error > max(limit, NUM_DEVIATIONS * float(np.std(errors))):
            return self._sentence(error)
        return ""

    def _sentence(self, error: float) -> str:
        what = "the loss of two micro batches together is not the mean of their losses"
        if self.network.weighted:
            what = "the sums and weights of two micro batches do not add up to those of both together"
        return (
            f"For '{_OWNER}', {what} ({_apart(error)}): rows interact, a term is a sum, or the mean is over "
            f"something else than rows (tokens, boxes, class weights{self._of_padding()}). {_PAGE}"
        )

    def _of_padding(self) -> str:
        return "" if self.network.token_limit is None else ", padding that micro_tokens cuts off"

    # ---- the gradients of the training program

    def begin_window(self, parts: Sequence[Rows], program: Program) -> None:
        """At the second window, compare the gradients of two micro batches before and after they exchange rows."""
        self.windows += 1
        first = self.first if len(parts) == 1 else parts[0]
        self.first = parts[-1] if self.windows == 1 else None
        if self.is_on and self.windows == 2 and first is not None:
            self._guarded(lambda: self._exchange(program, first.few(), parts[-1].few()))

    def _exchange(self, program: Program, first: Rows, last: Rows) -> None:
        with kept(self.network.network, self._is_copied) as state:
            passes = Passes(self.losses, state)
            has_hooks = state.codes[0].has_hooks() or any(parameter.hooks() for parameter in self.parameters)
            is_float32 = self.losses.tolerance == TOLERANCES[ms.float32].loss
            # A compiled program that draws random numbers would go on with others.
            can_repeat = self.losses.is_exact or passes.is_eager
            if has_hooks or self.is_distributed or not (can_repeat and is_float32):
                return
            error = gradient_error(passes, program, first, last)
        if error:
            self._tell(
                f"For '{_OWNER}', the gradient of two micro batches together is not the sum of their gradients "
                f"({_apart(error)}): rows interact, also in the backward pass, or a term does not show in the "
                f"loss. {_PAGE}"
            )


def _apart(error: float) -> str:
    if not math.isfinite(error):
        return "one of them is not finite"
    if error < 0.1:
        return f"{100 * error:.2g} % apart"
    return f"{100 * error:.0f} % apart"
