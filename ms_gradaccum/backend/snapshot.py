"""Snapshot of all state that a run of a network may change, to restore it afterwards."""

import random
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import is_a
from ms_gradaccum.backend.device import is_host
from ms_gradaccum.backend.held_values import GENERATORS, content_of, differs, fill
from ms_gradaccum.backend.network_code import NetworkCode, is_user
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.random_states import put_random_states, random_states
from ms_gradaccum.backend.tensors import Array as Array

# The name of the module is that of a function, too.
_SEEDS: Any = sys.modules["mindspore.common.seed"]
_OF_CELLS = vars(nn.Cell()).keys()  # The attributes of every cell.
_MISSING = object()  # The marker for an attribute that did not exist.
# Tensors up to this size are always copied, to restore what a forward pass changes.
SMALL_SIZE = 2**16
_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook")


class SnapshotTensors:
    """Tensors whose changes are detected, by fingerprints, and undone for those that are copied to the host.

    With ``moved`` these are the small ones and those with these identities, since copies of all would be large.
    """

    def __init__(self, tensors: Iterable[Tensor], moved: AbstractSet[int] | None = None) -> None:
        # Parameters first, in the order of their network.
        self.tensors = sorted(_unique(tensors), key=lambda tensor: not isinstance(tensor, Parameter))
        self.marks = [_fingerprint(as_array(each)) for each in self.tensors]
        self.values: dict[int, Array] = {}  # The copies, by the index of their tensor.
        for i, each in enumerate(self.tensors):
            if moved is None or each.size <= SMALL_SIZE or id(each) in moved:
                self.values[i] = as_array(each).copy()

    def changed(self, but: AbstractSet[int] = frozenset()) -> list[int]:
        """Return the indices of the tensors that have changed, except for those with these identities."""
        found = []
        for i, each in enumerate(self.tensors):
            if id(each) not in but and _fingerprint(as_array(each)) != self.marks[i]:
                found.append(i)
        return found

    def name_of(self, i: int) -> str:
        return repr(getattr(self.tensors[i], "name", "a tensor"))

    def put_back(self, but: AbstractSet[int] = frozenset()) -> None:
        """Restore the values of all tensors except for these. Raise if a changed tensor has no copy."""
        lost = []
        for i in self.changed(but):
            if i in self.values:
                assign_in_place(self.tensors[i], Tensor(self.values[i], self.tensors[i].dtype))
            else:
                lost.append(self.name_of(i))
        if lost:
            raise RuntimeError(f"a pass out of training has changed {', '.join(lost)}, which stays changed")


