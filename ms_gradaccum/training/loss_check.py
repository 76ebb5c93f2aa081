"""The measurement that shows, on the first batches, whether a loss can be trained in micro batches."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.backend.compiled import Compiled, Eager, op_by_op, runs_eagerly
from ms_gradaccum.backend.kept_state import Array, Changes, KeptState, kept
from ms_gradaccum.batch.loss_parts import Cut, Finding, Loss, Rows, Split, judge, other_attributes, other_gradient
from ms_gradaccum.training.rows_gradient import GradientOfRows, can_differentiate, sums_of
from ms_gradaccum.training.settings import StepSettings

# A correct loss differs only by the rounding of a sum in another order. In float32 that is some hundred units in the
# last place, for long reductions; in 16-bit formats, some.
TOLERANCES = {ms.float32: 2.0**-14, ms.float16: 2.0**-6, ms.bfloat16: 2.0**-4}
# A smaller error in float32 may be cancellation: it counts only if it exceeds the effect of another order of the rows.
_SURE, _ORDERS = 1e-2, 10
# The error of a random loss counts only above _DRAWS standard deviations, from _REPEATS draws, up to a noise limit.
_DRAWS, _REPEATS, _TOO_RANDOM = 10, 8, 0.5
# A loss that seems to draw no random numbers is run again _AGAIN times. A rare effect may be _SEEN times as large.
_AGAIN, _SEEN = 3, 3
# Gradients suffer more cancellation than losses. Few rows are differentiated, because op by op they may take more
# memory than in a graph.
_GRADIENT, _FEW_ROWS = 1e-3, 4
# Tensors up to this size are always copied, in case that only a forward pass outside of training changes them.
_SMALL = 2**16
# The last batch that is measured.
_LAST = 64
_OWNER = "GradAccumulation"
# Classes of cells in evaluation mode during the measurement: random cells and those with batch statistics, or all.
_AS_IN_TRAINING, _IN_EVALUATION = ("Drop", "BatchNorm"), ("",)
IN_LARGER_GRAPH = Finding.not_measured("the step is part of a larger graph").text
_MOVES = (
    "For 'GradAccumulation', the forward pass should leave what no optimizer updates as it is, but it changes {names}: "
    "each micro batch does so, and the next one sees it. Change it at the end of an update, as in a callback's "
    "on_update_end()."
)


class LossCheck:
    """Measure the loss of a network at batches 1, 2, 4, 8 ... 64, and warn if it cannot be trained in parts.

    It compares the losses of some rows with those of their halves, and restores the network to the bit. If ``several``
    processes measure at the same time, all run the network equally often, since it may communicate.
    """

    def __init__(
        self, network: nn.Cell, updated: Sequence[Parameter], settings: StepSettings, half: bool, several: bool
    ) -> None:
        self.network, self.settings, self.half, self.several = network, settings, half, several
        self.updated = {id(parameter) for parameter in updated}
        self.parameters = ParameterTuple(network.trainable_params())
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.tolerance = TOLERANCES[ms.bfloat16 if ms.bfloat16 in dtypes else ms.float16 if half else ms.float32]
        self.batches = 0
        self.is_done = network.is_cached or not settings.check_loss
        self.has_warned = False
        # True once the same rows had another loss, or rows were in groups: then gradients of few rows prove nothing.
        self.is_rough = False
        # The only row of the batch before.
        self.row: Rows | None = None
        # The changes by the first micro batch; None if no micro batch has run.
        self.changes: Changes | None = None
        self.runs: dict[Hashable, Eager | Compiled] = {}
        # The state of the measurement: the cells in evaluation mode, and whether it runs op by op.
        self.evaluated: tuple[str, ...] = _AS_IN_TRAINING
        self.eager = True

    @property
    def adds_parts(self) -> bool:
        """True if a window has more than one micro batch, over all processes."""
        return bool(self.network.micro_size > 1 or self.settings.accumulation_steps > 1 or self.several)

    def before_batch(self) -> None:
        if self.batches == 0 and not self.is_done and self.adds_parts:
            self.changes = Changes(self.network.network)

    def after_micro_batch(self) -> None:
        """Warn if the first micro batch has changed tensors that no optimizer updates, except BatchNorm statistics."""
        if self.changes is None or self.changes.tensors is not None:
            return
        changed = self.changes.find()
        cells = [cell for _, cell in self.network.cells_and_names()]
        norms = [cell for cell in cells if any("BatchNorm" in kind.__name__ for kind in type(cell).__mro__)]
        known = self.updated | {id(each) for norm in norms for each in norm.get_parameters()}
        names = [repr(each.name) for each in changed if isinstance(each, Parameter) and id(each) not in known]
        if names:
            warn(self.network.headed(_MOVES.format(names=", ".join(names[:3]))))

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether to copy a tensor, to restore it later. Copies of all unchanged tensors would be large."""
        changed = [tensor] if self.changes is None else self.changes.tensors or ()
        return tensor.size <= _SMALL or any(tensor is each for each in changed)

    def after_batch(self, parts: int, inputs: tuple[object, ...]) -> None:
        """Count a batch that ran as ``parts`` micro batches, and measure if it is due."""
        if self.is_done or not self.adds_parts:
            return
        self.batches += 1
        if self.batches & (self.batches - 1) != 0 and self.row is None:
            return
        rows: Rows | None = Rows.of(inputs, self.network.batch_axis)
        least = rows.size // parts if rows else 0
        if rows and rows.size == 1:
            # A single row is measured together with the single row of the batch before.
            before, self.row = self.row, rows if self.row is None else None
            rows = None if before is None else before.joined(rows)
        finding = None if rows is None else self.measure(rows, parts, least)
        if finding is not None and not self.has_warned:
            self.has_warned = True
            warn(self.network.headed(finding.text))
        self.is_done = self.batches >= _LAST or (self.has_warned and not self.several)

    def measure(self, rows: Rows, parts: int, least: int) -> Finding | None:
        """Return why the loss cannot be trained in ``parts`` parts of at least ``least`` rows, or None."""
        most, number = max(-(-rows.size // parts), 2), (self.batches - 1).bit_length()
        # Halves of unlike rows show the cause of an error. Mixed halves show effects among rows of one class.
        unlike, mixed, three = rows.cuts(most, number)
        cuts = [mixed, unlike] if self.network.weighted else [unlike, mixed]
        # A check of three parts takes fewer passes than two cuts into halves, which then show the cause of an error.
        cuts[:0] = [three] if three is not None and not self.several else []
        gradient = number == 1 and not self.half
        finding = self.measure_cuts(cuts, parts, gradient)
        if finding and math.isfinite(finding.miss) and least > 1 and most < 4 and not self.several:
            # Avoid single rows, which are no micro batch here: on CPU, BinaryCrossEntropy of one element is doubled.
            cuts = [tuple(each.take([*range(each.size)] * 2) for each in cut) for cut in cuts]
            finding = self.measure_cuts(cuts, parts, gradient)
        # Rows of one group (a preference pair, the answers to a prompt) may meet if each micro batch has whole groups.
        cut = rows.micro_batches(parts) if finding and finding.of_loss and not self.several else ()
        in_groups = bool(cut) and self._fits(cut, parts)
        self.is_rough |= in_groups
        return None if in_groups else finding

    def _fits(self, cut: Cut, parts: int) -> bool:
        """Return whether the loss of the first micro batch joined with each other one is the mean of their losses."""
        self.eager, self.evaluated = True, _AS_IN_TRAINING
        try:
            with kept(self.network.network, self._is_copied) as state, np.errstate(all="ignore"):
                state.evaluate(self.evaluated)
                pairs = ((cut[0].joined(each) or each, cut[0], each) for each in cut[1:])
                splits = [self._split(*(self._loss(state, rows) for rows in pair)) for pair in pairs]
        except Exception:
            return False
        return all(split.shows(_ORDERS) and judge(split, parts) is None for split in splits)

    def measure_cuts(self, cuts: Sequence[Cut], parts: int, gradient: bool = False) -> Finding | None:
        """Return why the loss cannot be trained in ``parts`` parts, by the first cut that shows it, or None."""
        # If a loss is right op by op, it is right in a graph. Several processes measure once: an error would leave
        # others waiting.
        finding: Finding | None = None
        for eager in [True] if runs_eagerly(self.settings.compiles) else [False] if self.several else [True, False]:
            self.eager = eager
            finding = self._measure_in(_AS_IN_TRAINING, cuts, parts, gradient)
            if finding is not None and math.isnan(finding.miss):
                # A function that draws random numbers in training need not do so in evaluation mode.
                finding = self._measure_in(_IN_EVALUATION, cuts, parts, gradient)
            if finding is None:
                break
        return finding

    def _measure_in(self, words: tuple[str, ...], cuts: Sequence[Cut], parts: int, gradient: bool) -> Finding | None:
        self.evaluated = words
        try:
            # A loss or a gradient may be infinite, or exceed the range of 16 bits.
            with kept(self.network.network, self._is_copied) as state, np.errstate(all="ignore"):
                state.evaluate(words)
                return self._judge_all(state, cuts, parts, gradient)
        except Exception as error:
            if "'network' must return its" in first_line(error):
                return Finding.not_measured("out of training it returns no scalar loss")
            return Finding.not_measured(f"a part of a batch raises {type(error).__name__}: {first_line(error)}")

    def _judge_all(self, state: KeptState, cuts: Sequence[Cut], parts: int, gradient: bool) -> Finding | None:
        loss, part = partial(self._loss, state), cuts[0][1]
        finding: Finding | None = None
        known: dict[tuple[int, ...], Loss] = {}
        doubtful: list[tuple[Cut, bool]] = []
        if len(cuts[0]) > 3:
            three, *cuts = cuts
            split = self._split(*map(loss, three)) if self.eager else None
            found = None
            if split is not None:
                found, known[three[0].places] = judge(split, 1), split.whole
            if split is not None and split.shows() and found is None:
                cuts, doubtful = [], [(cuts[0], True)] if gradient else []
            elif found is None or math.isfinite(found.miss):
                # Halves may agree by chance. In that case the parts of one half do not.
                rest = three[2:]
                cuts = [*cuts, (rest[0].joined(rest[1]) or three[0], *rest)]
        for cut in cuts:
            if finding is not None and not self.several:
                break
            whole = loss(cut[0]) if self.several else known.get(cut[0].places) or loss(cut[0])
            split = self._split(whole, *map(loss, cut[1:]))
            found, known[cut[0].places] = self._judge(state, cut, split, parts), whole
            finding = finding or found
            doubtful += [(cut, split.shows())] if not split.shows() or (gradient and cut is cuts[0]) else []
        # If the network is random in evaluation mode too, the noise of its gradient is unknown.
        is_exact = self.evaluated is _AS_IN_TRAINING and not (self.is_rough or self.several)
        if finding is None and doubtful and is_exact and can_differentiate(self.network, self.parameters):
            findings = (self._judge_gradient(state, cut, shows) for cut, shows in doubtful)
            finding = next(filter(None, findings), None)
        return finding or (None if self.several else self._judge_attributes(loss, part))

    def _split(self, whole: Loss, *parts: Loss) -> Split:
        """Return the losses with their tolerance. Losses that are all exact in a 16-bit format were computed in it."""
        values = np.array([loss.value for loss in (whole, *parts)], np.float32)
        tolerance = 0.0 if (values.view(np.uint32) & 0xFFFF).any() else TOLERANCES[ms.bfloat16]
        if (values.astype(np.float16) == values).all():
            tolerance = TOLERANCES[ms.float16]
        return Split(whole, parts, self.network.weighted, max(self.tolerance, tolerance))

    def _judge(self, state: KeptState, cut: Cut, split: Split, parts: int) -> Finding | None:
        finding, loss = judge(split, parts), partial(self._loss, state)
        # Rare random events are often absent, so that only one of these passes had an error.
        passes = [(cut[0], split.whole)] if self.several else _AGAIN * [*zip(cut, split.losses)]
        noise = _noise(loss, passes, split) if finding or self.several else 0.0
        if finding is None or not math.isfinite(finding.miss):
            return finding
        self.is_rough |= noise > split.tolerance
        if noise > split.tolerance and not self.several and self._fits_same_draws(state, cut, split.tolerance):
            return None
        if finding.miss <= noise > (split.tolerance if self.evaluated is _AS_IN_TRAINING else _TOO_RANDOM):
            return Finding.not_measured("the same rows give another loss in each pass (random numbers, a counter)")
        if finding.miss <= noise or self.several:
            return finding if finding.miss > noise else None
        if finding.miss < _SURE:
            other_order = loss(cut[0].take(range(cut[0].size)[::-1])).value
            # It is rounding if the same rows in another order differ by nearly as much.
            if self.tolerance < _ORDERS * split.relative(other_order - split.whole.value) >= finding.miss:
                return None
        places = split.larger_first()
        larger, other = (cut[1 + place] for place in places)
        twice = larger.take([*range(larger.size)] * 2)
        more = twice.joined(other)
        halves = (other.take(range(begin, other.size, 2)) for begin in range(min(other.size, 2)))
        alone = max(abs(loss(half).value - split.parts[places[1]].value) for half in halves)
        return judge(split, parts, (loss(twice).value, loss(more).value if more is not None else math.nan, alone))

    def _fits_same_draws(self, state: KeptState, cut: Cut, tolerance: float) -> bool:
        """Return whether exchanging rows changes the loss by their share when each pass draws the same random numbers.

        The first rows of a pass get the same numbers as the first rows of any other pass.
        """
        (first, second), totals = (part.take(range(min(cut[1].size, cut[2].size))) for part in cut[1:3]), []
        for rows in (first.joined(second) or first, second.joined(second) or first, first, second):
            state.draw_again()
            value, weight = self._loss(state, rows)
            totals.append(np.array((value if self.network.weighted else value * weight, weight)))
        change, scale = totals[2] - totals[3], tolerance * np.abs(totals).max(0)
        return bool(abs(change[0]) > _ORDERS * scale[0] and (np.abs(totals[0] - totals[1] - change) <= scale).all())

    def _judge_attributes(self, loss: Callable[[Rows], Loss], rows: Rows) -> Finding | None:
        """Return the finding for a loss that depends on attributes that the first micro batch has set."""
        if not ((changes := self.changes) and changes.attributes):
            return None
        now = loss(rows)
        noise = _noise(loss, [(rows, now)], self._split(now))
        changes.put_back_attributes()
        try:
            split = self._split(loss(rows), now)
        except Exception:  # The loss may need the attributes.
            return None
        miss = split.relative(split.whole.value - now.value)
        return other_attributes(miss, listed(changes.names(), 3)) if miss > max(split.tolerance, noise) else None

    def _judge_gradient(self, state: KeptState, cut: Cut, shows: bool) -> Finding | None:
        """Return the finding from the gradients of rows whose losses show no error."""
        first, second = (part.take(range(min(part.size, _FEW_ROWS // 2))) for part in cut[1:3])
        both = first.joined(second) or first
        passes = [(rows, rows.size / both.size) for rows in (both, first, second)]
        whole, *parts = (self._gradient(state, *each) for each in passes)
        size = max(map(np.linalg.norm, (whole, *parts)))
        miss = float(np.linalg.norm(whole - sum(parts)) / size) if size else 0.0
        if not miss > max(self.tolerance, _GRADIENT):
            return None
        again = [self._gradient(state, *each) for each in _AGAIN * passes]
        noise = max(map(np.linalg.norm, np.array(again) - _AGAIN * [whole, *parts])) / size
        return None if miss <= _DRAWS * noise else other_gradient(miss, shows, self.network.weighted)

    def _gradient(self, state: KeptState, rows: Rows, share: float) -> Array:
        """Return random-sign sums of the gradient of rows that are a share of a batch in training."""
        return sums_of(self._run(state, rows, share, of_gradient=True))

    def _loss(self, state: KeptState, rows: Rows) -> Loss:
        value, weight = (float(number.asnumpy()) for number in self._run(state, rows, 1.0))
        return Loss(value, weight if self.network.weighted else rows.size)

    def _run(self, state: KeptState, rows: Rows, share: float, of_gradient: bool = False) -> tuple[Tensor, ...]:
        """Return the loss of rows, a mean or a sum and its weight, or its gradient, op by op or compiled."""
        if self.changes is None or self.changes.tensors:
            # The other tensors may be large, so they are compared only once, at the end.
            state.tensors.put_back(state.tensors.values)
        network, structure = self.network, rows.structure

        def build() -> nn.Cell:
            loss = network.loss_of(structure)
            loss.reports = False
            cell = GradientOfRows(loss, self.parameters) if of_gradient else loss
            cell.phase = "predict"
            return cell

        key = (of_gradient, self.eager, self.evaluated, structure)
        if key not in self.runs and self.eager:
            with op_by_op():  # In GRAPH mode, the gradient function would be compiled.
                self.runs[key] = Eager(build(), of_gradient)
        elif key not in self.runs:
            axes = None if of_gradient else (None, *rows.axes)
            self.runs[key] = Compiled(build, _OWNER, "the network", network.network, open_axes=axes)
        found: tuple[Tensor, ...] = self.runs[key](Tensor(share, ms.float32), *rows.tensors)
        return found


def _noise(loss: Callable[[Rows], Loss], passes: Sequence[tuple[Rows, Loss]], split: Split) -> float:
    """Return how much the losses of the same rows differ between passes, relative to the losses of a split."""
    difference, (whole, _) = 0.0, passes[0]
    for rows, known in passes:
        difference = max(difference, split.relative(loss(rows).value - known.value))
        if difference > split.tolerance:
            draws = [loss(whole).value for _ in range(_REPEATS)]
            return max(_DRAWS * split.relative(float(np.std(draws, ddof=1))), _SEEN * difference)
    return difference
