"""Sums of gradients and losses in float32, or float64 for float64 weights, and the weight that belongs to them."""

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.operations import SparseGatherV2
from mindspore.ops.primitive import _primexpr

from ms_gradaccum.backend.kernels import (
    add_each_in_place,
    add_in_place,
    as_dtype,
    fill_each_in_place,
    spread,
)
from ms_gradaccum.backend.tensors import chunk_of, chunks_of


class WindowTotals(NamedTuple):
    """What a window adds up beside the gradients, the loss and the weight.

    Attributes:
        counts_dropped: Whether micro batches can be left out, and are counted.
        other_losses: How many losses that the network returns beside the first one can be reported.
    """

    counts_dropped: bool = False
    other_losses: int = 0

    @property
    def scalars(self) -> int:
        """Numbers that are added over the ranks beside the gradients: the loss, the weight, and these."""
        return 2 + self.counts_dropped + 2 * self.other_losses


_NOTHING_ELSE = WindowTotals()


class GradientBuffer(nn.Cell):
    """The sums of one window: of its gradients, its losses and its weights. They live and are cleared together.

    The names begin with ``accu_grads``, the prefix that MindSpore's checkpoint merges and transforms, its
    fault tolerance and its compiler know.

    Args:
        parameters: What the gradients belong to.
        dense_only: Whether gradients of sparse lookups are refused.
        shapes: What is kept of each parameter's gradient: a part, if the ranks share the sums. Default: the whole.
        totals: What is added up beside the gradients, the loss and the weight.
    """

    def __init__(
        self,
        parameters: ParameterTuple,
        dense_only: bool = False,
        shapes: Any = None,
        totals: WindowTotals = _NOTHING_ELSE,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.names = tuple(parameter.name for parameter in parameters)
        if shapes is None:
            shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        # 16-bit sums would lose the small addends of a long window.
        dtypes = [ms.float64 if parameter.dtype == ms.float64 else ms.float32 for parameter in parameters]
        names = [f"accu_grads.{name}" for name in self.names]
        self.sums = ParameterTuple(zeros(name, shape, dtype) for name, shape, dtype in zip(names, shapes, dtypes))
        dtype = ms.float64 if ms.float64 in dtypes else ms.float32
        # Named after a parameter: the buffers of two optimizers can be in one graph.
        window = f"{names[0]}.window"
        self.loss = zeros(f"{window}_loss", (), dtype)
        self.weight = zeros(f"{window}_weight", (), dtype)
        # Calls that the open window has taken in. 0 from an update to the next batch.
        self.batches = zeros(f"{window}_batches", (), ms.int32)
        # Micro batches that were left out, in the dtype of what else is added over the ranks.
        self.dropped: Any = zeros(f"{window}_dropped", (), dtype) if totals.counts_dropped else None
        # Of each loss that is reported the sum, and below it the weight.
        shape = 2, totals.other_losses
        self.other_losses: Any = zeros(f"{window}_other_losses", shape, dtype) if totals.other_losses else None
        self.chunks = chunks_of([total.size for total in self.sums])
        self.add_one = _add_dense_only if dense_only else _add
        self.map = ops.HyperMap()

    def all_totals(self) -> list[Parameter]:
        """Return everything of an open window that adds up over ranks, on each its own: what a state has of it."""
        return [*self.sums, *self.totals()]

    def totals(self) -> list[Parameter]:
        """Return the numbers that are added over the ranks beside the sums."""
        return [self.loss, self.weight, *(each for each in (self.dropped, self.other_losses) if each is not None)]

    def add(self, loss_sum: Tensor, weight: Tensor, grads: tuple[Tensor, ...], factor: Tensor) -> Any:
        """Add one micro batch, its gradients times ``factor``. Return the sums, the loss and the weight with it."""
        # The last gradient comes first out of a backward pass, and is let go once it is added.
        added = add_each_in_place(self.add_one, factor, tuple(self.sums), grads)
        return added, _add_number(self.loss, loss_sum), _add_number(self.weight, weight)

    def no_grads(self, parameters: tuple[Parameter, ...], done: Any) -> tuple[Tensor, ...]:
        """Return the gradients of no rows, after ``done``."""
        grads: tuple[Tensor, ...] = self.map(ops.partial(_spread, zero_after(done, self.weight)), parameters)
        return grads

    def count_batch(self) -> Tensor:
        """Count one batch and return how many the window has now."""
        return ops.assign_add(self.batches, Tensor(1, ms.int32))

    def count_dropped(self, finite: Tensor) -> Any:
        """Count one micro batch that is left out unless it is ``finite``."""
        return _add_number(self.dropped, ops.cast(ops.logical_not(finite), ms.float32))

    def add_other_losses(self, losses: Tensor, weight: Tensor) -> Any:
        """Add the losses of one micro batch, which has this weight; none that is a mean over nothing, 0 / 0."""
        return _add_number(self.other_losses, ops.select(weight > 0.0, losses * weight, ops.zeros_like(losses)))

    def other_losses_after(self, done: Any) -> tuple[Tensor, ...]:
        """Return the sums and weights of the losses that are reported, after ``done``; nothing if there are none."""
        return () if self.other_losses is None else (ops.depend(self.other_losses + 0.0, done),)

    def mean_loss(self) -> Tensor:
        """Return the weighted mean loss of the window so far."""
        return self.loss * reciprocal(self.weight)

    def reciprocal_weight(self) -> Tensor:
        """Return 1 / weight, or 0 for a window in which nothing was weighed."""
        return reciprocal(self.weight)

    def clear(self, done: Any = ()) -> Any:
        """Assign zeros after ``done``; a product with 0 would keep NaN and Inf for ever."""
        for begin, end in self.chunks:
            done = fill_each_in_place(zero_after(done, self.weight), chunk_of(tuple(self.sums), begin, end))
        done = done, _assign_zero(self.loss), _assign_zero(self.weight)
        if self.dropped is not None:
            done = done, _assign_zero(self.dropped)
        if self.other_losses is not None:
            done = done, _assign_zero(self.other_losses)
        return done, _assign_zero(self.batches)


_add = ops.MultitypeFuncGraph("add_gradient")
_add_dense_only = ops.MultitypeFuncGraph("add_dense_gradient")


@_add.register("Tensor", "Tensor", "Tensor")
@_add_dense_only.register("Tensor", "Tensor", "Tensor")
def _add_dense(factor: Tensor, total: Parameter, grad: Tensor) -> Tensor:
    return add_in_place(total, grad, factor)


@_add.register("Tensor", "Tensor", "RowTensor")
def _add_rows(factor: Tensor, total: Parameter, grad: Any) -> Tensor:
    # A sparse lookup has a gradient for the rows that it read; a row can be there more than once.
    return ops.scatter_add(total, grad.indices, as_dtype(grad.values, total.dtype) * factor)


@_add_dense_only.register("Tensor", "Tensor", "RowTensor")
def _add_no_rows(factor: Tensor, total: Parameter, grad: Any) -> Tensor:
    _refuse_rows()
    return total


def _add_number(total: Parameter, number: Tensor) -> Tensor:
    return ops.assign_add(total, as_dtype(number, total.dtype))


def sparse_lookup(network: nn.Cell) -> str | None:
    """Return the name of a cell whose gradient is sparse, or None."""
    for _, cell in network.cells_and_names():
        if any(isinstance(operator, SparseGatherV2) for operator in vars(cell).values()):
            return str(cell.cls_name)
    return None


@_primexpr
def _refuse_rows() -> None:
    raise ValueError(
        "For 'GradAccumulation', the gradients of this optimizer must be dense, but got one of a sparse lookup. It "
        "would leave alone the rows that one batch does not read, which no sum over micro batches knows. "
        "Use nn.Embedding, or another optimizer."
    )


def reciprocal(weight: Tensor) -> Tensor:
    """Return 1 / weight, or 0 for a window in which nothing was weighed."""
    # Not ops.equal, which takes the compiler 8 times as long with a number.
    empty = weight == 0.0
    inverse = 1.0 / ops.select(empty, ops.ones_like(weight), weight)
    return ops.select(empty, ops.zeros_like(weight), inverse)


def zero_after(done: Any, weight: Tensor) -> Tensor:
    """Return 0 after ``done``, as a number that the compiler does not know: constants of a graph stay for ever."""
    return ops.cast(ops.less(ops.abs(ops.depend(weight, done)), 0.0), ms.float32)


_spread = ops.MultitypeFuncGraph("spread")


@_spread.register("Tensor", "Tensor")
def _spread_one(number: Tensor, like: Parameter) -> Tensor:
    return spread(number, like)


def _assign_zero(scalar: Parameter) -> Tensor:
    return ops.assign(scalar, ops.zeros_like(scalar))


def zeros(name: str, shape: tuple[int, ...], dtype: Any = ms.float32) -> Parameter:
    """Return a parameter of zeros that no optimizer updates."""
    return Parameter(initializer("zeros", shape, dtype), name, requires_grad=False)
