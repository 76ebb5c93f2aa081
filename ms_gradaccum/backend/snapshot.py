"""Snapshot of all state that a run of a network may change, to restore it afterwards."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import DamagedState, State, is_a, is_count
from ms_gradaccum.backend.device import is_host
from ms_gradaccum.backend.network_code import NetworkCode, is_user
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.tensors import Array as Array

# The name of the module is that of a function, too.
_SEEDS: Any = sys.modules["mindspore.common.seed"]
# Attributes of every cell, and the marker for an attribute that did not exist.
_OF_CELLS, _MISSING = vars(nn.Cell()).keys(), object()
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_LARGE_ARRAY = 2**24  # Larger arrays of NumPy are not copied; they are data, such as a vocabulary.
_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook")


class SnapshotTensors:
    """Tensors whose changes are detected, by fingerprints, and undone for those ``copied`` to the host."""

    def __init__(self, tensors: Iterable[Tensor], copied: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        # Parameters first, in the order of their network.
        self.tensors = sorted(_unique(tensors), key=lambda tensor: not isinstance(tensor, Parameter))
        self.marks = [_fingerprint(as_array(tensor)) for tensor in self.tensors]
        # The copies, by the index of their tensor.
        self.values = {i: as_array(each).copy() for i, each in enumerate(self.tensors) if copied(each)}

    def changed(self) -> list[int]:
        """Return the indices of the tensors that have changed."""
        return [i for i, each in enumerate(self.tensors) if _fingerprint(as_array(each)) != self.marks[i]]

    def put_back(self) -> None:
        """Restore the values of all tensors. Raise if a changed tensor has no copy."""
        lost = []
        for i in self.changed():
            if i in self.values:
                self.put_back_one(i)
            else:
                lost.append(repr(getattr(self.tensors[i], "name", "a tensor")))
        if lost:
            raise RuntimeError(f"a pass out of training has changed {', '.join(lost)}, which stays changed")

    def put_back_one(self, i: int) -> None:
        """Restore a tensor that has a copy."""
        assign_in_place(self.tensors[i], Tensor(self.values[i], self.tensors[i].dtype))


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
    if tensor.ndim == 0 or is_host():
        return as_array(tensor).reshape(-1)[::step]
    return as_array(tensor.reshape(-1)[::step])


class Snapshot:
    """Everything that a run of networks may change: tensors, cells, what their code reaches, and random generators.

    Tensors that are not ``copied``, iterators, and random generators inside kernels cannot be restored.
    """

    def __init__(self, *networks: nn.Cell, copied: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        self.codes = [NetworkCode(network) for network in networks]
        reached = _unique(value for code in self.codes for value in code.reached)
        inside = [cell for network in networks for _, cell in network.cells_and_names()]
        self.cells = _unique([*inside, *(value for value in reached if is_a(value, nn.Cell))])
        # An iterator goes on with each pass, and nothing takes it back.
        self.iterators = [value for value in reached if is_a(value, Iterator)]
        # What holds values, and what it holds. The attributes of cells and of the user's objects are dicts.
        attributes = [vars(value) for value in [*self.cells, *reached] if _has_attributes(value)]
        contents = [(holder, _content(holder)) for holder in _unique([*attributes, *reached])]
        self.contents = [(holder, content) for holder, content in contents if content is not None]
        self.globals = [
            (names, name, names.get(name, _MISSING)) for code in self.codes for names, name in code.assigned
        ]
        tensors = [each for network in networks for each in tensors_of(network)]
        tensors += [value for value in reached if is_a(value, Tensor)]
        self.tensors = SnapshotTensors(tensors, copied)
        self.random = random_states()
        self.kernel_seeds = dict(_SEEDS._KERNEL_SEED)
        self.seed = ms.get_seed()

    def leave_out_hooks(self) -> None:
        """Let passes call no forward hook."""
        for cell in self.cells:
            vars(cell).update(dict.fromkeys(_HOOKS))

    def changed_names(self) -> list[str]:
        """Return the names of what has changed, apart from tensors: attributes, containers, variables of the user."""
        cells = {id(vars(cell)): cell for cell in self.cells}
        # Containers of MindSpore's own, such as the graphs that a cell has compiled.
        internal = {id(value) for cell in self.cells for name, value in vars(cell).items() if name in _OF_CELLS}
        names = [repr(name) for known, name, value in self.globals if known.get(name, _MISSING) is not value]
        for holder, content in self.contents:
            kind = type(cells.get(id(holder)))
            if is_user(kind):
                own = sorted((holder.keys() | content.keys()) - _OF_CELLS)
                changed = [name for name in own if holder.get(name, _MISSING) is not content.get(name, _MISSING)]
                names += [f"'{kind.__name__}.{name}'" for name in changed]
            elif id(holder) not in cells.keys() | internal and _differs(holder, content):
                names.append("an object")
        return names

    def put_back_random(self, seed: int | None = None) -> None:
        """Restore the generators. With a ``seed``, passes that follow draw the same numbers for each of its values."""
        put_random_states(self.random)
        _SEEDS._KERNEL_SEED = dict(self.kernel_seeds)
        # Without a seed MindSpore's kernels choose one.
        _SEEDS._GLOBAL_SEED = self.seed if seed is None else (self.seed or 1) + seed
        for holder, content in self.contents:
            if is_a(holder, _GENERATORS):
                _fill(holder, content)
        for _ in range(seed or 0):
            random.random()
            np.random.random()

    def put_back(self) -> None:
        """Restore everything."""
        self.tensors.put_back()
        self.put_back_random()
        self.put_back_objects()

    def put_back_objects(self) -> None:
        """Restore all but tensors and the generators of the libraries."""
        for holder, content in self.contents:
            _fill(holder, content)
        for names, name, value in self.globals:
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value
        for cell in self.cells:
            cell.add_flags(training=vars(cell)["training"])


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


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
def kept(network: nn.Cell, copied: Callable[[Tensor], bool]) -> Iterator[Snapshot]:
    """Context in which a network runs without its forward hooks. At the end its state is restored."""
    state = Snapshot(network, copied=copied)
    try:
        state.leave_out_hooks()
        yield state
    finally:
        state.put_back()


def _has_attributes(value: Any) -> bool:
    """Return whether a value is a cell or an object of a class of the user's."""
    if is_a(value, nn.Cell):
        return True
    return is_user(type(value)) and not is_a(value, (type, Tensor)) and hasattr(value, "__dict__")


