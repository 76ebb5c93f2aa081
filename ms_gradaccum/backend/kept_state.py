"""Snapshot of all state that a run of a network may change, to restore it afterwards."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum._checks import DamagedState, State, is_count
from ms_gradaccum.backend.device import device_target
from ms_gradaccum.backend.network_code import is_user
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.tensors import Array as Array

# The name of the module is that of a function, too.
_SEEDS: Any = sys.modules["mindspore.common.seed"]
# In BatchNorm of mindspore.nn this attribute takes precedence over the mode: True uses the batch's statistics.
STATISTICS = "use_batch_statistics"
# Attributes of every cell, and the marker for an attribute that did not exist.
_OF_CELLS, _MISSING = vars(nn.Cell()).keys(), object()
_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook")


class KeptTensors:
    """Tensors whose changes are detected, by fingerprints, and undone for those ``copied`` to the host."""

    def __init__(self, tensors: Iterable[Tensor], copied: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self.marks = [_fingerprint(as_array(tensor)) for tensor in self.tensors]
        # The copies, by the index of their tensor.
        self.values = {i: as_array(each).copy() for i, each in enumerate(self.tensors) if copied(each)}

    def changed(self, places: Iterable[int] | None = None) -> list[int]:
        """Return the indices of the tensors that have changed, among all tensors or among ``places``."""
        looked_at = range(len(self.tensors)) if places is None else places
        return [i for i in looked_at if _fingerprint(as_array(self.tensors[i])) != self.marks[i]]

    def put_back(self, places: Iterable[int] | None = None) -> None:
        """Restore the values of all tensors, or of those in ``places``. Raise if a changed tensor has no copy."""
        lost = []
        for i in self.changed(places):
            tensor = self.tensors[i]
            if i not in self.values:
                lost.append(tensor)
            else:
                assign_in_place(tensor, Tensor(self.values[i], tensor.dtype))
        if lost:
            names = ", ".join(repr(getattr(tensor, "name", "a tensor")) for tensor in lost)
            raise RuntimeError(f"it changes {names} out of training alone, which stays changed")


class Changes:
    """The tensors and the user's cell attributes that a run of the network changes."""

    def __init__(self, network: nn.Cell) -> None:
        self.before = KeptTensors(tensors_of(network), lambda tensor: False)
        cells = [cell for _, cell in network.cells_and_names() if is_user(type(cell))]
        self.cells = [(cell, dict(vars(cell))) for cell in cells]
        # After `find`: the changed tensors, and the old values of changed attributes by cell.
        self.tensors: list[Tensor] | None = None
        self.attributes: list[tuple[nn.Cell, dict[str, object]]] = []

    def find(self) -> list[Tensor]:
        """Find the changes, and return the changed tensors."""
        self.tensors = [self.before.tensors[i] for i in self.before.changed()]
        for cell, before in self.cells:
            names = sorted((vars(cell).keys() | before.keys()) - _OF_CELLS)
            old = {name: before.get(name, _MISSING) for name in names}
            old = {name: value for name, value in old.items() if vars(cell).get(name, _MISSING) is not value}
            self.attributes += [(cell, old)] if old else []
        self.cells = []
        return self.tensors

    def names(self) -> list[str]:
        """Return the names of the attributes."""
        return [f"'{type(cell).__name__}.{name}'" for cell, old in self.attributes for name in old]

    def put_back_attributes(self) -> None:
        """Restore the old values of the attributes."""
        for cell, old in self.attributes:
            for name in old:
                vars(cell).pop(name, None)
            vars(cell).update({name: value for name, value in old.items() if value is not _MISSING})


def _fingerprint(array: Array) -> tuple[int, ...]:
    """Return Python's hash of each MiB of an array, which takes a third of the time of a cryptographic hash."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return tuple([hash(data[begin : begin + 2**20].tobytes()) for begin in range(0, data.size, 2**20)])


def as_array(tensor: Tensor) -> Array:
    """Return a tensor as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    array: Array = tensor.float().asnumpy() if tensor.dtype == ms.bfloat16 else tensor.asnumpy()
    return array


def few_elements(tensor: Tensor) -> Array:
    """Return up to 127 elements of a tensor. On CPU the array is a view; other devices copy only these elements."""
    step = tensor.size // 64 or 1
    if tensor.ndim == 0 or device_target() == "CPU":
        return as_array(tensor).reshape(-1)[::step]
    return as_array(tensor.reshape(-1)[::step])


