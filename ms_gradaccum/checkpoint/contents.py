"""What of a training step is state: tensors by name, and numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, Tensor

from ms_gradaccum._checks import DamagedState, is_count
from ms_gradaccum.backend.optimizers import all_parameters
from ms_gradaccum.checkpoint import plain_state
from ms_gradaccum.checkpoint.files import another_program
from ms_gradaccum.checkpoint.plain_state import Steps
from ms_gradaccum.checkpoint.window_sums import Held, WindowSums, hold
from ms_gradaccum.gradients.loss_scaler import ForeignLossScale
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.averages import averages_of
from ms_gradaccum.parallel.reducer import GradientReducer
from ms_gradaccum.parallel.world import digest
from ms_gradaccum.training.events import COUNTS
from ms_gradaccum.training.train_step import TrainOneStepCell


class Contents:
    """The tensors and numbers of a training step.

    Attributes:
        tensors: All but the sums of the window, by name. The names are those of MindSpore's checkpoints; where several
            networks or optimizers have the same ones, those of the second and later ones get a prefix.
        sums: For each buffer, what it holds of an open window.
        trained: Names of the weights, which all ranks share.
        is_partitioned: Whether the compiler has given each rank its own part of all tensors.
    """

    def __init__(self, step: TrainOneStepCell | Accumulator) -> None:
        self.step = step
        self.windows = step.windows
        scales = [window.loss_scale for window in self.windows]
        self.choosers = [scale.chooser for scale in scales if isinstance(scale, ForeignLossScale)]
        self.is_partitioned = not self.windows[0].reducers
        self.tensors: dict[str, Held] = {}
        self.sums: list[WindowSums] = []
        self._seen: set[int] = set()
        for i, window in enumerate(self.windows):
            self._add_window(window, f"network{i}." if i else "")
        averages = averages_of(step)
        for parameter in () if averages is None else (*averages.values, averages.updates):
            self._add("", parameter, None)
        trained = {id(weight) for window in self.windows for each in window.reducers for weight in each.replicas()}
        self.trained = [name for name, held in self.tensors.items() if id(held.parameter) in trained]

    def _add_window(self, window: Any, prefix: str) -> None:
        for cell in (window.network, *window.optimizers):
            cell.init_parameters_data()
        for parameter in window.network.get_parameters():
            self._add(prefix, parameter, None)
        for j, optimizer in enumerate(window.optimizers):
            parallel = window.reducers[j] if window.reducers else None
            own = f"{prefix}optimizer{j}." if j else prefix
            for parameter in all_parameters(optimizer):
                self._add(own, parameter, parallel)
            if parallel is not None:
                self.sums.append(WindowSums(parallel, own))
        for parameter in window.loss_scale.get_parameters():
            self._add(prefix, parameter, None)

    def _add(self, prefix: str, parameter: Parameter, parallel: GradientReducer | None) -> None:
        is_hidden = parallel is not None and parallel.saved(parameter) is None
        if is_hidden or id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        name = f"{prefix}{parameter.name}"
        if name in self.tensors:
            raise ValueError(
                f"For 'save_state', the parameters of a network must have names of their own, but got two {name!r}. "
                f"Rename one: parameter.name = '...'."
            )
        self.tensors[name] = hold(parallel, parameter)

    def digests(self) -> dict[str, str]:
        """Return a hash of each tensor that might differ from rank to rank."""
        return {name: digest([held.parameter]) for name, held in self.tensors.items() if not held.is_gathered}

    def numbers(self) -> dict[str, Any]:
        """Return what is no tensor, as JSON."""
        return {
            "buffers": [sums.numbers() for sums in self.sums],
            "events": {name: getattr(self.step.events, name) for name in COUNTS},
            "overflows_in_a_row": [window.overflows_in_a_row for window in self.windows],
            "loss_scales": [plain_state.take(chooser) for chooser in self.choosers],
        }

    def plan_tensors(self, tensors: dict[str, Any]) -> Steps:
        """Return what gives the step its tensors. Raise if they are not its own."""
        missing, unknown = sorted(set(self.tensors) - set(tensors)), sorted(set(tensors) - set(self.tensors))
        if missing or unknown:
            parts = [_listed("lacks", missing), _listed("also has", unknown)]
            raise another_program(" and ".join(part for part in parts if part))
        return [_plan_tensor(name, held.parameter, tensors[name]) for name, held in self.tensors.items()]

    def plan_numbers(self, numbers: dict[str, Any]) -> Steps:
        """Return what gives the step the numbers of a rank, but for those of its windows."""
        events = numbers.get("events")
        if not isinstance(events, dict) or set(events) != set(COUNTS) or not all(map(is_count, events.values())):
            raise DamagedState("the state has no counts of batches and updates")
        steps: Steps = [lambda: vars(self.step.events).update(events)]
        for window, count in zip(self.windows, _same_length(numbers, "overflows_in_a_row", self.windows)):
            steps.append(_plan_count(window, count))
        for chooser, saved in zip(self.choosers, _same_length(numbers, "loss_scales", self.choosers)):
            steps += plain_state.plan_to_put(chooser, saved, type(chooser).__name__)
        return steps


def _plan_count(window: Any, count: Any) -> Callable[[], None]:
    if not is_count(count):
        raise DamagedState("the state has no counts of overflows")
    return lambda: setattr(window, "overflows_in_a_row", count)


def _same_length(numbers: dict[str, Any], name: str, expected: Sequence[Any]) -> list[Any]:
    """Return a list from a manifest, of as many items as there are here."""
    values = numbers.get(name)
    if not isinstance(values, list) or len(values) != len(expected):
        raise another_program(f"has not {len(expected)} {name}")
    return values


def _plan_tensor(name: str, parameter: Parameter, value: Any) -> Callable[[], None]:
    tensor = Tensor(value)
    if tuple(tensor.shape) != tuple(parameter.shape) or tensor.dtype != parameter.dtype:
        theirs, ours = f"{tensor.dtype} {tuple(tensor.shape)}", f"{parameter.dtype} {tuple(parameter.shape)}"
        raise another_program(f"has {name!r} as {theirs}, where {ours} is wanted")
    return lambda: parameter.set_data(tensor)


def _listed(verb: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{verb} {', '.join(names[:3])}{more}"
