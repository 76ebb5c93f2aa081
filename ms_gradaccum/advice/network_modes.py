"""Cells that train differently in micro batches, and the training modes of cells."""

from collections.abc import Iterable

from mindspore import Parameter, nn

from ms_gradaccum._checks import warn
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.backend.training_cells import (
    BATCH_NORMS,
    IN_TRAINING_ONLY,
    acts_otherwise_in_training,
    follows_mode,
)

FREEZE = (
    "use_batch_statistics=False, or with its set_train(False) in a callback's on_train_step_begin()"
)


def warn_of_modes(owner: str, network: nn.Cell, adds_batches: bool) -> None:
    """Warn of a BatchNorm in training, and of a network that is in evaluation mode as a whole."""
    cells = [cell for _, cell in network.network.cells_and_names()]
    norms = [
        cell.cls_name
        for cell in cells
        if isinstance(cell, BATCH_NORMS) and acts_otherwise_in_training(cell)
    ]
    if norms and (adds_batches or network.splits):
        warn(
            f"For '{owner}', {norms[0]} takes the mean and the variance of each micro batch, which "
            f"trains differently from the whole batch. Use GroupNorm, or freeze its statistics "
            f"with {FREEZE}."
        )
    if any(cell.training for cell in cells):
        return
    idle = next((cell for cell in cells if _needs_training_mode(cell)), None)
    if idle is not None:
        warn(
            f"For '{owner}', the network is in evaluation mode, in which its {idle.cls_name} "
            f"behaves differently. Call set_train() of the training step or of the network before "
            f"the first batch."
        )


def _needs_training_mode(cell: nn.Cell) -> bool:
    return isinstance(cell, IN_TRAINING_ONLY) and follows_mode(cell)


def frozen_cell(network: nn.Cell) -> str:
    """Return the name of a cell that was set to evaluation mode apart from the whole network, or "" for none."""
    cells = dict(network.cells_and_names())
    in_training = any(cell.training for cell in cells.values())
    whole = len(network.trainable_params())
    frozen: set[int] = set()
    for cell in cells.values():
        # MindSpore sets the phase only of the cell whose set_train was called, not of the cells inside.
        if cell.phase == "predict" and not cell.training:
            if len(cell.trainable_params()) == whole:  # This was the whole network.
                frozen.clear()
                break
            frozen.update(id(inner) for _, inner in cell.cells_and_names())
    for name, cell in cells.items():
        is_idle = _needs_training_mode(cell) and not cell.training
        if is_idle and (in_training or id(cell) in frozen):
            return f"{cell.cls_name} {name!r}"
    return ""


def warn_custom_backward(
    owner: str, network: nn.Cell, parameters: Iterable[Parameter], adds_batches: bool
) -> None:
    """Warn of code in the backward pass that gets a different gradient than in MindSpore's step."""
    hooked = next((parameter.name for parameter in parameters if parameter.hooks()), None)
    if hooked is not None and (network.splits or adds_batches):
        warn(
            f"For '{owner}', the hook of the parameter {hooked!r} must be linear, such as a mask "
            f"or a factor: it gets the gradient of each micro batch, and not that of the whole "
            f"batch. Clip with clip=ClipByGlobalNorm(1.0) or clip=ClipByValue(-1.0, 1.0), for "
            f"example."
        )
    if adds_batches and NetworkCode(network.network).has_own_backward():
        warn(
            f"For '{owner}', what the network does in the backward pass (a bprop, a hook) must be "
            f"linear in the gradient: in a window of several batches it gets the gradient of each "
            f"batch, and not that of the window. Otherwise give whole batches to GradAccumulation, "
            f"which splits them."
        )
