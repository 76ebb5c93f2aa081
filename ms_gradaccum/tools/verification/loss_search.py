"""What kind of mean the loss of a batch is of the losses of its micro batches."""

from collections.abc import Sequence

from ms_gradaccum.tools.verification.comparison import Run, combine, mean, misfit, norm, share_of
from ms_gradaccum.tools.verification.experiment import Experiment

# A smaller share of a pair is none.
_NONE = 1e-6
_SHOWN = 8

_SUM = (
    "A sum where a mean is expected: the loss grows with its rows, and the sum over the micro batches gives the whole "
    "batch. Use reduction='mean', or return (loss_sum, weight) with weighted=True."
)
_CONSTANT_WEIGHT = (
    "A weight that does not count what the sum is over: the same rows twice have twice the loss per weight. With "
    "weighted=True return the number of rows or tokens that are in the loss sum."
)
_MEAN_AS_SUM = (
    "A division by the weight done twice: with weighted=True the network returns a mean where its sum is expected. "
    "Return (loss_sum, weight)."
)
_OTHER_WEIGHTS = (
    "A mean over something else than {counted}, such as tokens: in the whole batch the micro batches count as "
    "{found}, in the window as {expected}. {remedy}"
)
_RETURN = "Return (loss_sum, weight) with weighted=True, as TokenMeanLoss does."
_COUNT = "Return the number that the loss sum is over as its weight."
_ROWS = (
    "Rows that depend on each other, as with in-batch negatives or statistics of the batch, or a function (a root, a "
    "logarithm) of a mean: {evidence}. No sum over micro batches gives the whole batch: train it as a GradCacheLoss, "
    "which sees all rows, do not split a batch of it, or train on the loss within each micro batch."
)
_ORDER = (
    "Rounding, or a loss that depends on the order of its rows: the same batch with its rows reversed differs by "
    "{noise:.1e} of the gradient. Compute in float32, or give rtol."
)
# Causes that are a factor between the whole batch and what it should be.
WRONG_REDUCTIONS = (_SUM, _CONSTANT_WEIGHT, _MEAN_AS_SUM)


class LossSearch:
    """What kind of mean, if any, the loss of a batch is of the losses of its micro batches.

    Each kind predicts the loss and the whole gradient of some batch from those of others, with fewer unknowns than
    there are numbers to predict (the loss is one), so that it does not fit by chance, however few parameters there are.
    """

    def __init__(self, experiment: Experiment, whole: Run, rtol: float) -> None:
        self.experiment, self.whole, self.rtol = experiment, whole, rtol
        self.given = whole
        self.runs = [experiment.micro_batch(i) for i in range(len(experiment.micro_batches))]
        norms = [norm(run) for run in self.runs]
        # One that counts: a micro batch whose rows are all padding has no gradient.
        self.anchor = norms.index(max(norms))
        # Whether the losses are means that were divided by their weight once more.
        self.divided = False

    def expected(self) -> Run:
        """Return the mean of the micro batches by their weights, which the window should be."""
        return mean([run.weight for run in self.runs], self.runs)

    def cause(self, window: Run) -> str:
        """Return why the whole batch is not the mean of its micro batches."""
        weighted = self.experiment.network.weighted
        places = self.experiment.rows_of(self.anchor)
        once, twice = self.runs[self.anchor], self.experiment.rows([*places, *places])
        if not self._same(twice, once):
            if self._is_sum(once, twice):
                return _CONSTANT_WEIGHT if weighted else _SUM
            if not weighted or not self._same(twice, combine([0.5], [once])):
                evidence = "the same rows twice in one batch have another loss or gradient than once"
                return self._rounding(window) or _ROWS.format(evidence=evidence)
            self.divided = True
            self.runs, self.whole = [self._undivided(run) for run in self.runs], self._undivided(self.whole)
            if self._same(self.expected(), self.whole, *self.runs):
                return _MEAN_AS_SUM
        found, evidence = self._weights()
        if evidence:
            return self._rounding(window) or _ROWS.format(evidence=evidence)
        expected = [run.weight for run in self.runs]
        counted, remedy = ("the returned weight", _COUNT) if weighted else ("rows", _RETURN)
        cause = _OTHER_WEIGHTS.format(counted=counted, found=_shares(found), expected=_shares(expected), remedy=remedy)
        return f"{_MEAN_AS_SUM} {cause}" if self.divided else cause

    def _same(self, a: Run, b: Run, *others: Run) -> bool:
        return misfit(a, b, *others) <= self.rtol

    def _undivided(self, run: Run) -> Run:
        return combine([run.weight], [run])._replace(weight=run.weight) if self.divided else run

    def _is_sum(self, once: Run, twice: Run) -> bool:
        """Whether the whole batch is the sum of the micro batches, but for what is there once, such as a penalty."""
        penalty = combine([2.0, -1.0], [once, twice])
        total = combine([1.0] * len(self.runs) + [1.0 - len(self.runs)], [*self.runs, penalty])
        return self._same(total, self.whole, *self.runs)

    def _weights(self) -> tuple[list[float], str]:
        """Return what each micro batch counts for in one batch with the anchor, and what speaks against it."""
        first = self.runs[self.anchor]
        weights: list[float] = []
        for i, run in enumerate(self.runs):
            if i == self.anchor:
                weights.append(1.0)
                continue
            places = self.experiment.rows_of(self.anchor) + self.experiment.rows_of(i)
            pair = self._undivided(self.experiment.rows(places))
            share = share_of(pair, first, run)
            if share is None:
                share = run.weight / (first.weight + run.weight)
            miss = misfit(pair, combine([1 - share, share], [first, run]), first, run)
            if miss > self.rtol:
                return [], f"no weighted mean of two micro batches is what they are in one piece (misses by {miss:.1e})"
            if share > 1 - _NONE and self._is_empty(self.anchor):
                self.anchor = i  # What it has a gradient of is there without rows, such as a penalty.
                return self._weights()
            if share > 1 - _NONE or (share < _NONE and not self._is_empty(i)):
                return [], "of two micro batches in one piece one does not count, as with the largest of all rows"
            weights.append(share / (1 - share))
        miss = misfit(self.whole, mean(weights, self.runs), *self.runs)
        if miss > self.rtol:
            return [], f"what micro batches count for in pairs does not give the whole batch (misses by {miss:.1e})"
        return weights, ""

    def _is_empty(self, micro_batch: int) -> bool:
        """Whether the rows of a micro batch do not matter even if they are alone, as those without tokens do not."""
        places = self.experiment.rows_of(micro_batch)
        parts = [self._undivided(self.experiment.rows(part)) for part in (places[:1], places[1:]) if part]
        return all(self._same(part, self.runs[micro_batch]) for part in parts)

    def _rounding(self, window: Run) -> str:
        """Return the cause if the order of the rows alone makes much of the difference, or nothing."""
        rows = sum(len(self.experiment.rows_of(i)) for i in range(len(self.runs)))
        noise = misfit(self.experiment.rows(range(rows)[::-1]), self.given)
        if noise > self.rtol and noise > misfit(window, self.given) / 10:
            return _ORDER.format(noise=noise)
        return ""


def _shares(weights: Sequence[float]) -> str:
    total = sum(weights)
    more = ", ..." if len(weights) > _SHOWN else ""
    return ", ".join(f"{round(weight / total, 4):g}" for weight in weights[:_SHOWN]) + more
