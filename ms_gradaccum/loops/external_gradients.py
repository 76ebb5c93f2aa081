"""Gradients that the caller has taken, added into the sums of a window."""

import math

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import _primexpr

from ms_gradaccum.backend.kernels import ONE, Tensors
from ms_gradaccum.backend.tensors import scalar
from ms_gradaccum.training.micro_step import AddMicroBatch
from ms_gradaccum.training.window_end import WindowEnd


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
            grads = self.map(ops.partial(_none_of, empty), grads)
        return self.added(value, weight, factor, grads, ())

    def is_finite(self, number: Tensor, grads: tuple[object, ...]) -> Tensor:
        """Return whether the gradients are finite. The loss is NaN where the caller does not say it."""
        finite: Tensor = self.keep.is_finite(grads)
        return finite


class GraphWindow(nn.Cell):
    """Add gradients as part of a larger graph, and update after so many batches."""

    def __init__(self, add_grads: AddGrads, end: WindowEnd, steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.add_grads, self.end, self.steps = add_grads, end, steps

    def construct(
        self, grads: Tensors, weight: Tensor | float, loss: Tensor | float | None, reduction: str
    ) -> tuple[Tensor | None, ...]:
        """Return the items of a StepOutput."""
        weight = scalar(weight)
        factor = weight if reduction == "mean" else ONE
        value = Tensor(math.nan, ms.float32) if loss is None else scalar(loss)
        added = self.add_grads(factor, value * factor, weight, *grads)
        output: tuple[Tensor, ...] = self.end.after_batch(added, self.steps)
        return (None, *output[1:]) if loss is None else output


@_primexpr
def refuse_graph(owner: str) -> None:
    """Raise for a loop that no graph can hold."""
    raise ValueError(
        f"For '{owner}', a call inside a compiled function must be one of a single network and optimizer without a "
        f"schedule, but got more. Call it from Python."
    )
