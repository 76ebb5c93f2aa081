"""Descriptions of optimizers and networks as plain values, which the ranks of a job compare before training."""

import hashlib

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ms_gradaccum.backend.tensors import Array

# Parameters of an optimizer that hold settings. All others hold its state, which is broadcast.
_TUNED = frozenset(("learning_rate", "group_lr", "momentum", "lr", "lrs", "weight_decay"))
# Attributes of every cell, attributes that may differ by rank, and duplicates.
_SKIPPED = frozenset(
    (*vars(nn.Cell()), "optim_filter", "claim_number")
    + ("init_params", "init_args", "init_learning_rate", "exec_weight_decay", "decay_flags", "parameters", "params")
)
_OPTIMIZERS = (nn.Optimizer, ExperimentalOptimizer)
_MANY = 16  # Longer arrays are described by their hash.


def settings_of(name: str, optimizer: nn.Cell) -> dict[str, object]:
    """Return the class, the parameter order and the numbers of an optimizer by name."""
    found: dict[str, object] = {name: type(optimizer).__name__}
    found |= {f"{name}.parameters[{i}]": parameter.name for i, parameter in enumerate(optimizer.parameters)}
    _describe_cell(name, optimizer, found)
    return found


def structure_of(network: nn.Cell) -> dict[str, object]:
    """Return the classes of a network's cells and the numbers of its losses by name."""
    found: dict[str, object] = {}
    for name, cell in network.cells_and_names():
        place = f"network.{name}" if name else "network"
        if isinstance(cell, nn.LossBase):
            _describe_cell(place, cell, found)
        found[place] = type(cell).__name__
    return found


def _describe_cell(place: str, cell: nn.Cell, found: dict[str, object]) -> None:
    found[place] = type(cell).__name__
    attributes = {**vars(cell).get("_params", {}), **vars(cell).get("_cells", {}), **vars(cell)}
    for name, value in attributes.items():
        # A cell may store its rank.
        if not name.startswith("_") and name not in _SKIPPED and "rank" not in name:
            is_table = isinstance(cell, LearningRateSchedule)
            _describe(f"{place}.{name}", value, is_table or name in _TUNED, found)


def _describe(place: str, value: object, tuned: bool, found: dict[str, object]) -> None:
    """Note the numbers in ``value``. Of parameters and cells only those that are ``tuned`` hold settings."""
    if isinstance(value, (bool, int, float, str)):
        found[place] = value
    elif isinstance(value, (Tensor, np.ndarray, np.generic)):
        if tuned or not isinstance(value, Parameter):
            found[place] = _numbers(value.asnumpy() if isinstance(value, Tensor) else np.asarray(value))
    elif isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float)) for item in value):
        found[place] = _numbers(np.array(value))
    elif isinstance(value, (list, tuple)) and not isinstance(value, nn.Cell):
        for index, item in enumerate(value):
            _describe(f"{place}[{index}]", item, tuned, found)
    elif isinstance(value, dict):
        for key in filter(lambda key: isinstance(key, str), value):
            _describe(f"{place}.{key}", value[key], key in _TUNED, found)
    elif isinstance(value, (LearningRateSchedule, *_OPTIMIZERS)) or (tuned and isinstance(value, nn.Cell)):
        _describe_cell(place, value, found)


def _numbers(array: Array) -> object:
    if array.size > _MANY:
        return f"{array.size} values with the hash {hashlib.sha256(array.tobytes()).hexdigest()[:8]}"
    # The digits are compared, because a float32 has other digits as a double.
    numbers = [float(str(number)) if array.dtype.kind == "f" else number.item() for number in array.ravel()]
    return numbers[0] if array.ndim == 0 else numbers
