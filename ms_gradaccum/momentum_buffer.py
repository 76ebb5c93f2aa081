"""The sums of a window in the state of the optimizer, without memory of their own."""

from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.grad_buffer import GradBuffer, reciprocal, scale_one
from ms_gradaccum.runs import once, run_of


class MomentumBuffer(GradBuffer):
    """Sums that are added up in the moments of ``nn.Momentum``.

    An update makes ``m = u * m + g / W`` of the moments m, with the momentum u and the window's sum g and weight W. So
    they are multiplied by ``u * W`` before the first micro batch, which needs a weight that is known by then, and
    divided by W at the end. In between they are neither the moments nor the gradient.

    Args:
        optimizer: The optimizer, one that `check_in_optimizer` lets through.
    """

    in_optimizer = True

    def __init__(self, optimizer: nn.Momentum) -> None:
        super().__init__(optimizer.parameters, sums=optimizer.moments)
        self.momentum = optimizer.momentum

    def all_sums(self) -> list[Parameter]:
        """Return nothing: between two windows they are the optimizer's, and no sums."""
        return []

    def open(self, weight: Tensor, opens: Tensor) -> Any:
        """Turn the moments into the start of sums whose weight will be this one, or back if not ``opens``.

        Of several processes each gives the weight of its own rows: what the moments contribute is added up with the
        gradients, and has then the weight of all rows.
        """
        factor, done = self.momentum * weight, ()
        factor = ops.select(opens, factor, reciprocal(factor))
        for begin, end in self.runs:
            factor = once(factor, done)
            done = self.map(ops.partial(scale_one, factor), run_of(self.sums, begin, end))
        return done

    def mean_factor(self) -> Tensor:
        """Return what makes x of the sums, such that ``u * x + x`` are the new moments: the optimizer computes that,
        given one tensor as its moments and as the gradient."""
        return self.reciprocal_weight() / (1.0 + self.momentum)

    def clear_used(self, done: Any) -> Any:
        """Empty all but the sums, which are the optimizer's moments again."""
        return done, self.clear_totals()

    def discard(self) -> None:
        """Empty the buffer: what the moments were is lost."""
        super().discard()
        self.state_is_sums = False
        warn(
            "For 'TrainOneStepCell', the momentum starts anew from zero: with accumulate_in_optimizer it goes with a "
            "window that fails or has an Inf or a NaN. The weights are those of the last update.",
        )
