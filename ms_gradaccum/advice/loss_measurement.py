"""The measurement that shows, on the first batches, whether micro batches train what the whole batch trains.

It looks at what accumulation assumes. Two micro batches together must have the mean of their losses (their sums and
weights must add up), a micro batch must have the same loss whatever ran before it, and other parts of the rows of two
micro batches must have the same gradients.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import counted, first_line, listed, warn
from ms_gradaccum.advice.gradient_exchange import Program, gradient_error
from ms_gradaccum.advice.loss_of_rows import Loss, LossOfRows, error_of, relative
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.advice.schedule import Schedule
from ms_gradaccum.backend.snapshot import Snapshot
from ms_gradaccum.backend.tolerances import TOLERANCES

# A smaller error or difference counts only where it exceeds the effect of another order of the rows so many times.
MIN_CERTAIN_ERROR = 1e-2
MIN_CERTAIN_DIFFERENCE = 1e-6
NUM_ORDERS = 10
# Passes with further random numbers, which seldom are the same as the first by chance.
NUM_OTHERS = 2
# Differences that rounding to 16 bits explains, by the names in a network's code that may cast a part of its loss.
_OF_CASTS = {"float16": 2.0**-10, "half": 2.0**-10, "bfloat16": 2.0**-7}
# Measurements of a loss that draws random numbers, and the deviations of their mean that its error must exceed. A few
# measurements may lie together by chance.
DRAWS = {4: 3, 16: 6}
_OWNER = "GradAccumulation"
HIDE = "check_loss=False leaves this out."
_PAGE = 'See "Losses and their ways out" on docs/concepts.md.'


class Part(NamedTuple):
    """A micro batch, its loss in the training, and the number of updates before it."""

    rows: Rows
    loss: Loss
    updates: int

    @property
    def mean(self) -> float:
        return self.loss.total / (self.loss.weight or 1.0)


def not_measured(
    reason: str,
    remedy: str = "verify(network, batch, micro_size) compares a window with its batch.",
) -> str:
    """Return the sentence for a loss of which nothing is known."""
    ways_out = f"{remedy} {HIDE}".strip()
    return (
        f"For '{_OWNER}', the loss of micro batches could not be measured: {reason.rstrip('.')}. "
        f"{ways_out}"
    )


class LossMeasurement:
    """Measure the loss at batches 1, 2, 4, 8 ..., and after changes, until a loss is found that parts train otherwise.

    The methods return the sentence for it, or an empty string. Everything that their passes change is restored.
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
        self.has_told_shapes = False
        # The network before a batch that is due, until that is measured.
        self.state: Snapshot | None = None
        # A batch of one micro batch that is due, until the next batch is joined with it.
        self.waiting: list[Part] = []
        # The windows since the start or a change, and a micro batch of the first one until the second begins.
        self.windows = 0
        self.first: Rows | None = None

    @property
    def is_due(self) -> bool:
        """True if `after_batch` is to be called for a batch."""
        return self.schedule.is_due or bool(self.waiting)

    def before_batch(self) -> str:
        """Prepare the measurement of the next batch if it is due."""
        self.schedule.begin_batch()
        if self.schedule.follows_change:
            self.windows = 0
        if self.waiting or not self.schedule.is_due:
            return ""
        self.state = Snapshot(self.network.network, moved=self.losses.moved)
        if self.is_distributed and self.state.code.communicates():
            return not_measured("its forward pass communicates with other processes")
        return self._iterator_used()

    def _iterator_used(self) -> str:
        """Return the sentence for an iterator that further passes may use up, or an empty string."""
        kind = self.state and self.state.used_iterator()
        if not kind:
            return ""
        return not_measured(
            f"the network holds an iterator ({kind}), which more passes may use up", ""
        )

    def after_batch(
        self, parts: list[Rows], outputs: Sequence[Sequence[Tensor]], updates: int
    ) -> str:
        """Measure a batch that is due. ``outputs`` are those of its micro steps."""
        text = self._iterator_used()
        if text:
            return text
        found = self.waiting.copy()
        for rows, output in zip(parts, outputs):
            found.append(Part(rows, self.losses.from_outputs(rows, output), updates))
        if self.state is not None and not self.waiting:
            tensors = self.state.tensors
            self.losses.moved |= {id(tensors.tensors[i]) for i in tensors.changed()}
        self.waiting = found[-1:] if len(parts) == 1 and self.schedule.is_due else []
        if len(found) == 1:
            return ""
        state = self.state
        self.state = None
        if found[0].updates != updates:
            state = None  # What has moved since then, an update may have moved.
        if len(found) > 2:
            found.sort(key=lambda part: part.mean)
        # The smallest loss with the largest one, which differ most, and in later batches with those before it in turn.
        turn = self.schedule.batches.bit_length() - 1
        return self._finding(found[0], found[-1 - turn % (len(found) - 1)], state)

    def measure(self, parts: list[Rows]) -> str:
        """Measure the micro batches of a batch that no training has run."""
        unknown = [Part(rows, Loss(math.nan, rows.weight, math.nan), 0) for rows in parts]
        texts = (self._finding(*pair, None) for pair in itertools.pairwise(unknown))
        return next(filter(None, texts), "")

    def _finding(self, a: Part, b: Part, state: Snapshot | None) -> str:
        """Return the sentence for what is wrong with the losses of two micro batches, or an empty string."""
        losses = self.losses
        second = b.rows
        try:
            both = a.rows.joined(second)
        except RowsDiffer as error:
            self._tell_of_shapes(f"{error}", a.rows.weight == a.rows.size)
            return ""
        first = a.rows.beside(second)
        # Only the losses of a training tell of state, and of one network with the same inputs.
        is_known = a.updates == b.updates and first is a.rows and math.isfinite(a.mean + b.mean)
        with losses.passes(state):
            try:
                whole = losses.of(both)
            except Exception as caught:
                sizes = f"the network takes {counted(first.size, 'row')}, but not {both.size}"
                return not_measured(f"{sizes} ({first_line(caught)})", "")
            if not math.isfinite(whole.value):
                return ""
            is_known = is_known and not (losses.has_evaluated or first.padded)
            parts = (a.loss, b.loss) if is_known else self._in_turn(first, second)
            if abs(error_of(whole, *parts)) <= losses.rounding(whole, *parts):
                losses.is_exact = is_known
                return ""
            return self._reason(both, first, second)

    def _in_turn(self, first: Rows, second: Rows) -> tuple[Loss, Loss]:
        """Return the losses of two micro batches that follow each other."""
        return self.losses.alone(first), self.losses.of(second)

    def _tell_of_shapes(self, shapes: str, counts_rows: bool) -> None:
        if shapes and counts_rows and not (self.has_told_shapes or self.network.weighted):
            self.has_told_shapes = True
            text = (
                f"For '{_OWNER}', the batches of a window have different lengths ({shapes}), and "
                f"each counts by its rows. A mean over tokens needs TokenMeanLoss, weighted=True "
                f"or a weight of the batch. {HIDE}"
            )
            warn(self.network.with_owner(text))

    def _reason(self, both: Rows, first: Rows, second: Rows) -> str:
        """Return the sentence for two micro batches whose losses do not make that of both."""
        losses = self.losses
        # In graphs of one time, since the program may have changed the network after the first ones were compiled.
        losses.programs.clear()
        whole = losses.alone(both)
        if losses.alone(both) != whole:
            return self._by_chance(
                lambda: [error_of(*map(losses.of, (both, first, second)))], losses.rounding(whole)
            )
        a, b_after_a = self._in_turn(first, second)
        b = losses.alone(second)
        rounding = losses.rounding(whole, a, b)
        if abs(relative(b_after_a.value - b.value, b.value)) > rounding:
            if self._in_turn(first, second) == (a, b_after_a):
                names = listed(losses.start.changed_names(), 3) or "an object"
                return (
                    f"For '{_OWNER}', the forward pass changes {names}, and the loss depends on "
                    f"it, so micro batches see each other's state. Change it once per update, as "
                    f"in a callback's on_update_end()."
                )
        error = abs(error_of(whole, a, b))
        if error <= rounding:
            return ""
        if losses.is_eager:
            for _ in range(NUM_OTHERS):
                losses.random.note()
                if abs(relative(losses.alone(both).value - whole.value, whole.value)) > rounding:
                    return self._of_draws(first, second, rounding)
        if error < max(MIN_CERTAIN_ERROR, MIN_CERTAIN_DIFFERENCE / abs(whole.value or 1.0)):
            casts = losses.start.code.names & _OF_CASTS.keys()
            if any(error <= _OF_CASTS[name] for name in casts):
                return ""
            # Another order of the rows is rounding. Groups of rows stay together.
            orders = (second.joined(first), both.take(range(both.size)[::-1]))
            effects = [
                relative(losses.alone(rows).value - whole.value, whole.value) for rows in orders
            ]
            if error <= NUM_ORDERS * max(map(abs, effects)):
                return ""
        return self._of_losses(error)

    def _of_draws(self, first: Rows, second: Rows, rounding: float) -> str:
        """Return the sentence for a loss that draws the same random numbers in passes with the same states.

        Rows at the same place of a pass get the same numbers. So if the first half of the rows becomes other rows, the
        total must change by as much with a second half behind them as without one.
        """
        size = range(min(first.size, second.size))
        a = first.take(size)
        b = second.take(size)
        rows = (a.joined(b), b.joined(b), a, b)

        def draw() -> list[float]:
            totals = np.array([self.losses.of(each).total for each in rows])
            change = totals[2] - totals[3]
            error = totals[0] - totals[1] - change
            is_rounding = abs(error) <= NUM_ORDERS * rounding * np.abs(totals).max()
            # What all rows have alike is in no change.
            of_constant = totals[0] - totals[2] - totals[3]
            return [0.0 if is_rounding else error / change, of_constant / totals[0]]

        return self._by_chance(draw, rounding)

    def _by_chance(self, draw: Callable[[], list[float]], rounding: float) -> str:
        """Return the sentence for errors with other random numbers each time, whose means must be rounding."""
        draws: list[list[float]] = []
        error = 0.0
        for count, deviations in DRAWS.items():
            while len(draws) < count:
                self.losses.random.note()
                draws.append(draw())
            errors = np.abs(np.mean(draws, 0))
            noise = np.std(draws, 0, ddof=1) / count**0.5
            error = float(
                errors[errors > np.maximum(deviations * noise, rounding)].max(initial=0.0)
            )
            if not error:
                return ""
        return self._of_losses(error)

    def _of_losses(self, error: float) -> str:
        what = "the loss of two micro batches together is not the mean of their losses"
        if self.network.weighted:
            what = (
                "the sums and weights of two micro batches do not add up to those of both together"
            )
        why = (
            "a term is a sum, or the mean is over something else than rows (tokens, boxes, class "
            "weights)"
        )
        return self._sentence(what, error, why)

    def _sentence(self, what: str, error: float, why: str) -> str:
        if self.network.token_limit is not None:
            why += ", or the loss reads padding that micro_tokens cuts off"
        return f"For '{_OWNER}', {what} ({_apart(error)}): rows interact, {why}. {_PAGE}"

    # ---- the gradients of the training program

    def begin_window(self, parts: Sequence[Rows], program: Program) -> str:
        """At the second window, also after a change, compare the gradient of two micro batches with their parts'."""
        self.windows += 1
        first = parts[0] if len(parts) > 1 else self.first
        self.first = parts[-1] if self.windows == 1 else None
        losses = self.losses
        # A compiled program that draws random numbers would go on with others.
        can_repeat = losses.is_exact or losses.is_eager
        is_precise = losses.tolerance <= TOLERANCES[ms.float32].loss
        if (
            self.windows == 1
            or first is None
            or self.is_distributed
            or not (can_repeat and is_precise)
        ):
            return ""
        with losses.passes():
            if losses.start.code.has_hooks() or any(
                parameter.hooks() for parameter in self.parameters
            ):
                return ""
            error = gradient_error(losses, program, first, parts[-1])
        if not error:
            return ""
        what = "the gradient of two micro batches together is not the sum of their gradients"
        return self._sentence(
            what, error, "also in the backward pass, or a term does not show in the loss"
        )


def _apart(error: float) -> str:
    if not math.isfinite(error):
        return "one of them is not finite"
    return f"{100 * error:.{2 if error < 0.1 else 3}g} % apart"
