"""The values that Python holds of a network: taken, put back, compared and changed.

Numbers, texts, tensors, arrays, and lists, tuples, dicts, sets and deques of them are taken with what they contain.
Of any other object, and of long containers, it is remembered which one it is, and not what it contains.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from ms_gradaccum.tools.verification.python_reads import Space

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (dict, list, tuple, deque, set)
_MARK = "_changed"
# Of containers. A data set is none of what a step changes.
_LONGEST = 10_000


class Taken(NamedTuple):
    """A value, and a copy of what it contains: an array, or its items as they were."""

    value: Any
    content: Any


class Place(NamedTuple):
    """A name in a space."""

    space: Space
    name: str

    def text(self) -> str:
        """Return how a report calls it."""
        return self.space.call(self.name)


class PythonState:
    """What the spaces of a network hold, to come back to.

    Args:
        spaces: The spaces.
    """

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces = spaces
        self.start = self.take()

    def take(self) -> list[dict[str, Taken]]:
        """Return the values now, one dict per space."""
        return [{name: taken(space.values[name]) for name in space.keys()} for space in self.spaces]

    def restore(self) -> None:
        """Give all names the values that they had, and these what they contained."""
        for space, values in zip(self.spaces, self.start):
            for name in space.keys():
                if name not in values:
                    del space.values[name]
            for name, value in values.items():
                put_back(value)
                if name not in space.values or space.values[name] is not value.value:
                    space.values[name] = value.value

    def changed(self, one: list[dict[str, Taken]], other: list[dict[str, Taken]], rtol: float) -> list[Place]:
        """Return the names that have other values in ``one`` than in ``other``."""
        missing = Taken(_MISSING, None)
        return [
            Place(space, name)
            for space, a, b in zip(self.spaces, one, other)
            for name in dict.fromkeys([*a, *b])
            if not same(a.get(name, missing), b.get(name, missing), rtol)
        ]

    def readable(self, own: bool) -> list[list[Place]]:
        """Return what the code reads and a change of which may matter, those together that have one role."""
        groups: dict[tuple[str, str], list[Place]] = {}
        for space in self.spaces:
            for name in space.keys() if space.own == own else ():
                value = space.values[name]
                if name in space.reads and (isinstance(value, float) if not own else changed_value(value) is not None):
                    groups.setdefault((space.group, name), []).append(Place(space, name))
        return list(groups.values())


@contextmanager
def changing(places: Sequence[Place]) -> Iterator[None]:
    """Give the names other values, and their own again."""
    before = [place.space.values[place.name] for place in places]
    try:
        for place, value in zip(places, before):
            place.space.values[place.name] = changed_value(value)
        yield
    finally:
        for place, value in zip(places, before):
            place.space.values[place.name] = value


def taken(value: Any, above: tuple[int, ...] = ()) -> Taken:
    """Return a value with a copy of what it contains."""
    if isinstance(value, (Parameter, *_PLAIN)) or id(value) in above:
        return Taken(value, None)
    if isinstance(value, Tensor):
        return Taken(value, _array(value))
    if isinstance(value, np.ndarray):
        return Taken(value, value.copy())
    if isinstance(value, _CONTAINERS) and len(value) > _LONGEST:
        return Taken(value, None)
    above = (*above, id(value))
    if isinstance(value, dict):
        return Taken(value, {key: taken(item, above) for key, item in value.items()})
    if isinstance(value, (list, tuple, deque)):
        return Taken(value, [taken(item, above) for item in value])
    return Taken(value, set(value) if isinstance(value, set) else None)


def put_back(old: Taken) -> None:
    """Give a value what it contained."""
    value, content = old
    if content is None:
        return
    if isinstance(value, Tensor):
        now = _array(value)
        if now is None or now.tobytes() != content.tobytes():
            value.assign_value(Tensor(content, value.dtype))
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, dict):
        for item in content.values():
            put_back(item)
        value.clear()
        value.update({key: item.value for key, item in content.items()})
    elif isinstance(value, set):
        value.clear()
        value.update(content)
    else:
        for item in content:
            put_back(item)
        if not isinstance(value, tuple):
            value.clear()
            value.extend(item.value for item in content)


def same(a: Taken, b: Taken, rtol: float) -> bool:
    """Whether two values are equal, numbers up to rounding."""
    if a.value is b.value and a.content is None:
        return True
    number, other = _as_array(a), _as_array(b)
    if number is not None and other is not None:
        return _close(number, other, rtol)
    if type(a.value) is not type(b.value):
        return False
    if isinstance(a.content, dict):
        keys = a.content.keys()
        return keys == b.content.keys() and all(same(a.content[key], b.content[key], rtol) for key in keys)
    if isinstance(a.content, list):
        pairs = zip(a.content, b.content)
        return len(a.content) == len(b.content) and all(same(*pair, rtol) for pair in pairs)
    if isinstance(a.content, set):
        return bool(a.content == b.content)
    # Of other objects nothing is known but their type.
    return not isinstance(a.value, _PLAIN) or a.value == b.value


def changed_value(value: Any) -> Any:
    """Return another value of the same type; None if there is none to think of."""
    if isinstance(value, (bool, np.bool_)):
        return not value
    if isinstance(value, (int, np.integer)):
        return value + 1
    if isinstance(value, (float, np.floating)):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return value + _MARK
    if isinstance(value, Tensor) and not isinstance(value, Parameter):
        array = _array(value)
        other = changed_value(array) if array is not None else None
        return None if other is None else Tensor(other, value.dtype)
    if isinstance(value, np.ndarray):
        return _changed_array(value)
    if type(value) in (list, tuple):
        items = [changed_value(item) for item in value]
        return None if _all_none(items) else type(value)(_either(items, value))
    if type(value) is dict:
        items = [changed_value(item) for item in value.values()]
        return None if _all_none(items) else dict(zip(value, _either(items, value.values())))
    return None


def _either(items: list[Any], originals: Any) -> list[Any]:
    return [original if item is None else item for item, original in zip(items, originals)]


def _all_none(items: list[Any]) -> bool:
    return all(item is None for item in items)


def _changed_array(array: Any) -> Any:
    if array.dtype.kind == "b":
        return ~array
    if array.dtype.kind in "iu":
        return array + 1
    return (array * 1.5 + 0.25).astype(array.dtype) if array.dtype.kind == "f" else None


def _array(tensor: Tensor) -> Any:
    try:
        return tensor.asnumpy().copy()
    except Exception:  # It has no value yet, or none that NumPy can hold.
        return None


def _as_array(each: Taken) -> Any:
    if isinstance(each.value, (bool, int, float, np.generic)):
        return np.asarray(each.value)
    return each.content if isinstance(each.content, np.ndarray) else None


def _close(a: Any, b: Any, rtol: float) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        return bool(a.tobytes() == b.tobytes())
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=0.0), equal_nan=True))
