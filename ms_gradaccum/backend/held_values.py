"""Contents of containers, classes, closures and random generators, and how they are restored."""

import random
from collections import deque
from contextlib import suppress
from types import CellType
from typing import Any

import numpy as np

from ms_gradaccum._checks import is_a
from ms_gradaccum.backend.network_code import is_user

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_LARGE_ARRAY = 2**24  # Unit: bytes.


def is_large_array(value: object) -> bool:
    """Return whether a value is an array of NumPy that is too large for a copy, and that may change."""
    if not is_a(value, np.ndarray) or is_a(value, np.memmap):
        return False
    return value.nbytes > _LARGE_ARRAY and value.flags.writeable and value.dtype.kind in "biufc"


def content_of(holder: Any) -> Any:
    """Return a copy of what a container, a user's class, a closure or a generator holds; None for anything else."""
    for kind, copied in ((list, list), (deque, list), (dict, dict), (set, set)):
        if is_a(holder, kind):
            return copied(holder)
    if is_a(holder, type) and is_user(holder):
        return dict(vars(holder))
    if is_a(holder, np.ndarray) and holder.nbytes <= _LARGE_ARRAY:
        return holder.copy()
    if is_a(holder, random.Random):
        return holder.getstate()
    if is_a(holder, np.random.Generator):
        return holder.bit_generator.state
    if is_a(holder, np.random.RandomState):
        return holder.get_state()
    if is_a(holder, CellType):
        with suppress(ValueError):  # A variable without a value.
            return [holder.cell_contents]
    return None


def fill(holder: Any, content: Any) -> None:
    """Restore what `content_of` has returned. Containers that are unchanged are left alone."""
    if is_a(holder, np.ndarray):
        holder[...] = content
    elif is_a(holder, random.Random):
        holder.setstate(content)
    elif is_a(holder, np.random.Generator):
        holder.bit_generator.state = content
    elif is_a(holder, np.random.RandomState):
        holder.set_state(content)
    elif is_a(holder, CellType):
        holder.cell_contents = content[0]
    elif is_a(holder, type):
        for name in vars(holder).keys() - content.keys():
            type.__delattr__(holder, name)
        for name, value in content.items():
            if vars(holder).get(name) is not value:
                type.__setattr__(holder, name, value)
    elif _identities(content_of(holder)) != _identities(content):
        holder.clear()
        if is_a(holder, (list, deque)):
            holder.extend(content)
        else:
            holder.update(content)


def _identities(container: Any) -> list[int]:
    found = list(map(id, container))
    if is_a(container, dict):
        found += map(id, container.values())
    return found
