"""Leave out the micro batch whose gradients are not finite, and its weight with it."""

from typing import Any, Literal, get_args

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_choice, sentence
from ms_gradaccum.grad_clip import sum_of_squares

# What a face takes as `bad_micro_batch`.
BadMicroBatch = Literal["skip_window", "drop"]


def check_bad_micro_batch(owner: str, bad_micro_batch: Any) -> bool:
    """Return whether a micro batch that is not finite is left out; else its window makes no update."""
    remedy = "'skip_window' makes no update in a window with an Inf or a NaN, 'drop' leaves out its micro batch alone."
    return check_choice(owner, "bad_micro_batch", bad_micro_batch, get_args(BadMicroBatch), remedy) == "drop"


def check_dense(owner: str, lookup: str | None) -> None:
    """Raise if the network has a sparse lookup, here its name: the compiler cannot look at such a gradient twice."""
    if lookup is not None:
        rule, got = "'skip_window' where a gradient is sparse", f"'drop' with a sparse lookup in {lookup}"
        raise ValueError(sentence(owner, "bad_micro_batch", rule, got, "Use nn.Embedding."))


class KeepFinite(nn.Cell):
    """Put zeros in place of what a micro batch adds, if any of it is Inf or NaN."""

    def is_finite(self, numbers: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Tensor:
        """Return whether all of ``grads`` and ``numbers`` are finite. One pass over the gradients.

        As for the norm of a window, a gradient whose square is too large for a float32 is not.
        """
        total = Tensor(0.0, ms.float32)
        for number in numbers:
            total = total + number
        for grad in grads:
            total = total + sum_of_squares(grad)
        return ops.isfinite(total)

    def kept(self, finite: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the values, or zeros; a product with 0 would keep NaN."""
        kept: tuple[Tensor, ...] = ()
        for value in values:
            kept += (ops.select(finite, value, ops.zeros_like(value)),)
        return kept
