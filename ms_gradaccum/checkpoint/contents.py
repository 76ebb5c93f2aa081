"""The state of a training step: its tensors by name, and the numbers of its objects as JSON."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_gradaccum._checks import State, another_program, check_path, check_saved_list
from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.optimizers import all_parameters
from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.training.step import Step
from ms_gradaccum.training.window import Window, reducers_of

# The remedies for an invalid folder, and an invalid number of states to keep.
STATES = "Give a folder for the states of this training."
KEPT = "It is the number of states to keep."


class SavedState(NamedTuple):
    """A state on the disk.

    Attributes:
        path: Folder of the state.
        batches: Number of batches that this process had trained on.
        updates: Number of updates.
        epoch: Index of the epoch of the next batch, from 0 on; None if only the program knows it.
        extra: The `extra` that was given to :func:`save_state`.
    """

    path: Path
    batches: int
    updates: int
    epoch: int | None
    extra: dict[str, Json]


class Held(NamedTuple):
    """A tensor of a state."""

    target: Tensor  # The destination for loading.
    source: Tensor  # The source for saving. This rank may have only a shard of it.
    gather: Callable[[Tensor], Tensor] | None  # Collective. It returns the whole tensor of a shard.
    window: int | None  # Index of the window, for its sums, which differ per rank.

    def value(self) -> Array:
        tensor = self.source
        if self.gather is not None:
            tensor = self.gather(tensor)
        array: Array = tensor.asnumpy()
        return array


class Contents:
    """The contents of a training step that a state saves."""

    def __init__(self, step: TrainOneStepCell | Accumulator) -> None:
        self.step = step
        # True if the compiler has split all tensors over the ranks; has_shards: if the network has split some.
        self.is_partitioned = not step.windows[0].reducers
        # A partitioned step has an open window only during a call, so there are tensors but no numbers to save.
        self.windows = [] if self.is_partitioned else step.windows
        self.reducers = reducers_of(self.windows)
        self.has_shards = any(reducer.has_shards for reducer in self.reducers)
        # The keys are names as in MindSpore's checkpoints, with a prefix from the second network or optimizer on.
        self.held: dict[str, Held] = {}
        self._seen: set[int] = set()
        for window in self.windows:
            window.reshard()
        for number, each in enumerate(step.windows):
            self._hold_window(number, each)
        self._hold("", step.extras.get_parameters())

    def _hold_window(self, number: int, window: Window | Step) -> None:
        prefix = f"network{number}." if number else ""
        for cell in (window.network, *window.optimizers):
            cell.init_parameters_data()
        self._hold(prefix, window.network.get_parameters())
        for name, buffer in _buffers_of(window.network.network).items():
            self.held[f"{prefix}buffer.{name}"] = Held(buffer, buffer, None, None)
        for i, (optimizer, reducer) in enumerate(zip_longest(window.optimizers, window.reducers)):
            own = f"{prefix}optimizer{i}." if i else prefix
            self._hold(own, all_parameters(optimizer), reducer)
            if reducer is not None:
                self._hold(own, reducer.buffer.all_totals(), reducer, number)
        for cell in window.settings.kept_cells():
            self._hold(prefix, cell.get_parameters())

    def _hold(
        self,
        prefix: str,
        items: Iterable[Parameter],
        reducer: GradientReducer | None = None,
        window: int | None = None,
    ) -> None:
        """Add parameters by prefix and name. ``reducer`` may shard them; ``window`` is the index for sums."""
        for parameter in items:
            target: Tensor | None = parameter
            if reducer is not None:
                target = reducer.stand_ins.get(id(parameter), parameter)
            if target is None or id(parameter) in self._seen:
                continue
            self._seen.add(id(parameter))
            name = f"{prefix}{parameter.name}"
            if name in self.held:
                raise ValueError(
                    f"For 'save_state', all parameters of a step must have different names, but "
                    f"got two {name!r}. Rename one: parameter.name = '...'."
                )
            gather = None if target is parameter else target.gather
            self.held[name] = Held(target, parameter, gather, window)

    def state_dict(self) -> State:
        """Return the state of the step except tensors, as JSON."""
        state: State = {"events": self.step.events.state_dict()}
        state["windows"] = [window.state_dict() for window in self.windows]
        if isinstance(self.step, Accumulator):
            state["loop"] = self.step.driver.state_dict()
        return state

    def load_state_dict(self, saved: State) -> None:
        """Load the state except tensors. After an error, objects that come earlier are already changed."""
        if isinstance(self.step, Accumulator) != ("loop" in saved):
            verb = "has" if "loop" in saved else "lacks"
            raise another_program(f"{verb} the loop of an Accumulator")
        self.step.events.load_state_dict(saved.get("events"))
        for window, its in zip(
            self.windows, check_saved_list(saved.get("windows"), "windows", len(self.windows))
        ):
            window.load_state_dict(its)
        # After the windows, because the loop reads their counts.
        if isinstance(self.step, Accumulator):
            self.step.driver.load_state_dict(saved["loop"])

    def described(
        self, path: Path, positions: Sequence[DataPosition], extra: dict[str, Json]
    ) -> SavedState:
        """Return the description of a state with the current counts of the step."""
        epoch = None
        if positions:
            epoch = positions[0].next_epoch
        return SavedState(path, self.step.events.batches, self.step.events.updates, epoch, extra)


def _buffers_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the buffers of a network that its ``state_dict`` has, by their names in it."""
    found = {}
    for path, cell in network.cells_and_names():
        for name, buffer in vars(cell)["_buffers"].items():
            if buffer is not None and name not in cell._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def check_arguments(
    owner: str, step: object, directory: object
) -> tuple[TrainOneStepCell | Accumulator, Path]:
    """Return the training step of an argument `step`, and the folder of the states as a path."""
    trained = step
    if isinstance(step, ms.Model):
        trained = step.train_network
    if not isinstance(trained, (TrainOneStepCell, Accumulator)):
        raise TypeError(
            f"For '{owner}', the argument 'step' must be a TrainOneStepCell, an Accumulator or a "
            f"Model, but got {type(trained).__name__}. Give what trains, with its optimizer."
        )
    for extra in trained.extras:
        extra.check_can_save(owner)
    if isinstance(trained, Accumulator):
        trained.driver.check_between_batches(owner)
    else:
        trained.body.check_between_batches(owner)
    return trained, Path(check_path(owner, "directory", directory, STATES))
