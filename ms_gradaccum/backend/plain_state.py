"""The state of a foreign Python object, such as a learning rate scheduler, as JSON."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import setitem
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore.experimental.optim.lr_scheduler import LRScheduler

from ms_gradaccum._checks import DamagedState, State

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]  # A value of JSON.
_Steps = list[Callable[[], None]]  # Assignments to make after all checks.
_PLAIN = (bool, int, float, str)


class PlainState:
    """The attributes of a foreign object that are numbers, strings, parameters, schedulers or lists of these."""

    def __init__(self, item: object) -> None:
        self.item = item

    def state_dict(self) -> State:
        return {name: _as_json(value) for name, value in vars(self.item).items() if _is_state(value)}

    def load_state_dict(self, saved: object) -> None:
        """Set the attributes. Raise, without any change, if they do not match."""
        for step in _plan(self.item, saved, type(self.item).__name__):
            step()


def take_settings(group: Mapping[str, Any]) -> State:
    """Return the plain values of a dict, such as the weight decay in a group of an optimizer."""
    return {name: _as_json(value) for name, value in group.items() if _is_plain(value)}


def plan_settings(group: dict[str, Any], saved: Any) -> _Steps:
    """Plan to set the values that `take_settings` has returned. A rate that was a number replaces a parameter."""
    own, steps = take_settings(group), _Steps()
    _check(isinstance(saved, dict) and saved.keys() - {"lr"} == own.keys() - {"lr"}, "a group of an optimizer")
    for name, value in saved.items():
        is_number = isinstance(group[name], Parameter) and isinstance(value, float)
        _check(is_number or (_is_plain(value) and _kind(value) == _kind(group[name])), name)
        steps.append(partial(setitem, group, name, _like(group[name], value)))
    return steps


def _consists_of(kinds: tuple[type, ...], value: object) -> bool:
    """Return whether a value has one of these types, or is a list or tuple of nothing else."""
    if isinstance(value, (list, tuple)):
        return all(map(partial(_consists_of, kinds), value))
    return isinstance(value, kinds)


_is_plain = partial(_consists_of, _PLAIN)
_is_state = partial(_consists_of, (*_PLAIN, Parameter, LRScheduler))  # A tensor that is no parameter is a constant.


def _as_json(value: object) -> Any:
    if isinstance(value, Parameter):
        return value.tolist()
    if isinstance(value, LRScheduler):
        return PlainState(value).state_dict()
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _plan(item: object, saved: object, what: str) -> _Steps:
    own = [name for name, value in vars(item).items() if _is_state(value)]
    if not isinstance(saved, dict) or set(saved) != set(own):
        raise DamagedState(f"{what} does not have the attributes {', '.join(own)} of a {type(item).__name__}")
    steps: _Steps = []
    for name in own:
        steps += _plan_value(vars(item)[name], saved[name], f"{what}.{name}", partial(setattr, item, name))
    return steps


def _plan_value(current: Any, saved: Any, what: str, assign: Callable[[Any], None]) -> _Steps:
    """Plan to ``assign`` a plain value, or to change an object in place, since others may refer to it."""
    if _is_plain(current):
        _check(_is_plain(saved) and _kind(saved) == _kind(current), what)
        return [partial(assign, _like(current, saved))]
    if isinstance(current, LRScheduler):
        return _plan(current, saved, what)
    if isinstance(current, (list, tuple)):
        _check(isinstance(saved, list) and len(saved) == len(current), what)
        steps: _Steps = []
        for index, (own, its) in enumerate(zip(current, saved)):
            if isinstance(current, list) or not _is_plain(own):  # Numbers in a tuple are constants.
                steps += _plan_value(own, its, what, partial(setitem, current, index))
        return steps
    try:
        tensor = Tensor(saved, current.dtype)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        raise DamagedState(f"{what} is not a tensor") from None
    _check(tensor.shape == current.shape, what)
    return [partial(assign_in_place, current, tensor)]


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
    return float if type(value) is int else type(value)  # A number may change between int and float.


def _check(good: bool, what: str) -> None:
    if not good:
        raise DamagedState(f"{what} has another type or length than this program's")
