"""The states of the random generators of Python, NumPy and MindSpore, as JSON.

The generators inside kernels, such as that of ``nn.Dropout`` on CPU, can be neither read nor set.
"""

import random
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import DamagedState, State, is_count


def take() -> State:
    """Return the states of all generators."""
    return {**hosts(), "mindspore": ms.get_rng_state().asnumpy().tolist()}


def hosts() -> State:
    """Return the states of Python's and NumPy's generators only."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def checked(saved: Any, what: str, has_device: bool = True) -> State:
    """Return ``saved`` as states for `put`. Raise if it is invalid; nothing is changed in either case."""
    try:
        _set(saved, random.Random(), np.random.RandomState())
        words = list(bytes(list(saved["mindspore"]))) if has_device else []
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DamagedState(f"{what} has no states of random generators") from None
    if has_device and len(words) != ms.get_rng_state().size:
        raise DamagedState(f"{what} has the state of another version's random generator")
    return {"python": saved["python"], "numpy": saved["numpy"]} | ({"mindspore": words} if has_device else {})


def _set(state: Any, python: Any, numpy: Any) -> None:
    version, words, gauss = state["python"]
    python.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    known = kind == "MT19937" and len(keys) == 624 and all(is_count(key) and key < 2**32 for key in keys)
    # NumPy does not check this and would read past the end.
    if not (known and is_count(position) and position <= 624 and has_gauss in (0, 1)):
        raise ValueError
    numpy.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))


def put(state: State) -> None:
    """Restore the states that `take` or `hosts` has returned."""
    _set(state, random, np.random)
    if "mindspore" in state:
        put_device(state)


def put_device(state: State) -> None:
    """Restore the state of MindSpore's generator only."""
    ms.set_rng_state(Tensor(np.array(state["mindspore"], np.uint8)))
