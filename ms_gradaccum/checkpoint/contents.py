"""The state of a training step: tensors by name, and the numbers of its objects."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from ms_gradaccum._checks import another_program, check_saved_list
from ms_gradaccum.backend.optimizers import all_parameters
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.averages import averages_of
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.parallel.world import digest
from ms_gradaccum.training.train_step import TrainOneStepCell

# Parameters and their new values, which are assigned once the whole state has been checked.
Assignments = list[tuple[Parameter, Any]]


class Held(NamedTuple):
    """A tensor of a state: the parameter that it is loaded into, and a function that returns its value."""

    parameter: Parameter
    value: Callable[[], Any]
    # True if it is the same on all ranks by construction and `value` is collective.
    is_gathered: bool = False


class Contents:
    """The contents of a training step that a state saves.

    Attributes:
        tensors: Parameters by their names in MindSpore's checkpoints. With several networks or optimizers, the names of
            the second and later ones get a prefix.
        sums: The sums of each window. Each rank has its own; the window is their sum over the ranks.
        trained: Names of the parameters that all ranks share.
        is_partitioned: True if the compiler has given each rank its own part of all tensors.
    """

    def __init__(self, step: TrainOneStepCell | Accumulator) -> None:
        self.step = step
        self.is_partitioned = not step.windows[0].reducers
        # A partitioned step has an open window only during a call, so there are tensors but no numbers to save.
        self.windows = [] if self.is_partitioned else step.windows
        # True if the network has given each rank its own part of some parameters.
        self.has_shards = any(reducer.has_shards for window in self.windows for reducer in window.reducers)
        self.tensors: dict[str, Held] = {}
        self.sums: list[dict[str, Held]] = [{} for _ in self.windows]
        self._seen: set[int] = set()
        for i, window in enumerate(step.windows):
            self._add_window(i, window, f"network{i}." if i else "")
        averages = averages_of(step)
        self._add("", () if averages is None else (*averages.values, averages.updates))
        trained = {id(each) for window in self.windows for reducer in window.reducers for each in reducer.shared()}
        self.trained = [name for name, held in self.tensors.items() if id(held.parameter) in trained]

    def _add_window(self, number: int, window: Any, prefix: str) -> None:
        for cell in (window.network, *window.optimizers):
            cell.init_parameters_data()
        self._add(prefix, window.network.get_parameters())
        for j, optimizer in enumerate(window.optimizers):
            reducer = window.reducers[j] if window.reducers else None
            own = f"{prefix}optimizer{j}." if j else prefix
            self._add(own, all_parameters(optimizer), reducer)
            if reducer is not None:
                totals = reducer.buffer.all_totals()
                self.sums[number].update({f"{own}{total.name}": _hold(reducer, total) for total in totals})
        self._add(prefix, window.loss_scale.get_parameters())

    def _add(self, prefix: str, parameters: Iterable[Parameter], reducer: GradientReducer | None = None) -> None:
        for parameter in parameters:
            is_hidden = reducer is not None and reducer.saved(parameter) is None
            if is_hidden or id(parameter) in self._seen:
                continue
            self._seen.add(id(parameter))
            name = f"{prefix}{parameter.name}"
            if name in self.tensors:
                raise ValueError(
                    f"For 'save_state', the parameters of a network must have names of their own, but got two "
                    f"{name!r}. Rename one: parameter.name = '...'."
                )
            self.tensors[name] = _hold(reducer, parameter)

    def open_sums(self) -> dict[str, Held]:
        """Return the sums of the open windows by name."""
        opened = [sums for window, sums in zip(self.windows, self.sums) if window.count() > 0]
        return {name: held for sums in opened for name, held in sums.items()}

    def digests(self) -> dict[str, str]:
        """Return a hash of each tensor that might differ between ranks."""
        return {name: digest([held.parameter]) for name, held in self.tensors.items() if not held.is_gathered}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the step outside of tensors, as JSON."""
        windows = [window.state_dict() for window in self.windows]
        numbers = {"events": self.step.events.state_dict(), "windows": windows}
        return numbers | ({"loop": self.step.window.state_dict()} if isinstance(self.step, Accumulator) else {})

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state outside of tensors. After an error, objects that come earlier are already changed."""
        if isinstance(self.step, Accumulator):
            if "loop" not in saved:
                raise another_program("is of a TrainOneStepCell or a Model, not of an Accumulator")
            self.step.window.load_state_dict(saved["loop"])
        elif "loop" in saved:
            raise another_program("is of an Accumulator")
        self.step.events.load_state_dict(saved.get("events"))
        for window, its in zip(self.windows, check_saved_list(saved.get("windows"), "windows", len(self.windows))):
            window.load_state_dict(its)

    def plan_tensors(self, found: dict[str, Any]) -> Assignments:
        """Return the new value of each parameter. Raise if the tensors do not match the step."""
        _check_names(set(self.tensors), set(found) - {name for sums in self.sums for name in sums})
        for name, held in self.tensors.items():
            _check_kind(name, found[name], held.parameter)
        return [(held.parameter, found[name]) for name, held in self.tensors.items()]

    def plan_sums(
        self,
        common: dict[str, Any],
        own_of: Callable[[int], dict[str, Any]],
        mine: Sequence[int],
        batches: Sequence[Sequence[int]],
    ) -> Assignments:
        """Return the new value of each sum of the windows.

        Args:
            common: Sums that the saving ranks shared.
            own_of: Returns the local sums of a saving rank.
            mine: The saving ranks whose sums this rank takes over.
            batches: For each saving rank, the number of batches in each window.
        """
        plan: Assignments = []
        for i, sums in enumerate(self.sums):
            opened = [rank for rank, counts in enumerate(batches) if counts[i] > 0]
            for name, held in sums.items():
                ranks = [rank for rank in opened if held.is_gathered or rank in mine]
                parts = [own_of(rank)[name] for rank in ranks if name in own_of(rank)]
                if name in common and opened and (held.is_gathered or 0 in mine):
                    parts.append(common[name])
                elif len(parts) < len(ranks) and name not in common:
                    raise another_program(f"lacks {name}")
                plan.append((held.parameter, _sum(name, parts, held.parameter)))
        return plan


def _hold(reducer: GradientReducer | None, parameter: Parameter) -> Held:
    """Return a parameter as it is saved: the whole tensor, also if this rank has only a shard."""
    if reducer is None or parameter.name not in reducer.gathers:
        return Held(parameter, parameter.asnumpy)
    gather = reducer.gathers[parameter.name]
    return Held(reducer.saved(parameter), lambda: gather(parameter).asnumpy(), True)


def _check_names(ours: Collection[str], theirs: Collection[str]) -> None:
    missing, unknown = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing or unknown:
        parts = [_listed("lacks", missing), _listed("also has", unknown)]
        raise another_program(" and ".join(part for part in parts if part))


def _listed(verb: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{verb} {', '.join(names[:3])}{more}"


def _check_kind(name: str, value: Any, parameter: Parameter) -> None:
    """Raise unless an array has the shape and the dtype of a parameter."""
    shape, dtype = tuple(value.shape), Tensor(np.zeros((), value.dtype)).dtype
    if shape != tuple(parameter.shape) or dtype != parameter.dtype:
        theirs, ours = f"{dtype} {shape}", f"{parameter.dtype} {tuple(parameter.shape)}"
        raise another_program(f"has {name!r} as {theirs}, where {ours} is wanted")


def _sum(name: str, parts: list[Any], parameter: Parameter) -> Any:
    for part in parts:
        _check_kind(name, part, parameter)
    total = parts[0] if parts else np.zeros(parameter.shape, np.float32)
    for part in parts[1:]:
        total = total + part
    return total


def assign(plan: Assignments) -> None:
    """Assign each parameter its new value."""
    for parameter, value in plan:
        assign_in_place(parameter, Tensor(value, parameter.dtype))
