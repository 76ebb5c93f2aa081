"""The inputs of a batch as the arguments of a network."""

from collections.abc import Mapping, Sequence
from inspect import Signature

import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import typed

# The arguments of a network.
Args = tuple[object, ...]
Kwargs = dict[str, object]
# A batch as one object: the only input, a sequence of all inputs, or inputs by name.
Batch = (
    Tensor
    | np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    | Sequence[object]
    | Mapping[str, object]
)


def as_call(owner: str, batch: object) -> tuple[Args, Kwargs]:
    """Return a batch as the positional and keyword arguments of a network."""
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, (Tensor, np.ndarray)):
        return (batch,), {}
    raise TypeError(
        f"For '{owner}', the argument 'batch' must be a tensor, a tuple, a list or a dict, but got "
        f"{typed(batch)}. Give the inputs of network in a tuple, or by name in a dict."
    )


def how_to_name(signature: Signature, given: int, kwargs: Mapping[str, object]) -> str:
    """Return a remedy for inputs that a network does not take: ``given`` positional ones, and named ones."""
    wrong = [name for name in kwargs if name not in signature.parameters]
    free = []
    for argument in list(signature.parameters.values())[given:]:
        if argument.name not in kwargs and argument.kind == argument.POSITIONAL_OR_KEYWORD:
            free.append(argument.name)
    if given > len(signature.parameters):
        return (
            "If its loss is missing, give nn.WithLossCell(network, loss_fn), or Model(network, "
            "loss_fn, optimizer)."
        )
    if not wrong:
        return "Give them as the network takes them."
    if len(wrong) > len(free):
        return f"Leave out {_listed(wrong[len(free) :])}."
    return f"Rename {_listed(wrong)} to {_listed(free)}, for example with dataset.rename()."


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
