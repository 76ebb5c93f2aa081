"""The measurement of a loss: the first batches tell whether it can be trained in micro batches."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.ops.primitive import _primexpr

from ms_gradaccum._checks import first_line, listed, warn
from ms_gradaccum.backend.compiled import Compiled, Eager, op_by_op, runs_eagerly
from ms_gradaccum.backend.kept_state import Array, Changes, KeptState, kept
from ms_gradaccum.batch.loss_parts import Cut, Finding, Loss, Rows, Split, judge, other_attributes, other_gradient
from ms_gradaccum.training.rows_gradient import GradientOfRows, can_differentiate, sums_of
from ms_gradaccum.training.settings import StepSettings

# A right loss misses by what rounding makes of a sum in another order: some hundred steps of float32, which has
# reductions over many elements, and some of a 16-bit format, in which no long sum is exact.
TOLERANCES = {ms.float32: 2.0**-14, ms.float16: 2.0**-6, ms.bfloat16: 2.0**-4}
# A smaller miss in float32 may be a small difference of large numbers: it must be larger than what another order makes.
_SURE, _ORDERS = 1e-2, 10
# A loss that draws random numbers must miss by so many standard deviations of so many draws, which may be too large.
_DRAWS, _REPEATS, _TOO_RANDOM = 10, 8, 0.5
# A loss that seems to draw none is run again so often, and what is seen seldom may be so many times as large.
_AGAIN, _SEEN = 3, 3
# A gradient has cancelled more than its loss. At most so many rows are differentiated: op by op they may take more
# memory than in a graph.
_GRADIENT, _FEW_ROWS = 1e-3, 4
# Tensors of so many elements are copied without need, in case that only a pass out of training changes them.
_SMALL = 2**16
# The last batch that is measured.
_LAST = 64
_OWNER = "GradAccumulation"
# Classes of cells that are not in training meanwhile: those of chance and of statistics of the batch, or all.
_AS_IN_TRAINING, _IN_EVALUATION = ("Drop", "BatchNorm"), ("",)
_MOVES = (
    "For 'GradAccumulation', the forward pass should leave what no optimizer updates as it is, but it changes {names}: "
    "each micro batch does so, and the next one sees it. Change it at the end of an update, as in a callback's "
    "on_update_end()."
)


class LossCheck:
    """Measure the loss of a network at batches 1, 2, 4, 8 ... 64, and warn if it cannot be trained in parts.

    The losses of some rows and of their halves are compared; the network is left as it was, to the bit. If ``several``
    processes measure at the same time, all run it equally often, since it may communicate.
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
        # True once the same rows have had another loss, or rows were in groups: the gradients of few rows tell nothing.
        self.is_rough = False
        # The only row of the batch before.
        self.row: Rows | None = None
        # What the first micro batch changes; None if no micro batch has run.
        self.changes: Changes | None = None
        self.runs: dict[Hashable, Eager | Compiled] = {}
        # Where the measurement is: which cells are in evaluation mode, and whether it runs op by op.
        self.evaluated: tuple[str, ...] = _AS_IN_TRAINING
        self.eager = True

    @property
    def adds_parts(self) -> bool:
        """True if a window has more than one micro batch, of all processes."""
        return bool(self.network.micro_size > 1 or self.settings.accumulation_steps > 1 or self.several)

    def before_batch(self) -> None:
        if self.batches == 0 and not self.is_done and self.adds_parts:
            self.changes = Changes(self.network.network)

    def after_micro_batch(self) -> None:
        """Warn if the first micro batch has changed what no optimizer updates, statistics of BatchNorms apart."""
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
        """Return whether a tensor can be put back: a copy of all that a forward pass leaves alone would be large."""
        changed = [tensor] if self.changes is None else self.changes.tensors or ()
        return tensor.size <= _SMALL or any(tensor is each for each in changed)

    def after_batch(self, parts: int, inputs: tuple[object, ...]) -> None:
        """Count a batch of which so many micro batches have run, and measure if it is time."""
        if self.is_done or not self.adds_parts:
            return
        self.batches += 1
        if self.batches & (self.batches - 1) != 0 and self.row is None:
            return
        rows: Rows | None = Rows.of(inputs, self.network.batch_axis)
        least = rows.size // parts if rows else 0
        if rows and rows.size == 1:
            # It is measured with that of the batch before.
            before, self.row = self.row, rows if self.row is None else None
            rows = None if before is None else before.joined(rows)
        finding = None if rows is None else self.measure(rows, parts, least)
        if finding is not None and not self.has_warned:
            self.has_warned = True
            warn(self.network.headed(finding.text))
        self.is_done = self.batches >= _LAST or (self.has_warned and not self.several)

    def measure(self, rows: Rows, parts: int, least: int) -> Finding | None:
        """Return why the loss cannot be trained in so many parts of at least so many rows, as far as these show it."""
        most, number = max(-(-rows.size // parts), 2), (self.batches - 1).bit_length()
        # Halves of unlike rows tell why a loss misses. What rows of one class do together shows in mixed halves.
        unlike, mixed, three = rows.cuts(most, number)
        cuts = [mixed, unlike] if self.network.weighted else [unlike, mixed]
        # Three parts that add up take fewer passes than the halves of two cuts, which tell why others do not.
        cuts[:0] = [three] if three is not None and not self.several else []
        gradient = number == 1 and not self.half
        finding = self.measure_cuts(cuts, parts, gradient)
        if finding and math.isfinite(finding.miss) and least > 1 and most < 4 and not self.several:
            # Single rows are no micro batches here, and one element has twice its BinaryCrossEntropy on CPU.
            cuts = [tuple(each.take([*range(each.size)] * 2) for each in cut) for cut in cuts]
            finding = self.measure_cuts(cuts, parts, gradient)
        # Rows of a group (a preference pair, the answers to a prompt) meet, but no other ones if each group is whole.
        cut = rows.micro_batches(parts) if finding and finding.of_loss and not self.several else ()
        in_groups = bool(cut) and self._fits(cut, parts)
        self.is_rough |= in_groups
        return None if in_groups else finding

    def _fits(self, cut: Cut, parts: int) -> bool:
        """Return whether the losses of the first micro batch with each other one, which differs, are their means."""
        self.eager, self.evaluated = True, _AS_IN_TRAINING
        try:
            with kept(self.network.network, self._is_copied) as state, np.errstate(all="ignore"):
                state.evaluate(self.evaluated)
                pairs = ((cut[0].joined(each) or each, cut[0], each) for each in cut[1:])
                splits = [self._split(*(self._loss(state, rows) for rows in pair)) for pair in pairs]
        except Exception:
            return False
        return all(split.shows() and judge(split, parts) is None for split in splits)

    def measure_cuts(self, cuts: Sequence[Cut], parts: int, gradient: bool = False) -> Finding | None:
        """Return why the loss cannot be trained in so many parts, as the first of these cuts that shows it."""
        # What is right op by op is right in a graph. Several processes measure once: an error would leave others alone.
        finding: Finding | None = None
        for eager in [True] if runs_eagerly(self.settings.compiles) else [False] if self.several else [True, False]:
            self.eager = eager
            finding = self._measure_in(_AS_IN_TRAINING, cuts, parts, gradient)
            if finding is not None and math.isnan(finding.miss):
                # What draws random numbers in training by a function need not do so out of it.
                finding = self._measure_in(_IN_EVALUATION, cuts, parts, gradient)
            if finding is None:
                break
        return finding

    def _measure_in(self, words: tuple[str, ...], cuts: Sequence[Cut], parts: int, gradient: bool) -> Finding | None:
        self.evaluated = words
        try:
            # A loss or a gradient may be infinite, or beyond 16 bits.
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
                # Halves may fit by chance. If so, the parts of one of them do not.
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
        # Where random numbers are drawn out of training, too, the noise of a gradient is not known.
        is_exact = self.evaluated is _AS_IN_TRAINING and not (self.is_rough or self.several)
        if finding is None and doubtful and is_exact and can_differentiate(self.network, self.parameters):
            findings = (self._judge_gradient(state, cut, shows) for cut, shows in doubtful)
            finding = next(filter(None, findings), None)
        return finding or (None if self.several else self._judge_attributes(loss, part))

    def _split(self, whole: Loss, *parts: Loss) -> Split:
        """Return losses with the tolerance for them. Losses that all fit into 16 bits were computed in these."""
        values = np.array([loss.value for loss in (whole, *parts)], np.float32)
        tolerance = 0.0 if (values.view(np.uint32) & 0xFFFF).any() else TOLERANCES[ms.bfloat16]
        if (values.astype(np.float16) == values).all():
            tolerance = TOLERANCES[ms.float16]
        return Split(whole, parts, self.network.weighted, max(self.tolerance, tolerance))

    def _judge(self, state: KeptState, cut: Cut, split: Split, parts: int) -> Finding | None:
        finding, loss = judge(split, parts), partial(self._loss, state)
        # What is drawn seldom is often the same, and made only one of these passes miss.
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
            # Rounding, if the same rows in another order differ by nearly as much.
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
        """Return whether rows in place of others change the loss by their share, if each pass draws the same numbers.

        The first rows of a pass draw what the first rows of any other one do.
        """
        (first, second), totals = (part.take(range(min(cut[1].size, cut[2].size))) for part in cut[1:3]), []
        for rows in (first.joined(second) or first, second.joined(second) or first, first, second):
            state.draw_again()
            value, weight = self._loss(state, rows)
            totals.append(np.array((value if self.network.weighted else value * weight, weight)))
        change, scale = totals[2] - totals[3], tolerance * np.abs(totals).max(0)
        return bool(abs(change[0]) > _ORDERS * scale[0] and (np.abs(totals[0] - totals[1] - change) <= scale).all())

    def _judge_attributes(self, loss: Callable[[Rows], Loss], rows: Rows) -> Finding | None:
        """Return the finding for a loss that depends on attributes which the first micro batch has set."""
        if not ((changes := self.changes) and changes.attributes):
            return None
        now = loss(rows)
        noise = _noise(loss, [(rows, now)], self._split(now))
        changes.put_back_attributes()
        try:
            split = self._split(loss(rows), now)
        except Exception:  # Without them it need not run.
            return None
        miss = split.relative(split.whole.value - now.value)
        return other_attributes(miss, listed(changes.names(), 3)) if miss > max(split.tolerance, noise) else None

    def _judge_gradient(self, state: KeptState, cut: Cut, shows: bool) -> Finding | None:
        """Return the finding for rows whose losses show nothing, of which their gradients can tell more."""
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
        """Return sums over the gradient that rows with a share of a batch have in training."""
        return sums_of(self._run(state, rows, share, of_gradient=True))

    def _loss(self, state: KeptState, rows: Rows) -> Loss:
        value, weight = (float(number.asnumpy()) for number in self._run(state, rows, 1.0))
        return Loss(value, weight if self.network.weighted else rows.size)

    def _run(self, state: KeptState, rows: Rows, share: float, of_gradient: bool = False) -> tuple[Tensor, ...]:
        """Return the loss of rows, a mean or a sum and its weight, or its gradient, op by op or compiled."""
        if self.changes is None or self.changes.tensors:
            # The others, which may be large, are looked at once, at the end.
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
            with op_by_op():  # A gradient function that is built in GRAPH mode is compiled.
                self.runs[key] = Eager(build(), of_gradient)
        elif key not in self.runs:
            axes = None if of_gradient else (None, *rows.axes)
            self.runs[key] = Compiled(build, _OWNER, "the network", network.network, open_axes=axes)
        found: tuple[Tensor, ...] = self.runs[key](Tensor(share, ms.float32), *rows.tensors)
        return found


def _noise(loss: Callable[[Rows], Loss], passes: Sequence[tuple[Rows, Loss]], split: Split) -> float:
    """Return by how much the losses of rows differ in further passes, relative to those of a split."""
    difference, (whole, _) = 0.0, passes[0]
    for rows, known in passes:
        difference = max(difference, split.relative(loss(rows).value - known.value))
        if difference > split.tolerance:
            draws = [loss(whole).value for _ in range(_REPEATS)]
            return max(_DRAWS * split.relative(float(np.std(draws, ddof=1))), _SEEN * difference)
    return difference


@_primexpr
def warn_of_larger_graph() -> None:
    """Warn, while a larger graph is compiled, that it trains a loss that is not measured."""
    warn(Finding.not_measured("the step is part of a larger graph").text)
