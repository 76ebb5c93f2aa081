"""What is differentiated in a micro batch.

The backward pass starts from a share of the micro batch's mean loss, and the gradients are multiplied by a factor when
they are added. Share times factor is the number of rows, so the sums are the same for each choice of the two.
"""

from enum import Enum
from typing import Any

from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.kernels import ONE
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.convert_network import computes_in_16_bits
from ms_gradaccum.gradients.loss_scaler import NoLossScale
from ms_gradaccum.gradients.mixed_precision import Precision


class Pace(Enum):
    """What the backward pass of a micro batch starts from, for a mean loss over rows.

    ``SUM``: the loss times its rows. Nothing is multiplied afterwards.
    ``MEAN``: the loss, so that 16-bit gradients are those of a mean.
    ``BATCH``: the loss times the micro batch's share of the batch's rows. What reaches each row is then what the whole
    batch sends there, which a backward pass that is not linear needs: one that clips what comes in, or has hooks.
    """

    SUM = "sum"
    MEAN = "mean"
    BATCH = "batch"

    def share_and_factor(self, rows: Any, batch_rows: Any) -> tuple[Any, Any]:
        """Return the share of the loss and the factor of the gradients; numbers on the host, tensors in a graph."""
        if self is Pace.SUM:
            return rows, 1.0
        return (1.0, rows) if self is Pace.MEAN else (rows / batch_rows, batch_rows)


def pace_of(weighted_loss: WeightedLoss, half: bool, eager: bool) -> Pace:
    """Return the pace of a network that is run op by op (``eager``) or compiled, in half precision or not."""
    if weighted_loss.is_cached or has_own_backward(weighted_loss.network):
        return Pace.BATCH
    if half:
        return Pace.MEAN
    return Pace.BATCH if eager else Pace.SUM


def has_own_backward(network: nn.Cell) -> bool:
    """Return whether some cell says itself what its backward pass is, which then need not be linear."""
    operators = (ops.InsertGradientOf, ops.HookBackward)
    return any(
        cell.has_bprop
        or cell._backward_hook
        or cell._backward_pre_hook
        or any(isinstance(each, operators) for each in vars(cell).values())
        for _, cell in network.cells_and_names()
    )


class MicroLoss(nn.Cell):
    """Return what is differentiated, and beside it all that `WeightedLoss` returns, of which `MicroTotals` makes sums.

    There is as little in it as can be: op by op, each operator of it costs a part of a millisecond.

    Args:
        weighted_loss: The network's loss, of one term.
        half: Whether the network computes in half precision.
        loss_scale: The loss scale.
    """

    def __init__(self, weighted_loss: WeightedLoss, half: bool, loss_scale: NoLossScale) -> None:
        super().__init__(auto_prefix=False)
        self.weighted_loss = weighted_loss
        self.half = half
        self.divides = half and not weighted_loss.counts_rows
        self.loss_scale = loss_scale
        self._get_attr_from_cell(weighted_loss.network)

    def construct(self, share: Any, *tensors: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.weighted_loss(share, *tensors)
        start = outputs[0] / ops.maximum(outputs[1], ONE) if self.divides else outputs[0]
        if self.half:
            start = start * self.loss_scale.value()
        return (start, *outputs)

    def totals(self) -> "MicroTotals":
        """Return what makes sums of its outputs."""
        return MicroTotals(self.weighted_loss.counts_rows, self.half, self.weighted_loss.is_cached)


class MicroTotals(nn.Cell):
    """What a micro batch adds up: its loss sum, its weight, and its gradients times a factor.

    Args:
        counts_rows: Whether the weight is the number of rows.
        half: Whether the network computes in half precision.
        has_notes: Whether the loss returns something beside sum and weight that is handed on.
    """

    def __init__(self, counts_rows: bool, half: bool, has_notes: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.has_notes = has_notes
        self.counts_rows = counts_rows
        self.half = half

    def construct(self, value: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three, from what `MicroLoss` returns and the factor of its pace."""
        if self.counts_rows:
            return value * factor, weight * factor, factor
        return value, weight, ops.maximum(weight, ONE) if self.half else ONE


def is_half(weighted_loss: WeightedLoss, precision: Precision) -> bool:
    """Return whether the network computes in 16 bits, or its loss is scaled."""
    network = weighted_loss.network
    cells = [cell for _, cell in network.cells_and_names()]
    return computes_in_16_bits(network.trainable_params(), cells) or not precision.is_full
