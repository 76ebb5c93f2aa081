"""Snapshot of all state that a run of a network may change, to restore it afterwards."""

import io
import itertools
import operator
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum._checks import is_a
from ms_gradaccum.backend.arrays import Array, as_array
from ms_gradaccum.backend.held_values import GENERATORS, content_of, fill, is_large_array
from ms_gradaccum.backend.network_code import NetworkCode, is_user
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.backend.random_states import put_random_states, random_states

# The name of the module is that of a function, too.
_SEEDS: Any = sys.modules["mindspore.common.seed"]
_OF_CELLS = vars(nn.Cell()).keys()  # The attributes of every cell.
# Tensors up to this size are always copied, to restore what a forward pass changes.
SMALL_SIZE = 2**16


class SnapshotTensors:
    """Tensors and arrays whose changes are detected, by fingerprints, and undone for those that are copied.

    With ``moved`` these are the small ones and those with these identities, since copies of all would be large.
    """

    def __init__(
        self, tensors: Iterable[Tensor | Array], moved: AbstractSet[int] | None = None
    ) -> None:
        self.tensors: list[Any] = list(tensors)
        self.marks = list(map(_fingerprint, self.tensors))
        self.values: dict[int, Array] = {}  # The copies, by the index of their tensor.
        for i, each in enumerate(self.tensors):
            if moved is None or each.size <= SMALL_SIZE or id(each) in moved:
                self.values[i] = as_array(each).copy()

    def changed(self) -> list[int]:
        """Return the indices of the tensors that have changed."""
        return [i for i, each in enumerate(self.tensors) if _fingerprint(each) != self.marks[i]]

    def names(self, indices: Iterable[int]) -> list[str]:
        return [repr(getattr(self.tensors[i], "name", "a tensor")) for i in indices]

    def put_back(self) -> list[str]:
        """Restore the values. Return the names of the changed tensors that have no copy, and stay as they are."""
        lost = []
        for i in self.changed():
            tensor = self.tensors[i]
            if i not in self.values:
                lost.append(i)
            elif isinstance(tensor, np.ndarray):
                tensor[...] = self.values[i]
            else:
                assign_in_place(tensor, Tensor(self.values[i], tensor.dtype))
        return self.names(lost)


def _fingerprint(tensor: Tensor | Array) -> int:
    return zlib.crc32(np.ascontiguousarray(as_array(tensor)).data)


class RandomNumbers:
    """The states of the random generators that a run may read. Those inside kernels cannot be restored."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self.generators = generators  # Those that are objects of the user's.
        self.seed = ms.get_seed()
        self.note()

    def note(self) -> None:
        """Take the states that the generators have now."""
        self.states = random_states()
        self.kernel_seeds = dict(_SEEDS._KERNEL_SEED)
        self.own = list(map(content_of, self.generators))

    def put_back(self, default_seed: int | None = None) -> None:
        """Restore the states. Without a seed, MindSpore's kernels choose one, unless there is a default."""
        put_random_states(self.states)
        _SEEDS._KERNEL_SEED = dict(self.kernel_seeds)
        _SEEDS._GLOBAL_SEED = self.seed or default_seed
        for generator, content in zip(self.generators, self.own):
            fill(generator, content)


class Snapshot:
    """Everything that a run of networks may change: tensors, cells, what their code reaches, and random generators.

    Tensors that are not copied (``moved``, see above), iterators, and random generators inside kernels cannot be
    restored.
    """

    def __init__(self, *networks: nn.Cell, moved: AbstractSet[int] | None = None) -> None:
        parameters: list[Tensor] = []
        cells: list[nn.Cell] = []
        for network in networks:
            parameters += network.get_parameters()
            cells += dict(network.cells_and_names()).values()
        self.code = NetworkCode(*networks, *parameters, *cells)
        reached = self.code.reached
        # An iterator goes on with each pass, and nothing takes it back.
        self.iterators = list(filter(_is_used_up, reached))
        self.places = list(map(_place_of, self.iterators))
        self.cells: list[nn.Cell] = self.code.of_kind(nn.Cell)
        # Reading a parameter initializes it if it waits for that. A training does so in this order.
        tensors = {id(each): each for each in [*parameters, *self.code.of_kind(Tensor)]}
        self.tensors = SnapshotTensors([*tensors.values(), *filter(is_large_array, reached)], moved)
        # What holds values, and what it holds. The attributes of cells and of the user's objects are dicts.
        self.contents = [
            (holder, content) for holder in reached if (content := content_of(holder)) is not None
        ]
        # The variables of modules that functions assign.
        self.globals = [
            (names, name, names[name]) for names, name in self.code.assigned if name in names
        ]
        self.random = RandomNumbers(self.code.of_kind(GENERATORS))

    def used_iterator(self) -> str:
        """Return the type of an iterator that has gone on, or that does not tell; an empty string if there is none."""
        for iterator, place in zip(self.iterators, self.places):
            if place is None or _place_of(iterator) != place:
                return type(iterator).__name__
        return ""

    def changed_names(self) -> list[str]:
        """Return the names of the tensors and of the attributes of the user's cells that have changed."""
        names = self.tensors.names(self.tensors.changed())
        known = {id(holder): content for holder, content in self.contents}
        for cell in self.cells:
            for name, value in vars(cell).items():
                if (
                    is_user(type(cell))
                    and name not in _OF_CELLS
                    and known[id(vars(cell))].get(name) is not value
                ):
                    names.append(f"'{type(cell).__name__}.{name}'")
        return names

    def put_back(self) -> list[str]:
        """Restore everything. Return the names of the changed tensors that have no copy, and stay as they are."""
        for holder, content in self.contents:
            fill(holder, content)
        for names, name, value in self.globals:
            names[name] = value
        for cell in self.cells:
            cell.add_flags(training=vars(cell)["training"])
        self.random.put_back()
        return self.tensors.put_back()


def _is_used_up(value: object) -> bool:
    """Return whether a value is an iterator with a state of its own: not attributes, nor other iterators."""
    if (
        not is_a(value, Iterator)
        or is_user(type(value))
        or is_a(value, (zip, map, filter, enumerate))
    ):
        return False
    return not is_a(value, io.IOBase) or (not value.closed and value.readable())


def _place_of(iterator: Any) -> object:
    """Return where an iterator stands, or None if it does not tell."""
    if is_a(iterator, itertools.count):
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return None if left < 0 else left


@contextmanager
def kept(network: nn.Cell, moved: AbstractSet[int] = frozenset()) -> Iterator[Snapshot]:
    """Context in which a network runs. At the end its state is restored."""
    state = Snapshot(network, moved=moved)
    try:
        yield state
    finally:
        lost = state.put_back()
        if lost:
            raise RuntimeError(
                f"a pass out of training has changed {', '.join(lost)}, which stays changed"
            )
