"""A loss as a pair (sum, weight): added over micro batches and ranks, and divided once at the end.

This is exact for any split of rows or tokens; a mean of means is not.
"""

from typing import Any, Literal

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from ms_gradaccum.backend.arithmetic import ONE, Tensors, as_dtype
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.tensors import map_tensors, scalar
from ms_gradaccum.batch.structure import SequenceOf

_MEAN_REMEDY = (
    "Reduce it to its mean, as with reduction='mean', or return (loss_sum, weight) with "
    "weighted=True."
)
_PAIR_REMEDY = "Return (loss_sum, weight), two scalars, or use weighted=False for a mean loss."
# Values that the compiler leaves to the Python interpreter have neither a type in a graph nor a gradient.
_OBJECT_REMEDY = (
    "Return a tensor, alone or first in a tuple. In GRAPH mode these make a Python object of it: "
    "an attribute that construct() sets (a count, an average: make it a Parameter), asnumpy(), "
    "float(), Tensor(), dict(zip()), getattr() with a default, and classes that are not Cells. "
    "MindSpore's own step runs with it and trains nothing."
)
_LOSSES_REMEDY = (
    "Give losses='sum' to train their sum, or losses='first' to train the first alone (metrics)."
)
_FURTHER_REMEDY = "Give losses='first' to leave them out, or add them to the loss sum."
# Further losses that a network returns: their names, or what becomes of any number of them.
Losses = tuple[str, ...] | Literal["sum", "first"]
# The maximum number of further losses without names. Buffers and collectives need a number before the first batch.
_MOST_OTHER_LOSSES = 64
_stack = ops.Stack()


@primexpr
def _check_loss(shape: tuple[int, ...] | None, dtype: ms.Type, what: str, remedy: str) -> None:
    """Raise unless a loss is a floating-point scalar. A shape of None stands for a Python object."""
    if shape is not None and _is_loss(shape, dtype):
        return
    if shape is None:
        got = "a Python object, which has no gradient"
        remedy = _OBJECT_REMEDY
    else:
        got = f"{dtype} of shape {tuple(shape)}"
    raise ValueError(
        f"For 'GradAccumulation', the argument 'network' must return {what}, a floating-point "
        f"scalar, first, but got {got}. {remedy}"
    )


@primexpr
def _check_weight(shape: tuple[int, ...] | None) -> None:
    if shape is not None and tuple(shape) in ((), (1,)):
        return
    got = "no number" if shape is None else f"a tensor of shape {tuple(shape)}"
    raise ValueError(
        f"For 'GradAccumulation', the argument 'network' must return its weight, a scalar, after "
        f"the loss sum, but got {got}. {_PAIR_REMEDY}"
    )


@primexpr
def _refuse_losses(count: int, remedy: str) -> None:
    raise ValueError(
        f"For 'GradAccumulation', the argument 'losses' must be given for a network of {count + 1} "
        f"scalar losses, but got None. {remedy}"
    )


def num_other_losses(losses: Losses | None) -> int:
    """Return the number of further losses that a report has room for."""
    if losses is None:
        return 0
    if isinstance(losses, tuple):
        return len(losses)
    return _MOST_OTHER_LOSSES


@primexpr
def _presence_of(count: int, room: int, names: tuple[str, ...]) -> list[float]:
    """Return 1 for each of ``count`` losses, followed by 0 for each unused place in a report."""
    if names and count != room:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'losses' must name each of the {count} scalars "
            f"after the loss, but got {names}. The loss itself has no name."
        )
    if count > room:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'network' must return at most {room} scalars "
            f"after its loss, but got {count}. Return the sum of some of them, or stack those "
            f"without a report into a vector."
        )
    return [1.0] * count + [0.0] * (room - count)


def _is_loss(shape: tuple[int, ...], dtype: ms.Type, most_axes: int = 1) -> bool:
    return dtype in mstype.float_type and len(shape) <= most_axes and tuple(shape) in ((), (1,))


_is_loss_in_graph = primexpr(_is_loss)


def _losses_in(outputs: Any, most_axes: int) -> Tensors:
    """Return the floating-point scalars in outputs, which may be nested."""
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    found: Tensors = ()
    if isinstance(outputs, (tuple, list)):
        for item in outputs:
            found += _losses_in(item, most_axes)
    elif isinstance(outputs, Tensor) and _is_loss_in_graph(outputs.shape, outputs.dtype, most_axes):
        found += (outputs,)
    return found


def first_of(outputs: Any) -> Any:
    """Return the first of the outputs of a network, or None if there is none."""
    if not isinstance(outputs, (tuple, list)):
        return outputs
    if len(outputs) == 0:
        return None
    return outputs[0]


def _as_number(item: Tensor) -> Tensor:
    return as_dtype(scalar(item), ms.float32)


