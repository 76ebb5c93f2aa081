"""Averages of parameters, which are parameters of a training step."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_gradaccum._checks import argument_error
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.kernels import add_in_place
from ms_gradaccum.backend.tensors import chunk_of, chunks_of, copy_after
from ms_gradaccum.gradients.buffer import zeros

_OWNER = "EMA"


class Averages(nn.Cell):
    """The averages of parameters of a network, as parameters of a training step.

    Attributes:
        parameters: The whole parameters of the network.
        values: Their averages, in float32.
        updates: Number of updates that the averages include.
        kept: The parameters' values while the averages are in the network; empty otherwise.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        if not parameters:
            remedy = "Set requires_grad of some, or trainable_only=False."
            raise ValueError(
                argument_error(_OWNER, "callback", "one for a network with parameters to average", 0, remedy)
            )
        self.parameters = ParameterTuple(parameters)
        self.values = ParameterTuple(zeros(f"ema.{parameter.name}", tuple(parameter.shape)) for parameter in parameters)
        self.updates = zeros("ema.updates", (), ms.int32)
        self.init_parameters_data()
        self.chunks = chunks_of([value.size for value in self.values])
        self.map = ops.HyperMap()
        self.kept: tuple[Tensor, ...] = ()
        self.run = Compiled(lambda: self, _OWNER, "the averages")

    def construct(self, share: Tensor) -> Tensor:
        """Move the averages by ``share`` of their distance to the parameters, and count the update."""
        done: Any = ops.assign_add(self.updates, Tensor(1, ms.int32))
        for begin, end in self.chunks:
            move = ops.partial(_move, copy_after(share, done))
            done = self.map(move, chunk_of(self.values, begin, end), chunk_of(self.parameters, begin, end))
        return copy_after(share, done)

    def count(self) -> int:
        """Return the number of updates that the averages include. It waits for the device."""
        return int(self.updates.asnumpy())

    def begin(self) -> None:
        """Before the first update, start from the parameters, which may have been loaded since."""
        if self.count() == 0:
            self.copy_weights()

    def copy_weights(self) -> None:
        """Set the averages to the values of the parameters."""
        _assign(self.values, self.parameters)

    def check_weights_are_there(self, owner: str, rule: str) -> None:
        """Raise if the averages have replaced the parameters in the network."""
        if self.kept:
            raise RuntimeError(
                f"For '{owner}', {rule} with the weights, but got the averages of an EMA in their place. "
                f"Leave 'with ema.swapped():', or call ema.restore(), first."
            )

    def swap(self) -> None:
        """Replace the parameters by the averages."""
        self.check_weights_are_there(_OWNER, "swap() must begin")
        self.begin()
        # Tensors, since parameters would be the step's. A tensor of a parameter shares its memory: of a copy, then.
        self.kept = tuple(Tensor(parameter.copy()) for parameter in self.parameters)
        try:
            _assign(self.parameters, self.values)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the parameters."""
        if not self.kept:
            raise RuntimeError(
                f"For '{_OWNER}', restore() must follow swap(), but got a network that has its weights. "
                f"'with ema.swapped():' calls both."
            )
        _assign(self.parameters, self.kept)
        self.kept = ()


def averages_of(step: Any) -> Averages | None:
    """Return the averages of a training step with an EMA, else None."""
    averages: Averages | None = getattr(step, "ema_averages", None)
    return averages


def hold_averages(step: Any, averages: Averages) -> None:
    """Make the averages part of a training step, and so of its checkpoints."""
    step.ema_averages = averages


_move = ops.MultitypeFuncGraph("move_average")


@_move.register("Tensor", "Tensor", "Tensor")
def _move_one(share: Tensor, average: Parameter, weight: Parameter) -> Tensor:
    return add_in_place(average, (ops.cast(weight, ms.float32) - average) * share)


def _assign(targets: Sequence[Parameter], values: Sequence[Tensor]) -> None:
    """Copy tensors into parameters, one by one from the host, which needs no compilation and happens rarely."""
    for target, value in zip(targets, values, strict=True):
        ops.assign(target, ops.cast(value, target.dtype))