class KeptState:
    """The parameters, buffers, attributes, modes and hooks of networks' cells, and the states of random generators.

    Tensors that are not ``copied``, other objects of the user, and random generators inside kernels stay as they are.
    """

    def __init__(self, *networks: nn.Cell, copied: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        self.cells = list({id(cell): cell for each in networks for _, cell in each.cells_and_names()}.values())
        self.attributes = [dict(vars(cell)) for cell in self.cells]
        held = [value for attributes in self.attributes for value in attributes.values()]
        held += [value for attributes in self.attributes for value in attributes["_buffers"].values()]
        self.contents = [(value, _content(value)) for value in held if _content(value) is not None]
        self.tensors = KeptTensors((tensor for each in networks for tensor in tensors_of(each)), copied)
        self.random, self.kernel_seeds, self.seed = random_states(), dict(_SEEDS._KERNEL_SEED), ms.get_seed()

    def evaluate(self, words: tuple[str, ...] = ("",)) -> None:
        """Set cells whose class name contains one of these words, and the cells inside, to evaluation mode."""
        for outer in self.cells:
            if any(word in kind.__name__ for kind in type(outer).__mro__ for word in words):
                for _, cell in outer.cells_and_names():
                    set_mode(cell, False, False if vars(cell).get(STATISTICS) else None)

    def put_back_random(self) -> None:
        """Restore the states of the generators."""
        put_random_states(self.random)
        _SEEDS._KERNEL_SEED, _SEEDS._GLOBAL_SEED = dict(self.kernel_seeds), self.seed

    def draw_again(self) -> None:
        """Let the next pass draw the same numbers as others do after this call."""
        self.put_back_random()
        # Without a seed MindSpore's kernels choose one.
        _SEEDS._GLOBAL_SEED = self.seed or 1

    def put_back(self) -> None:
        """Restore everything."""
        self.tensors.put_back()
        self.put_back_random()
        for value, content in self.contents:
            _fill(value, content)
        for cell, attributes in zip(self.cells, self.attributes):
            cell.add_flags(training=attributes["training"])
            vars(cell).clear()
            vars(cell).update(attributes)


def tensors_of(network: nn.Cell) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a network, and the tensors that are attributes of its cells."""
    yield from network.get_parameters()
    for _, cell in network.cells_and_names():
        values = (*vars(cell).values(), *vars(cell)["_buffers"].values())
        yield from (value for value in values if isinstance(value, Tensor))


def constants_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the floating-point tensors that are plain attributes of the user's cells, by their names."""
    cells = {path: cell for path, cell in network.cells_and_names() if is_user(type(cell))}
    found = {f"{path}.{name}": value for path, cell in cells.items() for name, value in vars(cell).items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: each for name, each in tensors.items() if each.is_floating_point() and type(each) is Tensor}


def buffers_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the buffers of a network that its ``state_dict`` has, by their names in it."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, cell in network.cells_and_names()
        for name, buffer in vars(cell)["_buffers"].items()
        if buffer is not None and name not in cell._non_persistent_buffers_set
    }


@contextmanager
def kept(network: nn.Cell, copied: Callable[[Tensor], bool]) -> Iterator[KeptState]:
    """Context in which a network runs without its forward hooks. At the end its state is restored."""
    state = KeptState(network, copied=copied)
    try:
        for cell in state.cells:
            vars(cell).update(dict.fromkeys(_HOOKS))
        yield state
    finally:
        state.put_back()


def set_mode(cell: nn.Cell, training: bool, statistics: bool | None) -> None:
    """Set the mode of one cell and not of the cells inside, as ``set_train`` does."""
    cell.phase = "train" if training else "predict"
    cell.add_flags(training=training)
    if STATISTICS in vars(cell):
        setattr(cell, STATISTICS, statistics)


def _content(value: object) -> Any:
    """Return a copy of a container's items; None if the value is not a container."""
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, (dict, set)):
        return value.copy()
    return value.copy() if isinstance(value, np.ndarray) else None


def _fill(value: Any, content: Any) -> None:
    """Restore a container's items unless they are unchanged."""
    if isinstance(value, np.ndarray):
        value[...] = content
        return
    before, now = ((*each, *each.values()) if isinstance(each, dict) else each for each in (content, value))
    if [*map(id, now)] != [*map(id, before)]:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def random_states() -> State:
    """Return the states of the generators of Python, NumPy and MindSpore, as JSON."""
    # Generators inside kernels, such as that of `nn.Dropout` on CPU, can be neither read nor set.
    return {**host_random_states(), "mindspore": ms.get_rng_state().asnumpy().tolist()}


def host_random_states() -> State:
    """Return the states of Python's and NumPy's generators only."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def checked_random_states(saved: Any, what: str, has_device: bool = True) -> State:
    """Return ``saved`` as states for `put_random_states`. Raise if it is invalid; nothing is changed in either case."""
    try:
        _set_random(saved, random.Random(), np.random.RandomState())
        words = list(bytes(list(saved["mindspore"]))) if has_device else []
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DamagedState(f"{what} has no states of random generators") from None
    if has_device and len(words) != ms.get_rng_state().size:
        raise DamagedState(f"{what} has the state of another version's random generator")
    return {"python": saved["python"], "numpy": saved["numpy"]} | ({"mindspore": words} if has_device else {})


def _set_random(state: Any, python: Any, numpy: Any) -> None:
    version, words, gauss = state["python"]
    python.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    known = kind == "MT19937" and len(keys) == 624 and all(is_count(key) and key < 2**32 for key in keys)
    # NumPy does not check this and would read past the end.
    if not (known and is_count(position) and position <= 624 and has_gauss in (0, 1)):
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
