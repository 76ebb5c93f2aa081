"""Argument checks: the one place that words errors."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

# Where the frames between a warning and the user's line are.
_LIBRARIES = (f"{Path(__file__).parent}{os.sep}", f"{Path(ms.__file__).parent}{os.sep}", contextlib.__file__)


def sentence(owner: str, name: str, rule: str, value: object, remedy: str) -> str:
    """Return the sentence that all argument errors have: the rule, the value, the way out."""
    return f"For '{owner}', the argument '{name}' must be {rule}, but got {value}. {remedy}"


def _typed(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def check_positive_int(owner: str, name: str, value: Any, remedy: str) -> int:
    """Return ``value`` if it is an int of at least 1 (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(sentence(owner, name, "a positive int", _typed(value), remedy))
    if value < 1:
        raise ValueError(sentence(owner, name, "a positive int", value, remedy))
    return value


def check_int(owner: str, name: str, value: Any, remedy: str) -> int:
    """Return ``value`` if it is an int (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(sentence(owner, name, "an int", _typed(value), remedy))
    return value


def check_positive_float(owner: str, name: str, value: Any, remedy: str) -> float:
    """Return ``value`` as a float if it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(sentence(owner, name, "a positive number", _typed(value), remedy))
    if not (math.isfinite(value) and value > 0):
        raise ValueError(sentence(owner, name, "a positive number", value, remedy))
    return float(value)


def check_number(owner: str, name: str, value: Any, remedy: str) -> float:
    """Return ``value``, a number or a tensor or array of one, as a float if it is finite and at least 0."""
    number = value.asnumpy() if isinstance(value, ms.Tensor) else value
    number = number.item() if isinstance(number, (np.ndarray, np.generic)) and number.size == 1 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(sentence(owner, name, "a number", _typed(value), remedy))
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(sentence(owner, name, "a number of at least 0", number, remedy))
    return float(number)


def check_bool(owner: str, name: str, value: Any, remedy: str) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(sentence(owner, name, "a bool", _typed(value), remedy))
    return value


def check_choice(owner: str, name: str, value: Any, choices: Sequence[str], remedy: str) -> str:
    """Return ``value`` if it is one of the strings in ``choices``."""
    rule = "one of " + ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(sentence(owner, name, rule, _typed(value), remedy))
    if value not in choices:
        raise ValueError(sentence(owner, name, rule, repr(value), remedy))
    return value


def check_cell(owner: str, name: str, value: Any, remedy: str) -> nn.Cell:
    """Return ``value`` if it is an ``nn.Cell``."""
    if not isinstance(value, nn.Cell):
        raise TypeError(sentence(owner, name, "an nn.Cell", _typed(value), remedy))
    return value


def check_last_window(owner: str, value: Any) -> str:
    """Return ``value`` if it says what becomes of a window that is unfinished at the end of the data."""
    remedy = "'apply' makes one more update, 'drop' none, and 'carry' goes on with the next pass."
    return check_choice(owner, "last_window", value, ("apply", "drop", "carry"), remedy)


def warn(message: str) -> None:
    """Warn at the line of the user's program that has led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
