"""Sums of gradients and losses in float32, or float64 for float64 parameters, and their weight."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.operations import SparseGatherV2

from ms_gradaccum.backend.arithmetic import Tensors, add_in_place, as_dtype, fill_in_place
from ms_gradaccum.backend.compiled import number_of, numbered
from ms_gradaccum.backend.device import spread
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.tensors import Done, chunk_of, chunks_of, map_backwards, map_tensors


class WindowTotals(NamedTuple):
    """Options for further sums of a window, besides the gradients, the loss and the weight."""

    counts_dropped: bool = False  # True if micro batches can be dropped.
    other_losses: int = 0  # The maximum number of further losses that are reported.

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each parameter of `GradientBuffer.totals`."""
        return (
            (1, 1) + self.counts_dropped * (1,) + bool(self.other_losses) * (2 * self.other_losses,)
        )


_NOTHING_ELSE = WindowTotals()
_ROWS = (
    "For 'GradAccumulation', this optimizer needs dense gradients, but got one of a sparse lookup. "
    "It would skip the rows that one micro batch does not read. Use nn.Embedding, or another "
    "optimizer."
)


class GradientBuffer(nn.Cell):
    """The sums of the gradients, the losses and the weights of one window, which are cleared together.

    The names begin with ``accu_grads``, a prefix that MindSpore's checkpoints, fault tolerance and compiler know. The
    sums have the shapes of the parameters, or ``shapes``. With ``dense_only``, gradients of sparse lookups raise.
    """

    counts_in_graph = False  # True if a graph counts the batches of the window.

    def __init__(
        self,
        parameters: ParameterTuple,
        dense_only: bool = False,
        shapes: Sequence[tuple[int, ...]] | None = None,
        totals: WindowTotals = _NOTHING_ELSE,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.names = tuple(parameter.name for parameter in parameters)
        if shapes is None:
            shapes = [parameter.shape for parameter in parameters]
        dtype = ms.float32  # Of the scalars: that of the widest sum.
        sums = []
        for parameter, shape in zip(parameters, shapes):
            # 16-bit sums would lose the small addends of a long window.
            wide = ms.float64 if parameter.dtype == ms.float64 else ms.float32
            sums.append(zeros(f"accu_grads.{parameter.name}", shape, wide))
            if wide == ms.float64:
                dtype = wide
        self.sums = ParameterTuple(sums)
        # They are named after a parameter because the buffers of two optimizers can be in one graph.
        window = f"accu_grads.{self.names[0]}.window"
        self.loss = zeros(f"{window}_loss", (), dtype)
        self.weight = zeros(f"{window}_weight", (), dtype)
        # The number of batches in the open window: 0 from an update to the next batch.
        self.batches = zeros(f"{window}_batches", (), ms.int32)
        self.number = number_of(self)
        # The number of dropped micro batches, in the dtype of the other reduced scalars.
        self.dropped: Parameter | None = None
        if totals.counts_dropped:
            self.dropped = zeros(f"{window}_dropped", (), dtype)
        # For each reported loss the sum (first row) and the weight (second row).
        self.other_losses: Parameter | None = None
        if totals.other_losses:
            self.other_losses = zeros(f"{window}_other_losses", (2, totals.other_losses), dtype)
        self.scalars = ParameterTuple([*self.totals(), self.batches])
        self.chunks = chunks_of([total.size for total in self.sums])
        self.add_one = _add_dense_only if dense_only else _add

    def all_totals(self) -> list[Parameter]:
        """Return all parameters of an open window that a state saves, and that are summed over the ranks."""
        return [*self.sums, *self.totals()]

    def totals(self) -> list[Parameter]:
        """Return the scalars that are reduced over the ranks besides the gradients."""
        return [
            self.loss,
            self.weight,
            *(each for each in (self.dropped, self.other_losses) if each is not None),
        ]

    def add(
        self, loss_sum: Tensor, weight: Tensor, grads: Tensors, factor: Tensor
    ) -> tuple[Tensors, Tensor, Tensor]:
        """Add one micro batch, with its gradients times ``factor``. Return the updated sums, loss and weight."""
        # Add the last gradient first: a backward pass computes it first, and its memory is freed once it is added.
        sums = map_backwards(ops.partial(self.add_one, factor), tuple(self.sums), grads)
        return sums, *self.add_totals(loss_sum, weight)

    def add_totals(self, loss_sum: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add the loss and the weight of one micro batch, and return their sums."""
        return add_in_place(self.loss, loss_sum), add_in_place(self.weight, weight)

    def no_grads(self, parameters: tuple[Parameter, ...], done: object) -> Tensors:
        """Return the gradients of an empty micro batch, zeros, after ``done``."""
        return map_tensors(ops.partial(spread, zero_after(done, self.weight)), parameters)

    def count_batch(self) -> Tensor:
        """Count one batch as part of a graph, and return the number of batches in the window."""
        _count_in_graph(self.number)
        return ops.assign_add(self.batches, Tensor(1, ms.int32))

    def count_dropped(self, finite: Tensor) -> Done:
        """Count one dropped micro batch unless it is ``finite``."""
        return add_in_place(self.dropped, ops.cast(ops.logical_not(finite), ms.float32))

    def add_other_losses(self, losses: Tensor, weight: Tensor) -> Done:
        """Add the further losses of one micro batch with this weight. Weight 0 ignores them: they may be 0 / 0."""
        return add_in_place(
            self.other_losses, ops.select(weight > 0.0, losses * weight, ops.zeros_like(losses))
        )

    def other_losses_after(self, done: object) -> Tensors:
        """Return the sums and weights of the further losses, after ``done``; an empty tuple if none are reported."""
        if self.other_losses is None:
            return ()
        return (ops.depend(self.other_losses + 0.0, done),)

    def reciprocal_weight(self) -> Tensor:
        return reciprocal(self.weight)

    def clear(self, done: Done = ()) -> Done:
        """Assign zeros after ``done``. A product with 0 would keep NaN and Inf."""
        for begin, end in self.chunks:
            fill = ops.partial(fill_in_place, zero_after(done, self.weight))
            done = map_tensors(fill, chunk_of(tuple(self.sums), begin, end))
        for scalar in self.scalars:
            done = done, ops.assign(scalar, ops.zeros_like(scalar))
        return done


class BatchCount:
    """The number of batches in an open window. The host counts; a parameter stores it for checkpoints and graphs."""

    known = 0  # The host's number.
    is_ahead = False  # True if the host has not written its number yet.
    is_stale = False  # True if the parameter may have been written after the host has read it.
    is_changed = False  # True if the number was changed elsewhere after the host set it.
    # The number of reads after others, such as the loading of a checkpoint, have written the parameter.
    foreign_writes = 0

    def __init__(self, buffer: GradientBuffer) -> None:
        self.buffer = buffer
        self.parameter = buffer.batches
        for name in ("set_data", "assign_value"):
            # Weak references, since this function is an attribute of the parameter.
            vars(self.parameter)[name] = partial(
                _write, weakref.ref(self), weakref.ref(self.parameter), name
            )

    def get(self) -> int:
        """Return the number. Read it from the device only if it may have been written elsewhere."""
        return self.read() if self.is_stale or self.buffer.counts_in_graph else self.known

    def read(self) -> int:
        """Write the host's number if necessary, then return the number of the parameter."""
        if self.is_ahead:
            self.set(self.known)
        found = int(self.parameter.asnumpy())
        self.is_changed = self.is_changed or found != self.known
        self.foreign_writes += self.is_stale
        self.is_stale = False
        self.known = found
        return found

    def set(self, batches: int, now: bool = True) -> None:
        """Set the number. Unless ``now``, it is written later, since an update may clear it first."""
        if batches != self.known or self.is_stale or self.buffer.counts_in_graph:
            self.known = batches
            self.is_ahead = True
        if now and self.is_ahead:
            value = Tensor(batches, ms.int32)
            if self.buffer.counts_in_graph:
                ops.assign(self.parameter, value)  # A graph would keep its old memory.
            else:
                Parameter.set_data(self.parameter, value)
            self.is_ahead = False
        self.is_stale = self.is_changed = False

    def was_cleared(self) -> None:
        """Record that the parameter is 0, since the buffer was cleared."""
        self.known = 0
        self.is_ahead = self.is_stale = self.is_changed = False

    def was_changed(self) -> bool:
        """Return whether the number was changed elsewhere since the host set it or last called this."""
        self.get()
        was_changed = self.is_changed
        self.is_changed = False
        return was_changed


def _write(
    its_count: "weakref.ref[BatchCount]",
    itself: "weakref.ref[Parameter]",
    method: str,
    *args: object,
    **kwargs: object,
) -> object:
    """Call a method that writes a parameter, and mark the number in its `BatchCount` as stale."""
    count = its_count()
    parameter = itself()
    if count is not None:
        count.is_ahead = False
        count.is_stale = True
    return getattr(type(parameter), method)(parameter, *args, **kwargs)


@primexpr
def _count_in_graph(number: int) -> None:
    buffer = numbered(number)
    if buffer is not None:
        buffer.counts_in_graph = True


_add = ops.MultitypeFuncGraph("add_gradient")
_add_dense_only = ops.MultitypeFuncGraph("add_dense_gradient")


@_add.register("Tensor", "Tensor", "Tensor")
@_add_dense_only.register("Tensor", "Tensor", "Tensor")
def _add_dense(factor: Tensor, total: Parameter, grad: Tensor) -> Tensor:
    return add_in_place(total, grad, factor)


@_add.register("Tensor", "Tensor", "RowTensor")
def _add_rows(factor: Tensor, total: Parameter, grad: Any) -> Tensor:
    # The gradient of a sparse lookup contains the rows that were read. A row can occur more than once.
    return ops.scatter_add(total, grad.indices, as_dtype(grad.values, total.dtype) * factor)


@_add_dense_only.register("Tensor", "Tensor", "RowTensor")
def _add_no_rows(factor: Tensor, total: Parameter, grad: object) -> Tensor:
    _refuse_rows()
    return total


@primexpr
def _refuse_rows() -> None:
    """Raise while a graph is compiled."""
    raise ValueError(_ROWS)


def sparse_lookup(network: nn.Cell) -> str | None:
    """Return the name of a cell whose gradient is sparse, or None."""
    for _, cell in network.cells_and_names():
        if looks_rows_up(cell):
            return str(cell.cls_name)
    return None


def looks_rows_up(cell: nn.Cell) -> bool:
    """Return whether the cell has the operator of a sparse lookup."""
    return any(isinstance(operator, SparseGatherV2) for operator in vars(cell).values())


def reciprocal(weight: Tensor) -> Tensor:
    """Return 1 / weight, or 0 for a weight of 0."""
    # Not ops.DivNoNan, which treats 1e-10 as 0 on a GPU, nor ops.equal, which takes longer to compile.
    return ops.select(weight == 0.0, weight, 1.0 / weight)


def zero_after(done: Done, weight: Tensor) -> Tensor:
    """Return 0 after ``done``, not as a constant, since constants of a graph are never freed."""
    return ops.cast(ops.less(ops.abs(ops.depend(weight, done)), 0.0), ms.float32)


def zeros(name: str, shape: tuple[int, ...], dtype: ms.Type = ms.float32) -> Parameter:
    """Return a parameter of zeros that no optimizer updates."""
    return Parameter(initializer("zeros", shape, dtype), name, requires_grad=False)
