"""The state of a foreign Python object, such as a learning rate scheduler, as JSON."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import setitem
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore.experimental.optim.lr_scheduler import LRScheduler

from ms_gradaccum._checks import DamagedState, State, all_or_nothing

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]  # A value of JSON.
_PLAIN = (bool, int, float, str)


class PlainState:
    """The attributes of a foreign object that are numbers, strings, parameters, schedulers or lists of these."""

    def __init__(self, item: object) -> None:
        self.item = item

    def state_dict(self) -> State:
        return {
            name: _as_json(value) for name, value in vars(self.item).items() if _is_state(value)
        }

    def load_state_dict(self, saved: object) -> None:
        """Set the attributes. Raise, without any change, if they do not match."""
        with all_or_nothing(self):
            _load(self.item, saved, type(self.item).__name__)


def take_settings(group: Mapping[str, Any]) -> State:
    """Return the plain values of a dict, such as the weight decay in a group of an optimizer."""
    return {name: _as_json(value) for name, value in group.items() if _is_plain(value)}


def check_settings(group: Mapping[str, Any], saved: Any) -> None:
    """Raise unless `take_settings` may have returned ``saved``. A rate that was a number replaces a parameter."""
    own = take_settings(group)
    _check(
        isinstance(saved, dict) and saved.keys() - {"lr"} == own.keys() - {"lr"},
        "a group of an optimizer",
    )
    for name, value in saved.items():
        is_number = isinstance(group[name], Parameter) and isinstance(value, float)
        _check(is_number or (_is_plain(value) and _kind(value) == _kind(group[name])), name)


def put_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set values that `check_settings` has accepted."""
    for name, value in saved.items():
        group[name] = _like(group[name], value)


def _consists_of(kinds: tuple[type, ...], value: object) -> bool:
    """Return whether a value has one of these types, or is a list or tuple of nothing else."""
    if isinstance(value, (list, tuple)):
        return all(map(partial(_consists_of, kinds), value))
    return isinstance(value, kinds)


_is_plain = partial(_consists_of, _PLAIN)
# A tensor that is no parameter is a constant.
_is_state = partial(_consists_of, (*_PLAIN, Parameter, LRScheduler))


def _as_json(value: object) -> Any:
    if isinstance(value, Parameter):
        return value.tolist()
    if isinstance(value, LRScheduler):
        return PlainState(value).state_dict()
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _load(item: object, saved: object, what: str) -> None:
    own = [name for name, value in vars(item).items() if _is_state(value)]
    if not isinstance(saved, dict) or set(saved) != set(own):
        raise DamagedState(
            f"{what} does not have the attributes {', '.join(own)} of a {type(item).__name__}"
        )
    for name in own:
        _load_value(vars(item)[name], saved[name], f"{what}.{name}", partial(setattr, item, name))


def _load_value(current: Any, saved: Any, what: str, assign: Callable[[Any], None]) -> None:
    """``assign`` a plain value, or change an object in place, since others may refer to it."""
    if _is_plain(current):
        _check(_is_plain(saved) and _kind(saved) == _kind(current), what)
        assign(_like(current, saved))
    elif isinstance(current, LRScheduler):
        _load(current, saved, what)
    elif isinstance(current, (list, tuple)):
        _check(isinstance(saved, list) and len(saved) == len(current), what)
        for index, (own, its) in enumerate(zip(current, saved)):
            if isinstance(current, list) or not _is_plain(own):  # Numbers in a tuple are constants.
                _load_value(own, its, what, partial(setitem, current, index))
    else:
        try:
            tensor = Tensor(saved, current.dtype)
        except (OverflowError, TypeError, ValueError, RuntimeError):
            raise DamagedState(f"{what} is not a tensor") from None
        _check(tensor.shape == current.shape, what)
        assign_in_place(current, tensor)


def assign_in_place(target: Tensor, value: Tensor) -> None:
    """Assign a value of the same shape and dtype to a parameter or a buffer in place, from the host."""
    # After `set_data`, the compiled parts of optimizers in PYNATIVE mode would keep using the old memory.
    if not isinstance(target, Parameter):
        target.assign_value(value)
    elif target.has_init:
        target.set_data(value)
    else:
        ops.assign(target, value)


def _like(current: Any, new: Any) -> Any:
    """Return a list of JSON as the kind of tuple that ``current`` is."""
    if not isinstance(current, tuple):
        return new
    return current._make(new) if hasattr(current, "_make") else type(current)(new)


def _kind(value: object) -> type:
    if isinstance(value, (list, tuple)):
        return list
    # A number may change between int and float.
    return float if type(value) is int else type(value)


def _check(good: bool, what: str) -> None:
    if not good:
        raise DamagedState(f"{what} has another type or length than this program's")
