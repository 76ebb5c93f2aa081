"""The states of the random generators of Python, NumPy and MindSpore."""

import random
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import DamagedState, State, is_count


def random_states() -> State:
    """Return the states of the generators of Python, NumPy and MindSpore, as JSON."""
    # Generators inside kernels, such as that of `nn.Dropout` on CPU, can be neither read nor set.
    return {**host_random_states(), "mindspore": ms.get_rng_state().tolist()}


def host_random_states() -> State:
    """Return the states of Python's and NumPy's generators only."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def checked_random_states(saved: Any, what: str, has_device: bool = True) -> State:
    """Return ``saved`` as states for `put_random_states`. Raise if it is invalid; nothing is changed in either case."""
    states: State = {}
    try:
        _set_random(saved, random.Random(), np.random.RandomState())
        if has_device:
            states["mindspore"] = list(bytes(list(saved["mindspore"])))
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DamagedState(f"{what} has no states of random generators") from None
    if has_device and len(states["mindspore"]) != ms.get_rng_state().size:
        raise DamagedState(f"{what} has the state of another version's random generator")
    states["python"] = saved["python"]
    states["numpy"] = saved["numpy"]
    return states


def _set_random(state: Any, python: Any, numpy: Any) -> None:
    version, words, gauss = state["python"]
    python.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    if kind != "MT19937" or len(keys) != 624:
        raise ValueError
    if not all(is_count(key) and key < 2**32 for key in keys):
        raise ValueError
    # NumPy does not check this and would read past the end.
    if not is_count(position) or position > 624 or has_gauss not in (0, 1):
        raise ValueError
    numpy.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))


def put_random_states(state: State) -> None:
    """Restore the states that `random_states` or `host_random_states` has returned."""
    _set_random(state, random, np.random)
    if "mindspore" in state:
        put_device_random_state(state)


def put_device_random_state(state: State) -> None:
    """Restore the state of MindSpore's generator only."""
    ms.set_rng_state(Tensor(np.array(state["mindspore"], np.uint8)))
