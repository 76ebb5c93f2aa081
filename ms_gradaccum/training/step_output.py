"""The report of a training step."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.lib.mixins import NDArrayOperatorsMixin

from ms_gradaccum.backend.arithmetic import Tensors

# The loss as a NumPy array, and the arguments that NumPy's protocols pass.
_Loss = np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.float64]]
_Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
_NUMBERS = (int, float, Tensor, np.ndarray, np.generic)
_UNKNOWN = Tensor(math.nan, ms.float32)


class OutputFields(NamedTuple):
    """The fields of a `StepOutput`, which are the items that a graph returns, in this order."""

    loss: Tensor | None
    overflow: Tensor
    loss_scale: Tensor
    updated: Tensor
    grad_norm: Tensor
    clipped_grad_norm: Tensor
    learning_rate: Tensor
    weight: Tensor
    # A step gives one tensor in place of a tuple: a row of sums above a row of weights, with 0 for no weight.
    other_losses: Tensor | Sequence[Tensor] = ()


_FIELDS = OutputFields._fields[:-1]
_Item: TypeAlias = Tensor | Sequence[Tensor] | None


def items_of(report: dict[str, Tensor], other_losses: Tensors = ()) -> Tensors:
    """Return the items of a `OutputFields` in a graph. Fields that ``report`` lacks are NaN."""
    # In a graph, a NamedTuple would be built by Python in each call, but a dict costs nothing.
    items: Tensors = ()
    for name in _FIELDS:
        items += (report.get(name, _UNKNOWN),)
    return items + other_losses


def named(items: Tensors) -> dict[str, Tensor]:
    """Return the items of a `OutputFields` by name, in a graph or on the host."""
    report: dict[str, Tensor] = {}
    for i, name in enumerate(_FIELDS):
        report[name] = items[i]
    return report


class StepOutput(NDArrayOperatorsMixin, tuple[Tensor, ...]):
    """Report of one call of a training step.

    It unpacks into three items as MindSpore's steps with a loss scale do, ``loss, overflow, loss_scale = step(x, y)``:
    ``LossMonitor`` reads item 0, ``Model`` item 1, fault tolerance item 2. The rest are attributes. All are tensors.
    Values that only an update determines are NaN in a call that ended inside a window.

    Used as a number, a StepOutput is its loss: in ``float(output)``, ``np.mean(outputs)``, ``total += output``,
    ``output < 0.1`` and ``f"{output:.4f}"``. (A tensor on the left of an operator takes ``output.loss``.)

    Attributes:
        loss: Weighted mean loss of the window so far; at its end, the loss of the same rows as one batch. Float32
            scalar (float64 for float64 weights, as `weight`). None for gradients that came without a loss.
        overflow: Whether the window's gradient had an Inf or a NaN, so that its update was skipped. Bool scalar.
        loss_scale: Factor by which the loss was multiplied before the backward pass. Float32 scalar.
        updated: Whether this call updated the parameters. `skip_above` and a user's optimizer may leave out an update.
            Bool scalar.
        grad_norm: Global L2 norm of the window's mean gradient before clipping. Float32 scalar.
        clipped_grad_norm: The same after clipping. Float32 scalar.
        learning_rate: Learning rate of the update: a float32 scalar, or a vector with one entry per parameter if the
            optimizer's groups have rates of their own. NaN if only an update could determine it and none was made, and
            in a graph whose schedule has parameters of its own.
        weight: Weight of the window so far: rows, or what the network counts (tokens). Float32 scalar.
        other_losses: Of a `GradAccumulation` with `losses`, the mean of each further loss that the network returns, as
            `loss` is: a tuple of float32 scalars in the network's order. Else empty.

    Examples:
        >>> from mindspore import Tensor, nn, ops
        >>> from ms_gradaccum import GradAccumulation, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
        >>> train_step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.5))
        >>> output = train_step(ops.ones((4, 1)), ops.ones((4, 1)))
        >>> print(output.loss, output.updated, output.grad_norm, output.weight)
        1.0 True 2.0 4.0
        >>> loss, overflow, loss_scale = output
        >>> print(f"{output:.3f}", loss, overflow, loss_scale)
        1.000 1.0 False 1.0
    """

    _fields = _FIELDS
    _report: OutputFields

    def __new__(cls, *items: _Item, **fields: _Item) -> "StepOutput":
        report: Any = OutputFields(*items, **fields)
        output = super().__new__(cls, report[:3])
        output._report = report
        return output

    # The properties make the fields read-only, and give type checkers their types.

    @property
    def loss(self) -> Tensor | None:
        return self._report.loss

    @property
    def overflow(self) -> Tensor:
        return self._report.overflow

    @property
    def loss_scale(self) -> Tensor:
        return self._report.loss_scale

    @property
    def updated(self) -> Tensor:
        return self._report.updated

    @property
    def grad_norm(self) -> Tensor:
        return self._report.grad_norm

    @property
    def clipped_grad_norm(self) -> Tensor:
        return self._report.clipped_grad_norm

    @property
    def learning_rate(self) -> Tensor:
        return self._report.learning_rate

    @property
    def weight(self) -> Tensor:
        return self._report.weight

    @property
    def other_losses(self) -> Tensors:
        losses = self._report.other_losses
        if isinstance(losses, Tensor):  # Read only on demand, because a read waits for the device.
            pairs = losses.asnumpy().T
            losses = [Tensor(total / weight, ms.float32) for total, weight in pairs if weight > 0]
            self._report = self._report._replace(other_losses=losses)
        return tuple(losses)

    @cached_property
    def is_updated(self) -> bool:
        """True if this call updated the parameters: `updated`, read once."""
        return bool(self._report.updated.asnumpy())

    @cached_property
    def has_overflow(self) -> bool:
        """True if the window's gradient had an Inf or a NaN: `overflow`, read once."""
        return bool(self.overflow.asnumpy())

    @property
    def ends_window(self) -> bool:
        """True if this call ended its window, with an update or a skipped one."""
        # This does not wait for the device: inside a window both are host constants; at its end the step has read them.
        return bool(self.is_updated or self.has_overflow or np.isfinite(self.grad_norm.asnumpy()))

    def _asdict(self) -> dict[str, Tensor | None]:
        """Return all fields by name, as a NamedTuple does, without `other_losses`, which are not scalars."""
        return dict(zip(self._fields, self._report))

    def _replace(self, **fields: object) -> "StepOutput":
        """Return a copy with other values for some fields, as a NamedTuple does."""
        other = type(self)(**{**self._report._asdict(), **fields})
        for field, name in (("updated", "is_updated"), ("overflow", "has_overflow")):
            if field not in fields and name in vars(self):
                vars(other)[name] = vars(self)[name]
        return other

    def __reduce__(self) -> tuple[type["StepOutput"], tuple[object, ...]]:
        return type(self), (*self._asdict().values(), self.other_losses)

    def __repr__(self) -> str:
        items = [f"{name}={value}" for name, value in self._asdict().items()]
        if self.other_losses:
            items.append(f"other_losses=({', '.join(map(str, self.other_losses))})")
        return f"StepOutput({', '.join(items)})"

    def __str__(self) -> str:
        return str(self.loss)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return format(float(self), spec)

    def asnumpy(self) -> _Loss:
        """Return the loss as a NumPy array."""
        if self.loss is None:
            raise TypeError(
                "For 'Accumulator', the report has no loss, because the argument 'loss' was not "
                "given. Call accumulator(grads, weight, loss)."
            )
        loss: _Loss = self.loss.asnumpy()
        return loss

    def item(self) -> float:
        """Return the loss as a Python number."""
        return float(self)

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> _Array:
        return np.array(float(self), dtype)

    def __float__(self) -> float:
        return float(self.asnumpy())

    def __array_ufunc__(
        self, ufunc: object, method: str, *values: object, **settings: object
    ) -> Any:
        # All operators come here. Never return a tensor: on the left of a sum, a tensor would add to a tuple.
        return getattr(ufunc, method)(*map(_number, values), **settings)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, _NUMBERS):
            return super().__eq__(other)
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, _NUMBERS):
            return super().__ne__(other)
        return tuple.__ne__(self, other)

    __hash__ = tuple.__hash__


