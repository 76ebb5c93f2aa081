"""Leave out the micro batch whose gradients are not finite, and its weight with it."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import argument_error, check_choice
from ms_gradaccum.backend.tensors import chunks_of
from ms_gradaccum.gradients.buffer import sparse_lookup
from ms_gradaccum.gradients.clipping import squares_of

# What a face takes as `bad_micro_batch`.
BadMicroBatch = Literal["skip_window", "drop"]


def check_bad_micro_batch(owner: str, bad_micro_batch: Any) -> bool:
    """Return whether a micro batch that is not finite is left out; else its window makes no update."""
    remedy = "'skip_window' makes no update in a window with an Inf or a NaN, 'drop' leaves out its micro batch alone."
    return check_choice(owner, "bad_micro_batch", bad_micro_batch, get_args(BadMicroBatch), remedy) == "drop"


def check_can_drop(owner: str, network: Any) -> None:
    """Raise if no micro batch of a GradAccumulation can be left out."""
    if network.is_cached:
        remedy = "Its loss has seen all micro batches before one can be left out."
        raise ValueError(
            argument_error(owner, "bad_micro_batch", "'skip_window' for a GradCacheLoss", "'drop'", remedy)
        )
    # The compiler cannot look at such a gradient twice.
    lookup = sparse_lookup(network)
    if lookup is not None:
        rule, got = "'skip_window' where a gradient is sparse", f"'drop' with a sparse lookup in {lookup}"
        raise ValueError(argument_error(owner, "bad_micro_batch", rule, got, "Use nn.Embedding."))


_keep = ops.MultitypeFuncGraph("keep")


@_keep.register("Tensor", "Tensor")
def _keep_one(finite: Tensor, value: Tensor) -> Tensor:
    # A product with 0 would keep NaN.
    return ops.select(finite, value, ops.zeros_like(value))


class KeepFinite(nn.Cell):
    """Put zeros in place of what a micro batch adds, if any of it is Inf or NaN.

    Args:
        parameters: What the gradients belong to.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.chunks = chunks_of([parameter.size for parameter in parameters])
        self.map = ops.HyperMap()

    def is_finite(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return whether all of ``grads`` are finite. One pass over them.

        As for the norm of a window, a gradient whose square is too large for a float32 is not.
        """
        return ops.isfinite(ops.sum(squares_of(grads, self.chunks)))

    def kept(self, finite: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the values, or zeros."""
        kept: tuple[Tensor, ...] = self.map(ops.partial(_keep, finite), values)
        return kept