def _fingerprint(array: Array) -> tuple[int, ...]:
    """Return Python's hash of each MiB of an array, which takes a third of the time of a cryptographic hash."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    begins = range(0, data.size, 2**20)
    return tuple([hash(data[begin : begin + 2**20].tobytes()) for begin in begins])


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

    Tensors that are not copied (``moved``, see above), iterators, and random generators inside kernels cannot be
    restored.
    """

    def __init__(self, *networks: nn.Cell, moved: AbstractSet[int] | None = None) -> None:
        self.codes = list(map(NetworkCode, networks))
        reached: list[Any] = []
        cells: list[nn.Cell] = []
        tensors: list[Tensor] = []
        # The namespace, the name and the value of the variables of modules that functions assign.
        self.globals: list[tuple[dict[str, object], str, object]] = []
        for network, code in zip(networks, self.codes):
            reached += code.reached
            cells += dict(network.cells_and_names()).values()
            tensors += tensors_of(network)
            for names, name in code.assigned:
                self.globals.append((names, name, names.get(name, _MISSING)))
        reached = _unique(reached)
        # An iterator goes on with each pass, and nothing takes it back.
        self.iterators = _of_kind(reached, Iterator)
        self.cells: list[nn.Cell] = _unique([*cells, *_of_kind(reached, nn.Cell)])
        self.tensors = SnapshotTensors([*tensors, *_of_kind(reached, Tensor)], moved)
        # What holds values, and what it holds. The attributes of cells and of the user's objects are dicts.
        self.contents: list[tuple[Any, Any]] = []
        attributes = map(vars, filter(_has_attributes, [*self.cells, *reached]))
        for holder in _unique([*attributes, *reached]):
            content = content_of(holder)
            if content is not None:
                self.contents.append((holder, content))
        self.random = random_states()
        self.kernel_seeds = dict(_SEEDS._KERNEL_SEED)
        self.seed = ms.get_seed()

    def leave_out_hooks(self) -> None:
        """Let passes call no forward hook."""
        for cell in self.cells:
            vars(cell).update(dict.fromkeys(_HOOKS))

    def changed_names(self, but: AbstractSet[int] = frozenset()) -> list[str]:
        """Return the names of what has changed, except for these tensors."""
        names = list(map(self.tensors.name_of, self.tensors.changed(but)))
        for known, name, value in self.globals:
            if known.get(name, _MISSING) is not value:
                names.append(repr(name))
        kinds = {id(vars(cell)): type(cell) for cell in self.cells}
        for cell in self.cells:  # Containers of MindSpore's own, such as the graphs that a cell has compiled.
            kinds |= {id(value): nn.Cell for name, value in vars(cell).items() if name in _OF_CELLS}
        for holder, content in self.contents:
            kind = kinds.get(id(holder))
            if kind is None and differs(holder, content):
                names.append("an object")
            elif kind is not None and is_user(kind):
                for name in sorted((holder.keys() | content.keys()) - _OF_CELLS):
                    if holder.get(name, _MISSING) is not content.get(name, _MISSING):
                        names.append(f"'{kind.__name__}.{name}'")
        return names

    def put_back_random(self, seed: int | None = None) -> None:
        """Restore the generators. With a ``seed``, passes that follow draw the same numbers for each of its values."""
        put_random_states(self.random)
        _SEEDS._KERNEL_SEED = dict(self.kernel_seeds)
        _SEEDS._GLOBAL_SEED = self.seed
        if seed is not None:
            # Without a seed MindSpore's kernels choose one.
            _SEEDS._GLOBAL_SEED = (self.seed or 1) + seed
        for holder, content in self.contents:
            if is_a(holder, GENERATORS):
                fill(holder, content)
        for _ in range(seed or 0):
            random.random()
            np.random.random()

    def put_back(self, but: AbstractSet[int] = frozenset()) -> None:
        """Restore everything except for these tensors."""
        self.tensors.put_back(but)
        self.put_back_random()
        for holder, content in self.contents:
            fill(holder, content)
        for names, name, value in self.globals:
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value
        for cell in self.cells:
            cell.add_flags(training=vars(cell)["training"])


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _of_kind(values: Iterable[Any], kind: Any) -> list[Any]:
    return [value for value in values if is_a(value, kind)]


def tensors_of(network: nn.Cell) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a network, and the tensors that are attributes of its cells."""
    yield from network.get_parameters()
    for _, cell in network.cells_and_names():
        for value in (*vars(cell).values(), *vars(cell)["_buffers"].values()):
            if isinstance(value, Tensor):
                yield value


def constants_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the floating-point tensors that are plain attributes of the user's cells, by their names."""
    found = {}
    for path, cell in network.cells_and_names():
        if not is_user(type(cell)):
            continue
        for name, value in vars(cell).items():
            if type(value) is Tensor and value.is_floating_point():
                found[f"{path}.{name}"] = value
    return found


def buffers_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the buffers of a network that its ``state_dict`` has, by their names in it."""
    found = {}
    for path, cell in network.cells_and_names():
        for name, buffer in vars(cell)["_buffers"].items():
            if buffer is not None and name not in cell._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


@contextmanager
def kept(network: nn.Cell, moved: AbstractSet[int] = frozenset()) -> Iterator[Snapshot]:
    """Context in which a network runs without its forward hooks. At the end its state is restored."""
    state = Snapshot(network, moved=moved)
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
