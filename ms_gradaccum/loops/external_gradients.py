"""Gradients that the caller has taken, added into the sums of a window."""

from mindspore import Tensor, ops
from mindspore.ops.primitive import _primexpr

from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.training.micro_step import AddMicroBatch


def _none_of(empty: Tensor, grad: Tensor) -> Tensor:
    return ops.select(empty, ops.zeros_like(grad), grad)


class AddGrads(AddMicroBatch):
    """Add gradients that the caller has taken into the buffers."""

    def construct(self, factor: Tensor, value: Tensor, weight: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        """Add ``factor`` times the gradients and the loss sum ``value``, or nothing if it is 0. Return as `added`."""
        # A mean over nothing is 0 / 0.
        empty = factor == 0.0
        value = ops.select(empty, ops.zeros_like(value), value)
        if len(grads) > 0:
            grads = map_tensors(ops.partial(_none_of, empty), grads)
        return self.added(value, weight, factor, grads, ())

    def is_finite(self, number: Tensor, grads: tuple[object, ...]) -> Tensor:
        """Return whether the gradients are finite. The loss is NaN where the caller does not say it."""
        finite: Tensor = self.keep.is_finite(grads)
        return finite


@_primexpr
def refuse_graph(owner: str) -> None:
    """Raise for a loop that no graph can hold."""
    raise ValueError(
        f"For '{owner}', a call inside a compiled function must be one of a single network and optimizer without a "
        f"schedule, but got more. Call it from Python."
    )
