"""The whole batch in one piece with MindSpore's own step, and its difference from micro batches with ours."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.arithmetic import ONE, set_in_place
from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.compiled import Compiled, clear_autograd_records, op_by_op, runs_eagerly
from ms_gradaccum.backend.tensors import map_tensors
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import reciprocal, zeros

# The smallest scale of a gradient, as a share of the whole: a bias before a normalisation has only rounding.
_SMALLEST_SHARE = 0.01


class Run(NamedTuple):
    """The results of a training of some updates, with micro batches or with whole batches."""

    losses: list[float]
    changes: list[Array]  # Of each trainable parameter: its gradient, or how far it has moved.
    # The values of the parameters that forward passes have changed, by their indices.
    state: dict[int, Array] = {}
    norms: list[float] = []  # Of the gradient, before clipping.

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.losses).all()) and all(
            np.isfinite(change).all() for change in self.changes
        )


def relative_differences(a: Run, b: Run) -> dict[str, float]:
    """Return the largest relative difference of the parameters, the losses and the norms of two runs."""
    return {
        "parameters": max(parameter_differences(a, b)),
        "losses": _of_numbers(a.losses, b.losses),
        "norms": _of_numbers(a.norms, b.norms),
    }


def largest_difference(a: Run, b: Run) -> float:
    return max(relative_differences(a, b).values())


def parameter_differences(a: Run, b: Run) -> list[float]:
    """Return the relative difference of the changes of each parameter."""
    floor = _SMALLEST_SHARE * max(total_norm(a.changes), total_norm(b.changes))
    return [difference(x, y, floor) for x, y in zip(a.changes, b.changes)]


def _of_numbers(a: Sequence[float], b: Sequence[float]) -> float:
    return max(map(difference, np.array(a), np.array(b)), default=0.0)


def difference(a: Array, b: Array, floor: float = 0.0) -> float:
    """Return the norm of the difference, relative to the larger norm of the two, which is at least ``floor``."""
    with np.errstate(invalid="ignore"):
        # The difference of two Infs is a NaN, which counts as different.
        return relative(norm_of(a - b), max(floor, norm_of(a), norm_of(b)))


def relative(value: float, scale: float) -> float:
    """Return ``value / scale``, 0 for 0 / 0, and Inf for a NaN, which no limit allows."""
    if value == 0:
        return 0.0
    quotient = value / scale if scale else math.inf
    return math.inf if math.isnan(quotient) else quotient


def norm_of(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def total_norm(arrays: Iterable[Array]) -> float:
    """Return the L2 norm of some arrays as one vector."""
    return math.hypot(*map(norm_of, arrays))


class WholeBatch:
    """MindSpore's own step on whole batches, op by op or compiled. Without an optimizer it only takes the gradient.

    Errors of the compiler name ``owner`` and lines of the user's ``code``.
    """

    def __init__(
        self,
        owner: str,
        loss_cell: nn.Cell,
        parameters: Sequence[Parameter],
        optimizer: nn.Cell | None = None,
        max_norm: float | None = None,
        code: nn.Cell | None = None,
        compiles: bool = False,
    ) -> None:
        self.optimizer = _KeepsGradient(parameters, optimizer, max_norm)
        cell = nn.TrainOneStepCell(loss_cell, self.optimizer)
        cell.grad_reducer = nn.Identity()  # The batch is that of this process, also in a job.
        self.step: Callable[..., Tensor]
        if runs_eagerly(compiles):
            self.step = op_by_op()(cell.__call__)
        else:
            self.step = Compiled(lambda: cell, owner, "the network", code, needs_fixed=True)

    def train(self, *tensors: object) -> tuple[float, list[Array]]:
        """Train on a batch. Return its mean loss and its gradient before clipping."""
        if not isinstance(self.step, Compiled):
            # MindSpore may divide a gradient by the rows of earlier passes.
            clear_autograd_records()
        loss = self.step(*tensors)
        return float(loss), [grad.asnumpy().copy() for grad in self.optimizer.kept]


class MeanLoss(nn.Cell):
    """The mean loss of some rows, from their sum and weight."""

    def __init__(self, weighted_loss: WeightedLoss) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, *tensors: object) -> Tensor:
        sums = self.weighted_loss(ONE, *tensors)
        return sums[0] * reciprocal(sums[1])


class _KeepsGradient(nn.Cell):
    """An optimizer, or none, behind MindSpore's own function for a clip. It keeps the gradient."""

    def __init__(
        self, parameters: Sequence[Parameter], optimizer: nn.Cell | None, max_norm: float | None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        # MindSpore's step could return the gradient, too, but a graph would loop over it, and fail for 1000 parameters.
        self.kept = ParameterTuple(
            zeros(f"whole.{i}", each.shape) for i, each in enumerate(parameters)
        )
        self.optimizer = optimizer
        self.max_norm = max_norm

    def construct(self, grads: tuple[Any, ...]) -> Any:
        done = map_tensors(_assign_dense, self.kept, grads)
        if self.optimizer is None:
            return done
        if self.max_norm is not None:
            grads = ops.clip_by_global_norm(grads, self.max_norm)
        return done, self.optimizer(grads)


_assign_dense = ops.MultitypeFuncGraph("assign_dense_gradient")
_assign_dense.register("Tensor", "Tensor")(set_in_place)


@_assign_dense.register("Tensor", "RowTensor")
def _scatter(kept: Parameter, grad: Any) -> Tensor:
    # The gradient of a sparse lookup contains the rows that were read. A row can occur more than once.
    rows = ops.cast(grad.values, ms.float32)
    return ops.assign(kept, ops.unsorted_segment_sum(rows, grad.indices, grad.dense_shape[0]))