class WeightedLoss(nn.Cell):
    """The loss of a network as (sum, weight) and further losses to report, from flattened inputs of a micro batch."""

    # True if the weight is the number of rows, False if the network returns it.
    counts_rows = False
    # True for a prepared micro batch: it comes with its share of the batch, and returns notes for `Preparation.check`.
    is_prepared = False
    # True if the gradient of a micro batch with the weight 0 may be that of a mean over nothing, NaN.
    may_be_empty = False

    def __init__(
        self, network: nn.Cell, structure: SequenceOf | None = None, losses: Losses | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.sums = losses == "sum"  # True if the sum of all losses is trained.
        self.room = num_other_losses(losses)  # The number of further losses in a report.
        self.names = losses if isinstance(losses, tuple) else ()
        self.structure = structure

    def outputs(self, tensors: tuple[object, ...]) -> Any:
        if self.structure is None:
            return self.network(*tensors)
        return self.network(*self.structure.rebuild(tensors))

    def first(self, outputs: Any, what: str, remedy: str) -> Tensor:
        """Return the first of ``outputs``, the loss, as a float32 scalar."""
        loss = first_of(outputs)
        if not isinstance(loss, Tensor):
            _check_loss(None, None, what, remedy)
        _check_loss(loss.shape, loss.dtype, what, remedy)
        return scalar(loss)

    def further(self, outputs: Any, begin: int, remedy: str) -> Tensors:
        """Return the floating-point scalars among ``outputs`` from the index ``begin`` on. Raise without `losses`."""
        if not isinstance(outputs, (tuple, list)):
            return ()
        # A tensor of shape (1,) is an output for a single row, unless the first loss has that shape, too.
        found = _losses_in(outputs[begin:], outputs[0].ndim)
        if self.room == 0 and len(found) > 0:
            _refuse_losses(len(found), remedy)
        return found

    def reported(self, further: Tensors) -> Tensors:
        """Return a row of further losses and a row of ones, padded with zeros, or nothing without a report."""
        if self.room == 0:
            return ()
        presence = Tensor(_presence_of(len(further), self.room, self.names), ms.float32)
        values = ops.zeros_like(presence)
        if len(further) > 0:
            own = _stack(map_tensors(_as_number, further))
            if len(further) < self.room:
                own = ops.concat((own, values[len(further) :]))
            values = own
        # The report has no gradient: losses that are trained are part of the loss itself.
        return (ops.stop_gradient(_stack((values, presence))),)


class RowWeight(WeightedLoss):
    """Return ``(mean * rows, rows)`` for a network that returns a mean loss, alone or before other outputs."""

    counts_rows = True

    def construct(self, rows: Tensor | None, *tensors: object) -> Tensors:
        """Return them. ``rows`` is None for 1, which saves a product in the forward and the backward pass."""
        outputs = self.outputs(tensors)
        loss = self.first(outputs, "its mean loss", _MEAN_REMEDY)
        further = self.further(outputs, 1, _LOSSES_REMEDY)
        if self.sums:
            for other in further:
                loss = loss + scalar(other)
        reported = self.reported(further)
        if rows is None:
            return (loss, ONE) + reported
        return (loss * rows, rows) + reported


class OwnWeight(WeightedLoss):
    """Return ``(loss_sum, weight)`` of a network that computes its own weight, for example its number of tokens."""

    def construct(self, rows: Tensor, *tensors: object) -> Tensors:
        return self.pair(self.outputs(tensors))

    def pair(self, outputs: Any) -> Tensors:
        """Return the first two numbers that the network returns, and the further losses to report."""
        loss_sum = self.first(outputs, "its loss sum", _PAIR_REMEDY)
        weight: object = None
        if isinstance(outputs, (tuple, list)) and len(outputs) > 1:
            weight = outputs[1]
        if isinstance(weight, (int, float)):
            weight = Tensor(weight, ms.float32)
        _check_weight(weight.shape if isinstance(weight, Tensor) else None)
        further = self.further(outputs, 2, _FURTHER_REMEDY)
        return (loss_sum, scalar(weight)) + self.reported(further)


class MeanWeight(OwnWeight):
    """Return ``(mean * weight, weight)`` of a network that returns its mean loss and the weight of this mean."""

    may_be_empty = True

    def construct(self, rows: Tensor, *tensors: object) -> Tensors:
        found = self.pair(self.outputs(tensors))
        # In float32, since the sum over many tokens exceeds float16. The weight of a mean has no gradient.
        weight = ops.cast(ops.stop_gradient(found[1]), ms.float32)
        # A mean over nothing is 0 / 0.
        mean = ops.select(weight != 0.0, found[0], ops.zeros_like(found[0]))
        return (mean * weight, weight) + found[2:]
