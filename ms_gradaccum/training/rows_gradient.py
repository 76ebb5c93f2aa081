"""The gradient of the loss of some rows, as sums with random signs."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum.backend.kept_state import Array, as_array
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.batch.weighted_loss import WeightedLoss
from ms_gradaccum.gradients.buffer import reciprocal, sparse_lookup

# Of each parameter's gradient some sums are enough to compare it.
_SIGNS = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (4, 9973))


def can_differentiate(network: nn.Cell, parameters: Sequence[Parameter]) -> bool:
    """Return whether a gradient has dense tensors and calls no hook of the user, who may note what it gets."""
    hooked = any(parameter.hooks() for parameter in parameters)
    return not (hooked or sparse_lookup(network) or NetworkCode(network.network).has_hooks())


def sums_of(grads: Sequence[Tensor]) -> Array:
    flat = (as_array(grad).reshape(-1) for grad in grads)
    return np.concatenate([[grad @ np.resize(signs, grad.size) for signs in _SIGNS] for grad in flat])


class LossLessMean(nn.Cell):
    """The loss of some rows, whose gradient is that of its mean times the weight, which may depend on parameters."""

    def __init__(self, loss: WeightedLoss) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, share: Tensor, *tensors: object) -> tuple[Tensor, Tensor]:
        total, weight = self.loss(share, *tensors)
        return total - ops.stop_gradient(total * reciprocal(weight)) * weight, weight


class GradientOfRows(nn.Cell):
    def __init__(self, loss: WeightedLoss, parameters: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.gradient = ops.grad(LossLessMean(loss), None, parameters, has_aux=True)

    def construct(self, share: Tensor, *tensors: object) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = self.gradient(share, *tensors)[0]
        return grads
