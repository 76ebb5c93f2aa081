"""Inputs that may be no batch, and are split because one of their axes is as long as it."""

import inspect
from typing import Any

import numpy as np
from mindspore import Tensor

from ms_gradaccum.batch.split import BatchAxis, spread_axes
from ms_gradaccum.training.grad_accumulation import GradAccumulation

_OWN = ("For 'GradAccumulation'", "For 'TokenMeanLoss'")


def ambiguous_inputs(inputs: tuple[Any, ...], batch_axis: BatchAxis) -> list[int]:
    """Return the places of the inputs that may be no batch and are split all the same.

    That is a tensor that is as long as the batch on another axis, too, such as a mask, or a vector of floating-point
    numbers.
    """
    places, found = 0, []
    for i, (item, axis) in enumerate(zip(inputs, spread_axes(batch_axis, inputs))):
        if not isinstance(item, (Tensor, np.ndarray)) or not isinstance(axis, int) or not item.shape:
            continue
        others = list(item.shape)
        rows = others.pop(axis)
        places += 1
        if rows > 1 and (rows in others if others else "float" in str(item.dtype).lower()):
            found.append(i)
    return found if places > 1 else []  # Something must be the batch.


def name_of(network: GradAccumulation, place: int) -> str:
    """Return the name of an input: that of the network's argument if it has one of its own."""
    arguments = list(inspect.signature(network.network.construct).parameters.values())
    named = place < len(arguments) and arguments[place].kind is not inspect.Parameter.VAR_POSITIONAL
    return f"'{arguments[place].name}'" if named else f"input[{place}]"


def without_split(network: GradAccumulation, place: int, inputs: tuple[Any, ...]) -> GradAccumulation:
    """Return ``network`` with one of its inputs going whole into each micro batch."""
    axes = spread_axes(network.batch_axis, inputs)
    return network.around(network.network, (*axes[:place], None, *axes[place + 1 :]))


def explain_split(network: GradAccumulation, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add to an error of a micro batch, after its first line, which of the inputs may be split by mistake."""
    if network.micro_size == 1 or not error.args or not isinstance(error.args[0], str):
        return
    if error.args[0].startswith(_OWN):
        return  # It has said what is wrong.
    inputs: tuple[Any, ...] = network.positional(args, kwargs)
    places = ambiguous_inputs(inputs, network.batch_axis)
    if not places:
        return
    shapes = ", ".join(f"{name_of(network, place)} of shape {tuple(inputs[place].shape)}" for place in places)
    hint = (
        f"For 'GradAccumulation', the split may be at fault, where no shape shows what the batch is: {shapes}. "
        f"What is no batch needs None in batch_axis."
    )
    first, _, rest = error.args[0].partition("\n")
    error.args = ("\n".join((first, hint, rest)).rstrip("\n"), *error.args[1:])
