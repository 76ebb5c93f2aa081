"""The second half of the end of a window: from the sums to new weights and an empty buffer."""

from typing import Any

from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.compiled import NOTHING, Compiled, op_by_op
from ms_gradaccum.backend.kernels import on_cpu
from ms_gradaccum.backend.optimizers import all_parameters, may_have_branches
from ms_gradaccum.backend.tensors import copy_after
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.mean_gradients import MeanGradients, PutMeanGradients

_look_at = ops.MultitypeFuncGraph("look_at")


@_look_at.register("Tensor", "Tensor")
def _look_at_one(value: Tensor, parameter: Tensor) -> Tensor:
    return ops.expand_dims(ops.depend(parameter, value), 0)


class EndUpdate(nn.Cell):
    """What follows the optimizer: the weights go where they belong, and the buffer is emptied."""

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = reducer.buffer
        self.reducer = reducer

    def construct(self, updated: Any) -> Any:
        """Do so after ``updated``."""
        return self.buffer.clear(self.reducer.after_update(updated))


class Update(nn.Cell):
    """Second half of the end of a window: clip, optimizer, clear."""

    def __init__(self, optimizer: nn.Cell, gradients: MeanGradients) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.gradients = gradients
        self.end = EndUpdate(gradients.reducer)
        self.parameters = all_parameters(optimizer)
        self.has_branches = may_have_branches(optimizer)
        self.map = ops.HyperMap()

    def construct(self, norm: Tensor, *limit: Tensor) -> Tensor:
        """Update with the mean gradient, whose norm is ``norm``, and return the norm after clipping."""
        clipped_norm, grads = self.gradients(norm, *limit)
        clipped_norm = ops.depend(clipped_norm, self.end(self.optimizer(grads)))
        return self.touch(clipped_norm) if self.has_branches else clipped_norm

    def touch(self, value: Tensor) -> Tensor:
        """Return ``value``, having looked at all parameters of the optimizer.

        One that a graph uses in a branch alone, as some optimizers do, keeps its old storage when a checkpoint is
        loaded. After the update: the compiler copies what is looked at before it changes. Each look waits for each
        change, so this takes the square of the parameters.
        """
        value = copy_after(value, ())
        return ops.depend(value, self.map(ops.partial(_look_at, value), self.parameters))


class EagerUpdate:
    """The same with an optimizer that runs op by op, as MindSpore's own step runs it in PYNATIVE mode."""

    def __init__(self, owner: str, update: Update) -> None:
        self.optimizer = update.optimizer
        self.sums = update.gradients.reducer.sums
        self.put_gradients = Compiled(lambda: PutMeanGradients(update.gradients), owner, "the mean gradient")
        self.end = Compiled(lambda: update.end, owner, "the end of the update")
        if type(self.optimizer).__module__.startswith("mindspore.mint.") and on_cpu():
            warn(
                f"For '{owner}', {type(self.optimizer).__name__} of mindspore.mint changes nothing on CPU in PYNATIVE "
                f"mode, also in MindSpore's own step: its in-place operators do nothing there. Take "
                f"one of mindspore.nn or mindspore.experimental, or give compile=True, with which all but AdamW train."
            )

    def __call__(self, *norm_and_limit: Tensor) -> Tensor:
        """Update, and return the norm after clipping."""
        clipped_norm, grads = self.put_gradients(*norm_and_limit)
        with op_by_op():
            # The parameters themselves, of which value() would be a copy.
            self.optimizer(grads or tuple(self.sums))
        self.end(NOTHING)
        return clipped_norm


def build_update(owner: str, update: Update, eager: bool) -> Any:
    """Return what runs an update, op by op or compiled."""
    return EagerUpdate(owner, update) if eager else Compiled(lambda: update, owner, "the optimizer")
