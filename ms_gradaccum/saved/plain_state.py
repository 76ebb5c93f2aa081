"""The numbers of a Python object, such as a learning rate scheduler's, as JSON and back."""

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor
from mindspore.experimental.optim.lr_scheduler import LRScheduler

from ms_gradaccum.saved.files import DamagedState

_PLAIN = (bool, int, float, str)


def take(item: Any) -> dict[str, Any]:
    """Return the attributes of ``item`` that are numbers, strings, tensors or schedulers, or lists of them."""
    saved = {name: _as_json(value) for name, value in vars(item).items()}
    return {name: value for name, value in saved.items() if value is not None}


def _as_json(value: Any) -> Any:
    """Return a value as JSON, None for what is no state."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.asnumpy().tolist()
    if isinstance(value, LRScheduler):
        return take(value)
    if isinstance(value, (list, tuple)):
        items = [_as_json(each) for each in value]
        return None if any(each is None for each in items) else items
    return None


def plan_to_put(item: Any, saved: Any, what: str) -> list[Callable[[], None]]:
    """Return what gives ``item`` the attributes that `take` has returned. Raise if they are not its own."""
    names = set(take(item))
    if not isinstance(saved, dict) or set(saved) != names:
        raise DamagedState(f"{what} has not the attributes {sorted(names)} of a {type(item).__name__}")
    steps: list[Callable[[], None]] = []
    for name, value in saved.items():
        steps += _plan(item, name, vars(item)[name], value, f"{what}.{name}")
    return steps


def _plan(item: Any, name: str, current: Any, saved: Any, what: str) -> list[Callable[[], None]]:
    if isinstance(current, LRScheduler):
        return plan_to_put(current, saved, what)
    if isinstance(current, (list, tuple)) and current and isinstance(current[0], LRScheduler):
        _check(isinstance(saved, list) and len(saved) == len(current), what)
        return [step for each, value in zip(current, saved) for step in plan_to_put(each, value, what)]
    if isinstance(current, Parameter):
        tensor = _tensor(current, saved, what)
        return [lambda: current.set_data(tensor)]
    value = _value(current, saved, what)
    return [lambda: setattr(item, name, value)]


def _value(current: Any, saved: Any, what: str) -> Any:
    if isinstance(current, Tensor):
        return _tensor(current, saved, what)
    if isinstance(current, (list, tuple)):
        _check(isinstance(saved, list), what)
        if len(saved) == len(current):
            return type(current)(_value(old, new, what) for old, new in zip(current, saved))
        return type(current)(saved)
    numbers = (int, float)
    same = type(saved) is type(current) or (type(saved) in numbers and type(current) in numbers)
    _check(same, what)
    return saved


def _tensor(current: Tensor, saved: Any, what: str) -> Tensor:
    try:
        tensor = Tensor(saved, current.dtype)
    except (TypeError, ValueError, RuntimeError):
        raise DamagedState(f"{what} is no tensor") from None
    _check(tensor.shape == current.shape, what)
    return tensor


def _check(good: bool, what: str) -> None:
    if not good:
        raise DamagedState(f"{what} has another type or length than this program's")
