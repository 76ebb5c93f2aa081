"""Gradients that are not finite: leave out their micro batch, or say why they make no update."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_gradaccum._checks import check_choice, require
from ms_gradaccum.backend.tensors import chunks_of, map_tensors
from ms_gradaccum.gradients.buffer import GradientBuffer, sparse_lookup
from ms_gradaccum.gradients.clipping import squares_of

BadMicroBatch = Literal["skip_window", "drop"]  # The type of the argument `bad_micro_batch`.


def check_bad_micro_batch(owner: str, bad_micro_batch: object) -> bool:
    """Return whether a micro batch that is not finite is left out. Otherwise its window makes no update."""
    remedy = "'skip_window' makes no update in a window with an Inf or a NaN, 'drop' leaves out its micro batch alone."
    return check_choice(owner, "bad_micro_batch", bad_micro_batch, get_args(BadMicroBatch), remedy) == "drop"


def check_can_drop(owner: str, network: nn.Cell) -> None:
    """Raise if micro batches of a GradAccumulation cannot be left out."""
    remedy = "Its loss has seen all micro batches before one can be left out."
    require(not network.is_cached, owner, "bad_micro_batch", "'skip_window' for a GradCacheLoss", "'drop'", remedy)
    # The compiler cannot use a sparse gradient twice.
    lookup = sparse_lookup(network)
    rule, got = "'skip_window' where a gradient is sparse", f"'drop' with a sparse lookup in {lookup}"
    require(lookup is None, owner, "bad_micro_batch", rule, got, "Use nn.Embedding.")


def _keep(finite: Tensor, value: Tensor) -> Tensor:
    return ops.select(finite, value, ops.zeros_like(value))  # A product with 0 would keep NaN and Inf.


class KeepFinite(nn.Cell):
    """Replace the gradients and sums of a micro batch by zeros if a gradient is Inf or NaN."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.chunks = chunks_of([parameter.size for parameter in parameters])

    def is_finite(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return whether the squares of all ``grads`` are finite in float32, as those of a window must be."""
        return ops.isfinite(ops.sum(squares_of(grads, self.chunks)))

    def kept(self, finite: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the values if ``finite``, else zeros."""
        return map_tensors(ops.partial(_keep, finite), values)


def why_not_finite(buffers: Sequence[GradientBuffer], weight: float, scale: float) -> str:
    """Return the cause of a non-finite norm of the sums, ``weight`` times ``scale`` times the gradient."""
    if weight == 0.0:
        return "an Inf or a NaN in each micro batch"
    if not math.isfinite(weight):
        return f"the weight {weight}"
    largest, largest_name = 0.0, ""
    for name, total in ((name, total) for buffer in buffers for name, total in zip(buffer.names, buffer.sums)):
        size = float(np.abs(total.asnumpy()).max(initial=0.0))
        if not math.isfinite(size):
            return f"an Inf or a NaN for the parameter {name!r}"
        largest, largest_name = max((largest, largest_name), (size, name))
    if largest < 1e12:
        return "an Inf or a NaN in another rank's shard"
    size = largest / weight / scale
    return f"up to {size:.3g} for the parameter {largest_name!r}, whose squares are Inf in float32"
