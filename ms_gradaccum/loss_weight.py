"""A loss as a pair (sum, weight): what the network returns, in the form that can be added up.

Sums and weights can be added over micro batches and over ranks and divided once at the end, which is exact
however the rows or tokens were split. A mean of means is not. The distinction was made public by the
"Gradient accumulation on variable size training samples" section of Hugging Face Accelerate's guide.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import _primexpr

from ms_gradaccum.structure import rebuilder

_MEAN_REMEDY = (
    "Reduce it to its mean, for example with reduction='mean', or return (loss_sum, weight) with weighted=True."
)
_PAIR_REMEDY = "Return (loss_sum, weight), two scalars, or use weighted=False for a mean loss."


@_primexpr
def _check_mean(shape: tuple[int, ...], dtype: Any) -> None:
    if tuple(shape) not in ((), (1,)) or dtype not in mstype.float_type:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'network' must return a scalar floating-point loss first, but got "
            f"{dtype} of shape {tuple(shape)}. {_MEAN_REMEDY}"
        )


@_primexpr
def _check_pair(count: int, shape: tuple[int, ...], dtype: Any, weight_shape: tuple[int, ...]) -> None:
    if count < 2 or tuple(shape) not in ((), (1,)) or tuple(weight_shape) not in ((), (1,)):
        got = "one output" if count < 2 else f"shapes {tuple(shape)} and {tuple(weight_shape)}"
        raise ValueError(
            f"For 'GradAccumulation', the argument 'network' must return a scalar loss sum and its scalar weight, "
            f"but got {got}. {_PAIR_REMEDY}"
        )
    if dtype not in mstype.float_type:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'network' must return a floating-point loss sum, but got {dtype}. "
            f"{_PAIR_REMEDY}"
        )


class WeightedLoss(nn.Cell):
    """The loss of a network as (sum, weight), from the tensors of one micro batch.

    Args:
        network: The loss cell.
        structure: What `take_apart` left of its inputs. None if these are given as the network takes them.
    """

    def __init__(self, network: nn.Cell, structure: Any = None) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.structure = None if structure is None else rebuilder(structure)

    def outputs(self, tensors: tuple[Any, ...]) -> Any:
        """Return what the network returns."""
        if self.structure is None:
            return self.network(*tensors)
        return self.network(*self.structure(tensors))


class RowWeight(WeightedLoss):
    """Make ``(mean * rows, rows)`` of a network that returns a mean loss, alone or before other outputs."""

    def construct(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(tensors)
        loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        _check_mean(loss.shape, loss.dtype)
        return ops.cast(loss.reshape(()), ms.float32) * rows, rows


class OwnWeight(WeightedLoss):
    """Pass on ``(loss_sum, weight)`` of a network that counts its own weight, for example its tokens."""

    def construct(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(tensors)
        if not isinstance(outputs, (tuple, list)):
            _check_pair(1, (), ms.float32, ())
        loss_sum, weight = outputs[0], outputs[1]
        if not isinstance(weight, Tensor):
            weight = Tensor(weight, ms.float32)
        _check_pair(len(outputs), loss_sum.shape, loss_sum.dtype, weight.shape)
        weight = ops.stop_gradient(ops.cast(weight.reshape(()), ms.float32))
        return ops.cast(loss_sum.reshape(()), ms.float32), weight
