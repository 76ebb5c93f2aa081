"""Progress of an optimizer: a user's optimizer around another one may leave out the update of a spike."""

from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.arrays import Array, few_elements
from ms_gradaccum.backend.network_code import is_user
from ms_gradaccum.backend.optimizers import all_parameters, inner_optimizer, optimizers_in
from ms_gradaccum.backend.tensors import Done


class Progress(NamedTuple):
    """A record of what an update moves, before it."""

    counted: int  # The updates that the optimizer has counted; 0 for one without a count.
    # A few elements of each weight and state; none where the count is enough.
    elements: list[Array]


class OptimizerProgress(nn.Cell):
    """The progress of an optimizer, by its count of updates or, where it has never counted, by its weights and state.

    Optimizers of MindSpore make each update, so nothing is read from them.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        count = getattr(inner_optimizer(optimizer), "global_step", None)
        self.may_leave_out = any(is_user(type(each)) for each in optimizers_in(optimizer))
        self.count = count if isinstance(count, Tensor) else Tensor([0])

    def snapshot(self) -> Progress:
        """Return what an update would move. Called by the host."""
        counted = int(self.count)
        elements = (
            []
            if counted
            else [few_elements(each).copy() for each in all_parameters(self.optimizer)]
        )
        return Progress(counted, elements)

    def has_updated(self, before: Progress, norm: Tensor, rate: Tensor) -> bool:
        """Return whether there was an update since ``before``, for a gradient and a rate. Called by the host."""
        if int(self.count) != before.counted:
            return True
        if before.counted:
            return False
        # An update with a gradient or a rate of 0 may move nothing.
        if not (norm.asnumpy() > 0.0 and np.any(rate.asnumpy() != 0.0)):
            return True
        now = map(few_elements, all_parameters(self.optimizer))
        return not all(map(np.array_equal, before.elements, now))

    def construct(self, decided: Tensor, before: Tensor, done: Done) -> Tensor:
        """Return, as part of a graph, whether a ``decided`` update has moved the count. A count of 0 tells nothing."""
        now = ops.depend(self.count + 0, done)
        left_out = ops.logical_and(now == before, now > 0)
        return ops.logical_and(decided, ops.logical_not(left_out.reshape(())))