def _number(value: object) -> Any:
    if isinstance(value, StepOutput):
        return float(value)
    if isinstance(value, Tensor):
        return value.asnumpy()
    return value


def with_one_norm(outputs: list[StepOutput]) -> list[StepOutput]:
    """Return the reports of several optimizers with one norm and one decision."""
    norm = _total_norm([output.grad_norm for output in outputs])
    updated = all([output.is_updated for output in outputs])
    overflow = any([output.has_overflow for output in outputs])
    if updated:  # The overflow of an update is that of its norm.
        overflow = not math.isfinite(float(norm))
    common = {
        "overflow": Tensor(overflow),
        "updated": Tensor(updated),
        "grad_norm": norm,
        "clipped_grad_norm": norm,
    }
    return [output._replace(**common) for output in outputs]


def with_all_rates(outputs: list[StepOutput], has_own_norms: bool) -> StepOutput:
    """Merge the reports of several optimizers into one. After a clip by value, each optimizer has its own norm."""
    rates = np.concatenate([output.learning_rate.asnumpy().reshape(-1) for output in outputs])
    clipped = outputs[0].clipped_grad_norm
    if has_own_norms and outputs[0].is_updated:
        clipped = _total_norm([output.clipped_grad_norm for output in outputs])
    # One of them may have left its update out.
    updated = Tensor(any([output.is_updated for output in outputs]))
    return outputs[0]._replace(
        learning_rate=Tensor(rates), clipped_grad_norm=clipped, updated=updated
    )


def _total_norm(norms: list[Tensor]) -> Tensor:
    return Tensor(math.hypot(*map(float, norms)), ms.float32)
