"""The numbers of a Python object that is not ours, such as a learning rate scheduler's, as JSON and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore.experimental.optim.lr_scheduler import LRScheduler

from ms_gradaccum._checks import DamagedState

# What JSON holds.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
# What is to be done, once everything has been checked.
_Steps = list[Callable[[], None]]
_PLAIN = (bool, int, float, str)


def take(item: Any) -> dict[str, Any]:
    """Return the attributes of ``item`` that are numbers, strings, parameters or schedulers, or lists of them."""
    return {name: _as_json(value) for name, value in vars(item).items() if _is_state(value)}


def put(item: Any, saved: Any) -> None:
    """Give ``item`` the attributes that `take` has returned. If they are not its own, raise and change nothing."""
    for step in _plan(item, saved, type(item).__name__):
        step()


def _is_state(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_state, value))
    # A tensor that is no parameter is a constant.
    return isinstance(value, (*_PLAIN, Parameter, LRScheduler))


def _as_json(value: Any) -> Any:
    if isinstance(value, Parameter):
        return value.asnumpy().tolist()
    if isinstance(value, LRScheduler):
        return take(value)
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _plan(item: Any, saved: Any, what: str) -> _Steps:
    own = [name for name, value in vars(item).items() if _is_state(value)]
    if not isinstance(saved, dict) or set(saved) != set(own):
        raise DamagedState(f"{what} has not the attributes {', '.join(own)} of a {type(item).__name__}")
    return [step for name in own for step in _plan_attribute(item, name, saved[name], f"{what}.{name}")]


def _plan_attribute(item: Any, name: str, saved: Any, what: str) -> _Steps:
    current = vars(item)[name]
    if _is_plain(current):
        _check(_is_plain(saved) and _kind(saved) == _kind(current), what)
        value = type(current)(saved) if isinstance(current, tuple) else saved
        return [lambda: setattr(item, name, value)]
    return _plan_inside(current, saved, what)


def _plan_inside(current: Any, saved: Any, what: str) -> _Steps:
    """Plan changes of parameters and schedulers in place: others hold them too."""
    if isinstance(current, LRScheduler):
        return _plan(current, saved, what)
    if isinstance(current, (list, tuple)):
        _check(isinstance(saved, list) and len(saved) == len(current), what)
        return [step for own, its in zip(current, saved) for step in _plan_inside(own, its, what)]
    if not isinstance(current, Parameter):
        return []
    try:
        tensor = Tensor(saved, current.dtype)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        raise DamagedState(f"{what} is no tensor") from None
    _check(tensor.shape == current.shape, what)
    return [lambda: assign_in_place(current, tensor)]


def assign_in_place(parameter: Parameter, value: Tensor) -> None:
    """Give a parameter a value of its shape and dtype, in the memory that it has. Called by the host.

    In PYNATIVE mode the parts of an optimizer that MindSpore compiles by itself go on with that memory when `set_data`
    has given the parameter another one, in MindSpore's own step too.
    """
    if parameter.has_init:
        parameter.set_data(value)
    else:
        ops.assign(parameter, value)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def _kind(value: Any) -> type:
    if isinstance(value, (list, tuple)):
        return list
    # A count can become a float and the other way round.
    return float if type(value) is int else type(value)


def _check(good: bool, what: str) -> None:
    if not good:
        raise DamagedState(f"{what} has another type or length than this program's")