def _content(holder: Any) -> Any:
    """Return a copy of what a container, a closure or a generator holds; None for anything else."""
    if is_a(holder, (list, deque)):
        return list(holder)
    if is_a(holder, dict):
        return dict(holder)
    if is_a(holder, set):
        return set(holder)
    if is_a(holder, np.ndarray):
        return holder.copy() if holder.nbytes <= _LARGE_ARRAY else None
    if is_a(holder, random.Random):
        return holder.getstate()
    if is_a(holder, np.random.Generator):
        return holder.bit_generator.state
    if is_a(holder, np.random.RandomState):
        return holder.get_state()
    if is_a(holder, CellType) and _is_filled(holder):
        return [holder.cell_contents]
    return None


def _fill(holder: Any, content: Any) -> None:
    """Restore what `_content` has returned. Containers that are unchanged are left alone."""
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
    elif _differs(holder, content):
        holder.clear()
        (holder.extend if is_a(holder, (list, deque)) else holder.update)(content)


def _differs(holder: Any, content: Any) -> bool:
    """Return whether a container holds other objects. A generator goes on with each pass, which counts for nothing."""
    if is_a(holder, np.ndarray):
        return not np.array_equal(holder, content)
    return not is_a(holder, _GENERATORS) and _identities(_content(holder)) != _identities(content)


def _identities(container: Any) -> list[int]:
    items = [*container, *container.values()] if is_a(container, dict) else [*container]
    return [id(item) for item in items]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # A variable without a value.
        return False


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
