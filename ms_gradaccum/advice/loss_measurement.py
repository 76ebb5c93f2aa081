"""The measurement that shows, on the first batches, whether micro batches train what the whole batch trains.

It looks at what accumulation assumes. Two micro batches together must have the mean of their losses (their sums and
weights must add up), a micro batch must have the same loss whatever ran before it, and the gradients of two micro
batches must stay when these exchange rows.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.advice.gradient_exchange import NUM_DEVIATIONS, Program, gradient_error
from ms_gradaccum.advice.loss_of_rows import Loss, LossOfRows, error_of, relative
from ms_gradaccum.advice.rows import Rows, RowsDiffer
from ms_gradaccum.advice.schedule import Schedule
from ms_gradaccum.backend.snapshot import Snapshot
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import BATCH_NORMS

# A smaller difference counts only where it exceeds the effect of another order of the rows so many times.
MIN_CERTAIN_ERROR = 1e-2
NUM_ORDERS = 10
NUM_SEEDS = 3  # How many sets of random numbers are tried, each with all four passes.
NUM_OTHERS = 2  # Passes with further random numbers, which seldom are the same as the first by chance.
# Passes of a loss whose random numbers do not come back, and as many if its error exceeds a few deviations.
NUM_DRAWS = (4, 16)
NUM_LIKELY = 3
_OWNER = "GradAccumulation"
HIDE = "check_loss=False leaves this out."
_PAGE = 'See "Losses and their ways out" on docs/concepts.md.'


class Batch(NamedTuple):
    """A batch that was trained: its micro batches, and their losses in it where these tell of both together."""

    parts: list[Rows]
    losses: list[Loss]
    updates: int  # The number of updates before it.

    def joined(self, following: "Batch") -> "Batch":
        """Return the last micro batch of this batch with the first one of the following batch."""
        parts = [self.parts[-1], following.parts[0]]
        losses = self.losses[-1:] + following.losses[:1]
        # Parameters have moved in between, or Python values differ: both micro batches get those of the last one.
        if self.updates != following.updates or parts[0].structure != parts[1].structure:
            losses = []
        return Batch(parts, losses, following.updates)


def not_measured(
    reason: str, remedy: str = "verify(network, batch, micro_size) compares a window with its batch."
) -> str:
    """Return the sentence for a loss of which nothing is known."""
    ways_out = f"{remedy} {HIDE}".strip()
    return f"For '{_OWNER}', the loss of micro batches could not be measured: {reason.rstrip('.')}. {ways_out}"


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
        self.before: Batch | None = None
        # The windows that have begun, and a micro batch of the first one until the second begins.
        self.windows = 0
        self.first: Rows | None = None

    @property
    def is_due(self) -> bool:
        """True if `after_batch` is to be called for a batch."""
        return self.state is not None or self.before is not None

    def before_batch(self) -> str:
        """Prepare the measurement of the next batch if it is due."""
        self.schedule.begin_batch()
        if self.before is not None:
            return ""
        self.state = None  # A batch that was due may have failed.
        return self._take_snapshot()

    def after_batch(self, parts: list[Rows], outputs: Sequence[Sequence[Tensor]], updates: int) -> str:
        """Measure a batch that is due. ``outputs`` are those of its micro steps, or nothing."""
        losses = [self.losses.from_outputs(*pair) for pair in zip(parts, outputs)]
        return self._measure(Batch(parts, losses, updates))

    def measure(self, parts: list[Rows]) -> str:
        """Measure the micro batches of a batch that no training has run."""
        for pair in itertools.pairwise(parts):
            text = self._finding(Batch(list(pair), [], 0), None)
            if text:
                return text
        return ""

    def _take_snapshot(self) -> str:
        if not self.schedule.is_due:
            return ""
        state = Snapshot(self.network.network, moved=self.losses.moved)
        if self.is_distributed and state.codes[0].communicates():
            return not_measured("its forward pass communicates with other processes")
        if state.iterators:
            kind = type(state.iterators[0]).__name__
            return not_measured(f"the network reads an iterator ({kind}), which more passes would use up", "")
        self.state = state
        return ""

    # ---- the measurement of a batch

    def _measure(self, batch: Batch) -> str:
        before = self.before
        state = self.state
        if len(batch.parts) > 1:
            pair = self._pair_of(batch)
        elif before is not None:
            pair = before.joined(batch)
        else:
            self.before = batch
            return ""
        self.before = None
        self.state = None
        if before is not None and before.updates != batch.updates:
            state = None  # What has moved since then, an update may have moved.
        text = self._finding(pair, state)
        if text or before is None:
            return text
        self.before = batch if self.schedule.is_due else None
        return self._take_snapshot()

    def _pair_of(self, batch: Batch) -> Batch:
        """Return the micro batches with the smallest and the largest loss, and in later batches those between."""
        means = [loss.total / (loss.weight or 1.0) for loss in batch.losses]
        order = np.argsort(means or range(len(batch.parts)), kind="stable").tolist()
        turn = self.schedule.batches.bit_length() - 1
        half = len(order) // 2
        places = (order[turn % (len(order) - half)], order[-1 - turn % half])
        losses = [batch.losses[i] for i in places if means]
        return Batch([batch.parts[i] for i in places], losses, batch.updates)

    def _finding(self, pair: Batch, before: Snapshot | None) -> str:
        """Return the sentence for what is wrong with the losses of two micro batches, or an empty string."""
        few = [rows.few() for rows in pair.parts]
        if any(rows.size < each.size for rows, each in zip(few, pair.parts)):
            pair = Batch(few, [], pair.updates)
        first, second = pair.parts
        try:
            both = first.joined(second)
        except RowsDiffer as error:
            self._tell_of_shapes(f"{error}", first.weight == first.size)
            return ""
        changed = []
        if before is not None:
            trained = self._trained(before)
            self.losses.moved |= {id(before.tensors.tensors[i]) for i in before.tensors.changed(trained)}
            changed = before.changed_names(trained)
        with self.losses.passes():
            try:
                whole = self.losses.of(both)
            except Exception as caught:
                sizes = f"the network takes {first.size} rows, but not {both.size}"
                return not_measured(f"{sizes} ({first_line(caught)})", "")
            text = ""
            if before is not None and changed:
                text = self._of_state(before, changed, both, whole)
            return text or self._of_joined(pair, both, whole)

    def _tell_of_shapes(self, shapes: str, counts_rows: bool) -> None:
        if shapes and counts_rows and not (self.has_told_shapes or self.network.weighted):
            self.has_told_shapes = True
            text = (
                f"For '{_OWNER}', the batches of a window have different lengths ({shapes}), and each counts by "
                f"its rows. A mean over tokens needs TokenMeanLoss, weighted=True or a weight of the batch. {HIDE}"
            )
            warn(self.network.with_owner(text))

    def _trained(self, state: Snapshot) -> set[int]:
        """Return the identities of the tensors that training moves: trained parameters and those of BatchNorm."""
        trained = set(map(id, self.parameters))
        for cell in state.cells:
            if isinstance(cell, BATCH_NORMS):
                trained |= set(map(id, cell.get_parameters()))
        return trained

    def _of_state(self, before: Snapshot, changed: list[str], both: Rows, now: Loss) -> str:
        """Return the sentence for a loss that reads what earlier micro batches have changed."""
        losses = self.losses

        def earlier() -> float:
            losses.restore()
            before.put_back(self._trained(before))
            losses.prepare()
            return losses.of(both).value

        try:
            then = earlier()
            noise = relative(then - earlier(), then)
        except Exception:  # The loss may need what it has set.
            return ""
        finally:
            losses.restore()
        if not relative(now.value - then, now.value, then) > max(losses.rounding(now), NUM_DEVIATIONS * noise):
            return ""
        return (
            f"For '{_OWNER}', the forward pass changes {listed(changed, 3)}, and the loss depends on it, so micro "
            f"batches see each other's state. Change it once per update, as in a callback's on_update_end()."
        )

    def _of_joined(self, pair: Batch, both: Rows, whole: Loss) -> str:
        """Return the sentence for two micro batches whose losses do not make that of both."""
        losses = self.losses
        if not math.isfinite(whole.value):
            return ""
        is_known = bool(pair.losses) and not losses.has_evaluated
        parts = pair.losses if is_known else [losses.of(rows) for rows in pair.parts]
        if error_of(whole, *parts) <= losses.rounding(whole, *parts):
            losses.is_exact = is_known
            return ""
        rows = [both, *pair.parts]
        losses.restore()
        if losses.of(both).value != whole.value:
            return self._of_noise(rows)
        drift = relative(losses.of(both).value - whole.value, whole.value)
        if drift > losses.rounding(whole):
            return (
                f"For '{_OWNER}', the same rows have another loss in each pass ({_apart(drift)}), so micro "
                f"batches see each other's state. Keep state out of the loss, or change it once per update."
            )
        # In graphs of one time, since the program may have changed the network after the first ones were compiled.
        losses.programs.clear()
        whole, *parts = map(losses.of, rows)
        error = error_of(whole, *parts)
        rounding = losses.rounding(whole, *parts)
        if error <= rounding:
            return ""
        if losses.is_eager:
            others = [losses.of(both, seed=None).value for _ in range(NUM_OTHERS)]
            if max(relative(other - whole.value, whole.value) for other in others) > rounding:
                return self._of_draws(pair)
        if error < MIN_CERTAIN_ERROR and error <= NUM_ORDERS * self._effect_of_order(both, whole):
            return ""
        return self._sentence(error)

    def _of_noise(self, rows: list[Rows]) -> str:
        """Return the sentence for a loss whose draws never repeat: its means over some passes must add up."""
        draws: list[list[Loss]] = [[], [], []]
        for count in NUM_DRAWS:
            for runs, each in zip(draws, rows):
                runs += [self.losses.of(each, seed=None) for _ in range(count - len(runs))]
            means = [Loss(*each) for each in np.mean(draws, axis=1).tolist()]
            deviation = float(np.std(draws, axis=1, ddof=1)[:, 0].max())
            noise = relative(deviation, *[mean.value for mean in means]) / len(draws[0]) ** 0.5
            error = error_of(*means)
            if error <= max(NUM_LIKELY * noise, self.losses.rounding(*means)):
                return ""
            if error > NUM_DEVIATIONS * noise:
                return self._sentence(error)
        return ""

    def _of_draws(self, pair: Batch) -> str:
        """Return the sentence for a loss that draws the same random numbers in passes with the same seed.

        Rows at the same place of a pass get the same numbers. So if the first half of the rows becomes other rows, the
        total must change by as much with a second half behind them as without one.
        """
        size = min(rows.size for rows in pair.parts)
        first, second = [rows.take(range(size)) for rows in pair.parts]
        errors = []
        limit = 0.0
        for seed in range(NUM_SEEDS):
            runs = [self.losses.of(rows, seed) for rows in (first.joined(second), second.joined(second), first, second)]
            totals = np.array([run.total for run in runs])
            change = totals[2] - totals[3]
            errors.append((totals[0] - totals[1]) / change - 1)
            # The rounding of the totals, as a share of the change.
            limit = max(limit, NUM_ORDERS * self.losses.rounding(*runs) * float(np.abs(totals / change).max()))
        error = abs(float(np.mean(errors)))
        if error > max(limit, NUM_DEVIATIONS * float(np.std(errors))):
            return self._sentence(error)
        return ""

    def _effect_of_order(self, rows: Rows, loss: Loss) -> float:
        """Return how much another order of the rows changes their loss: rounding. Groups of rows stay together."""
        places = np.arange(rows.size)
        effects = []
        for order in (places[::-1].tolist(), np.roll(places, rows.size // 2).tolist()):
            value = self.losses.of(rows.take(order)).value
            effects.append(relative(value - loss.value, loss.value))
        return max(effects)

    def _sentence(self, error: float) -> str:
        what = "the loss of two micro batches together is not the mean of their losses"
        if self.network.weighted:
            what = "the sums and weights of two micro batches do not add up to those of both together"
        return (
            f"For '{_OWNER}', {what} ({_apart(error)}): rows interact, a term is a sum, or the mean is over "
            f"something else than rows (tokens, boxes, class weights){self._of_padding()}. {_PAGE}"
        )

    def _of_padding(self) -> str:
        return "" if self.network.token_limit is None else ", or the loss reads padding that micro_tokens cuts off"

    # ---- the gradients of the training program

    def begin_window(self, parts: Sequence[Rows], program: Program) -> str:
        """At the second window, compare the gradients of two micro batches before and after they exchange rows."""
        self.windows += 1
        first = parts[0] if len(parts) > 1 else self.first
        self.first = parts[-1] if self.windows == 1 else None
        if self.windows == 1 or first is None or self.is_distributed:
            return ""
        losses = self.losses
        # A compiled program that draws random numbers would go on with others.
        can_repeat = losses.is_exact or losses.is_eager
        if not can_repeat or losses.tolerance > TOLERANCES[ms.float32].loss:
            return ""
        with losses.passes():
            if losses.state.codes[0].has_hooks() or any(parameter.hooks() for parameter in self.parameters):
                return ""
            error = gradient_error(losses, program, first.few(), parts[-1].few())
        if not error:
            return ""
        return (
            f"For '{_OWNER}', the gradient of two micro batches together is not the sum of their gradients "
            f"({_apart(error)}): rows interact, also in the backward pass, or a term does not show in the "
            f"loss{self._of_padding()}. {_PAGE}"
        )


def _apart(error: float) -> str:
    if not math.isfinite(error):
        return "one of them is not finite"
    if error < 0.1:
        return f"{100 * error:.2g} % apart"
    return f"{100 * error:.0f} % apart"
