"""Gradients that the caller has taken, added into the sums of a window."""

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import _primexpr

from ms_gradaccum.backend.kernels import ONE, as_dtype
from ms_gradaccum.backend.tensors import chunk_of, scalar
from ms_gradaccum.gradients.non_finite import KeepFinite
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.window_end import WindowEnd

_times = ops.MultitypeFuncGraph("times")


@_times.register("Tensor", "Tensor", "Tensor")
def _times_one(empty: Tensor, factor: Tensor, grad: Tensor) -> Tensor:
    grad = grad if grad.dtype == ms.float64 else as_dtype(grad, ms.float32)
    return ops.select(empty, ops.zeros_like(grad), grad * factor)


class AddGrads(nn.Cell):
    """Add gradients that the caller has taken into the buffers."""

    def __init__(self, reducers: Sequence[GradientReducer], drops: bool) -> None:
        super().__init__(auto_prefix=False)
        self.reducers = nn.CellList(reducers, auto_prefix=False)
        self.keep = KeepFinite([parameter for each in reducers for parameter in each.parameters]) if drops else None
        self.map = ops.HyperMap()

    def construct(self, loss_sum: Tensor, weight: Tensor, factor: Tensor, *grads: Tensor) -> Any:
        """Add ``factor`` times the gradients, unless they are left out; nothing if it is 0, whatever they are."""
        # A mean over nothing is 0 / 0.
        empty = factor == 0.0
        done: Any = ()
        if self.keep is not None:
            # Not looking at the loss, which is NaN where the caller does not say it.
            finite = ops.logical_or(empty, self.keep.is_finite(grads))
            grads = self.keep.kept(finite, grads)
            loss_sum, weight = self.keep.kept(finite, (loss_sum, weight))
            for reducer in self.reducers:
                done = reducer.buffer.count_dropped(ops.depend(finite, done))
        begin = 0
        loss_sum = ops.select(empty, ops.zeros_like(loss_sum), loss_sum)
        for reducer in self.reducers:
            end = begin + len(reducer.parameters)
            own = self.map(ops.partial(_times, empty, factor), ops.depend(chunk_of(grads, begin, end), done))
            done = reducer.buffer.first.add(loss_sum, weight, reducer.reduce_scatter_micro_batch(own), ONE)
            begin = end
        return done


class GraphWindow(nn.Cell):
    """The same as part of a larger graph, and the update after so many batches."""

    def __init__(self, add_grads: AddGrads, end: WindowEnd, steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.add_grads = add_grads
        self.end = end
        self.buffer = end.buffer
        self.steps = steps

    def construct(self, grads: Any, weight: Any, loss: Any, reduction: str) -> tuple[Tensor, ...]:
        """Return the items of a StepOutput."""
        weight = scalar(weight)
        factor = weight if reduction == "mean" else ONE
        loss = Tensor(math.nan, ms.float32) if loss is None else scalar(loss)
        added = self.add_grads(loss * factor, weight, factor, *grads)
        batches = ops.depend(self.buffer.count_batch(), added)
        if batches == self.steps:
            output: tuple[Tensor, ...] = self.end(weight)
        else:
            output = self.end.open(batches)
        return output


class NoGraphWindow(nn.Cell):
    """Stands for a GraphWindow where there can be none."""

    def __init__(self, owner: str) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner

    def construct(self, grads: Any, weight: Any, loss: Any, reduction: str) -> Any:
        """Refuse to be compiled."""
        _refuse_graph(self.owner)


@_primexpr
def _refuse_graph(owner: str) -> None:
    raise ValueError(
        f"For '{owner}', a call inside a compiled function must be one of a single network and optimizer without a "
        f"schedule, but got more. Call it from Python."
    )
