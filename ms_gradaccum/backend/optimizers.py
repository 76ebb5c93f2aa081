"""Optimizers: checks against the network, checks of their callers, and the learning rate."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

from ms_gradaccum._checks import LIBRARIES, LOSS_INSIDE, counted, warn
from ms_gradaccum.backend.compiled import number_of, numbered, op_by_op
from ms_gradaccum.backend.mindspore_private import primexpr, registered_hooks
from ms_gradaccum.backend.network_code import JitParts, NetworkCode
from ms_gradaccum.backend.tensors import scalar

_OWN_REMEDY = "Build it from network.trainable_params()."
OPTIMIZERS = (nn.Optimizer, ExperimentalOptimizer)

# The window of each optimizer. Both references are weak, so that neither keeps the other alive.
_windows: "weakref.WeakKeyDictionary[nn.Cell, weakref.ref[OptimizerOwner]]" = (
    weakref.WeakKeyDictionary()
)


def check_optimizer(owner: str, optimizer: nn.Cell, network: nn.Cell) -> None:
    """Raise unless ``optimizer`` is an optimizer over parameters of ``network``."""
    if not isinstance(optimizer, OPTIMIZERS):
        got = type(optimizer).__name__
        remedy = _OWN_REMEDY
        if isinstance(optimizer, type):
            got = f"the class {optimizer.__name__}"
            remedy = f"Build it: {optimizer.__name__}(network.trainable_params())."
        elif isinstance(optimizer, (list, tuple)):
            remedy = "Give several to an Accumulator, as in Accumulator(network, [first, second])."
        elif isinstance(optimizer, nn.Cell):
            remedy = LOSS_INSIDE
        raise TypeError(
            f"For '{owner}', the argument 'optimizer' must be an optimizer of mindspore.nn, "
            f"mindspore.mint or mindspore.experimental, but got {got}. {remedy}"
        )
    if getattr(optimizer, "thor", False):
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must be an optimizer that needs only "
            f"gradients, but got thor, which needs statistics of the last forward pass. Choose "
            f"another optimizer: the statistics of a micro batch are not those of the batch."
        )
    known = {id(parameter) for parameter in network.get_parameters()}
    unknown = []
    for parameter in optimizer.parameters:
        if parameter.dtype in mstype.complex_type:
            raise ValueError(
                f"For '{owner}', the argument 'optimizer' must be an optimizer of real parameters, "
                f"but got {parameter.name!r} of {parameter.dtype}. Use two real parameters, and "
                f"compute the complex number in the network."
            )
        if id(parameter) not in known:
            unknown.append(parameter.name)
    if unknown:
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must be an optimizer of the network's "
            f"parameters, but got {counted(len(unknown), 'other parameter')}, first "
            f"{unknown[0]!r}. {_OWN_REMEDY}"
        )
    _name_apart(optimizer, network)


def _name_apart(optimizer: nn.Cell, network: nn.Cell) -> None:
    """Rename the state of an optimizer if a name is there twice, which no graph could tell apart."""
    # An optimizer inside another one may have a state of the same names.
    known = {id(parameter) for parameter in network.get_parameters()}
    state = {
        id(item): (path, item)
        for path, item in reversed([*_named(optimizer)])
        if id(item) not in known
    }
    names = [item.name for item in network.get_parameters()]
    names += [item.name for _, item in state.values()]
    if len(set(names)) < len(names):
        for path, item in state.values():
            item.name = f"optimizer.{path}"


class OptimizerOwner(Protocol):
    """The window of a training step. It owns its optimizers until another step is built with one of them."""

    watches_calls: bool
    has_claims: bool

    @property
    def owner(self) -> str: ...

    @property
    def optimizers(self) -> list[nn.Cell]: ...


def claim_optimizers(windows: Sequence[OptimizerOwner]) -> None:
    """Make ``windows`` the owners of their optimizers, in place of windows of an earlier step."""
    for window in windows:
        for optimizer in window.optimizers:
            holder = _windows[optimizer]() if optimizer in _windows else None
            if holder is not None:
                holder.has_claims = False
    for window in windows:
        window.has_claims = True
        _windows.update(dict.fromkeys(window.optimizers, weakref.ref(window)))
        for optimizer in window.optimizers:
            if window.watches_calls and not _hooks_of(optimizer):
                optimizer.claim_number = number_of(optimizer)
                optimizer.register_forward_pre_hook(_look_at_call)
                optimizer.compile_cache.clear()  # Graphs of earlier calls have no hook.


def _hooks_of(optimizer: nn.Cell) -> list[object]:
    hooks: list[object] = []
    for registered in registered_hooks(optimizer):
        hooks += (registered or {}).values()
    return hooks


def needs_call(optimizer: nn.Cell) -> bool:
    """Return whether an optimizer has the user's hooks or `__call__`; if so, direct calls are not detected."""
    if type(optimizer).__call__ is nn.Cell.__call__ and all(
        hook is _look_at_call for hook in _hooks_of(optimizer)
    ):
        return False
    optimizer.claim_number = 0
    return True


def _look_at_call(optimizer: nn.Cell, inputs: object) -> None:
    """The hook of a claimed optimizer. It is compiled into graphs, so another function does the work."""
    _warn_of_call(optimizer.claim_number)


@primexpr
def _warn_of_call(number: int) -> None:
    """Warn, once, if a claimed optimizer is not called by its step."""
    optimizer = numbered(number)
    if optimizer is None or optimizer.claim_number != number or _windows[optimizer]() is None:
        return
    gc.collect()  # A deleted step lives on in reference cycles.
    window = _windows[optimizer]()
    if window is not None:
        optimizer.claim_number = 0  # Warn only once.
        warn(
            f"For '{window.owner}', optimizer(...) was also called directly: an extra update "
            f"outside the window. Remove that call, or delete the step if you continue without it."
        )


def check_claims(windows: Sequence[OptimizerOwner]) -> None:
    """Raise unless ``windows`` own their optimizers: two steps with one optimizer would each get part of a window."""
    if all(window.has_claims for window in windows):
        return
    gc.collect()  # A deleted step lives on in reference cycles.
    for window in windows:
        for optimizer in window.optimizers:
            if _windows[optimizer]() not in (None, window):
                raise RuntimeError(
                    f"For '{window.owner}', the optimizer of this step now belongs to a step that "
                    f"was built later. Use that step, or build this one again."
                )
    claim_optimizers(windows)


def keeps_absent_rows(optimizer: nn.Cell) -> bool:
    """Return whether the optimizer skips the rows that a sparse gradient does not contain."""
    lazy = (nn.FTRL, nn.LazyAdam, nn.ProximalAdagrad)
    return isinstance(optimizer, lazy) or bool(getattr(optimizer, "use_lazy", False))


def all_parameters(optimizer: nn.Cell) -> ParameterTuple:
    """Return all parameters of the optimizer and of those inside it, including those in lists, dicts and groups."""
    return ParameterTuple({id(item): item for _, item in _named(optimizer)}.values())


def _named(optimizer: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """Yield all parameters of the optimizer, some twice, with the place of each."""
    yield from optimizer.parameters_and_names()
    seen: dict[int, object] = {}
    for prefix, cell in optimizer.cells_and_names():
        groups = cell.param_groups if isinstance(cell, ExperimentalOptimizer) else ()
        held = {
            name: value
            for name, value in vars(cell).items()
            if name != "init_params" and value is not groups
        }
        # The optimizer may have replaced the learning rate that a group still holds.
        for i, group in enumerate(groups):
            held |= {
                f"param_groups.{i}.{name}": value for name, value in group.items() if name != "lr"
            }
        yield from _held(prefix, held, seen)


def _held(path: str, value: object, seen: dict[int, object]) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters in a container. Those that are ``seen`` are kept, so that no other one gets their ids."""
    if isinstance(value, Parameter):
        yield path, value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen[id(value)] = value
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (Parameter, dict, list, tuple)):
                yield from _held(f"{path}.{key}".removeprefix("."), item, seen)


def jit_parts_of(optimizer: nn.Cell) -> JitParts:
    """Return the parts that MindSpore compiles, of the optimizer and of those inside it."""
    optimizers = NetworkCode(optimizer).of_kind(OPTIMIZERS)
    parameters = []
    for each in optimizers:
        parameters += all_parameters(each)
    return JitParts(optimizers, parameters)


def may_have_branches(optimizer: nn.Cell) -> bool:
    """Return whether the update may branch on values; optimizers of mindspore.nn never do."""
    parts = {optimizer, inner_optimizer(optimizer)}
    return any(
        not type(part).__module__.startswith("mindspore.nn.") or isinstance(part, nn.ASGD)
        for part in parts
    )


def compiles_itself(optimizer: nn.Cell) -> bool:
    """Return whether MindSpore compiles the update in PYNATIVE mode too, as it does with most of ``mindspore.nn``."""
    construct = type(optimizer).construct
    return hasattr(construct, "__wrapped__") and construct.__code__.co_filename.startswith(
        LIBRARIES
    )


def optimizers_in(optimizer: nn.Cell) -> list[nn.Cell]:
    """Return the optimizer and those inside it."""
    return [cell for _, cell in optimizer.cells_and_names() if isinstance(cell, OPTIMIZERS)]


def trains_itself(cell: nn.Cell) -> bool:
    """Return whether a cell is a training step of any project: its code reaches an optimizer."""
    return bool(NetworkCode(cell).of_kind(OPTIMIZERS))


def inner_optimizer(optimizer: nn.Cell) -> nn.Cell:
    """Return the optimizer with the learning rate and the update count: the one inside, if it has all parameters."""
    known = {*map(id, optimizer.parameters)}
    chain = [cell for cell in optimizers_in(optimizer) if {*map(id, cell.parameters)} == known]
    # Each one must have the next one inside.
    for outer, inner in pairwise(chain):
        if inner not in optimizers_in(outer):
            return optimizer
    return chain[-1]


def groups_of(optimizers: Sequence[nn.Cell]) -> list[dict[str, Any]]:
    """Return the groups of parameters whose settings a program may change, as those of PyTorch's optimizers."""
    groups: list[dict[str, Any]] = []
    for inner in map(inner_optimizer, optimizers):
        if isinstance(inner, ExperimentalOptimizer):
            groups += inner.param_groups
    return groups


def updates_of(optimizer: nn.Cell) -> int | None:
    """Return the number of updates that the optimizer has counted, if it counts them."""
    count = getattr(inner_optimizer(optimizer), "global_step", None)
    return int(count) if isinstance(count, Tensor) else None


def scale_for(optimizer: nn.Cell, loss_scale: nn.Cell) -> float:
    """Return the factor by which the mean gradient is multiplied because the optimizer divides by it."""
    # MindSpore documents this use for `FixedLossScaleManager(scale, drop_overflow_update=False)`: its step leaves the
    # gradients scaled, and the optimizer is built with the scale.
    if not loss_scale.is_left_to_optimizer:
        return 1.0
    inner = inner_optimizer(optimizer)
    if hasattr(inner, "loss_scale"):
        return float(inner.loss_scale)
    # Some packages store only the reciprocal of the divisor.
    return 1.0 / _floats(getattr(inner, "reciprocal_scale", 1.0))[0]


def _rate_in(group: dict[str, Any], rate: Parameter) -> Any:
    """Return the learning rate of a group, as MindSpore's optimizers take it: a float replaces the parameter."""
    value = group.get("lr_float", group["lr"])  # mint's SGD reads "lr_float" alone.
    return value if isinstance(value, float) else rate


def _copy_of(rate: Any) -> Tensor:
    """Return a copy of a rate, because the report outlives the next change of the parameter."""
    if isinstance(rate, Tensor) and rate.ndim == 1:
        rate = rate[0]  # MindSpore 2.7 cannot compile its reshape(()) in a larger graph.
    return scalar(rate) + 0.0


class LearningRate(nn.Cell):
    """Learning rate of the next update: a float32 scalar, or one entry per parameter if groups differ.

    It is computed as in ``nn.Optimizer.get_lr``, which some optimizers override to count their updates. In a graph, a
    schedule that has parameters, and so maybe side effects, is not evaluated. Op by op, the result of an overridden
    ``get_lr`` is recorded when the update calls it.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = inner_optimizer(optimizer)
        is_experimental = isinstance(self.optimizer, ExperimentalOptimizer)
        self.groups = tuple(range(len(self.optimizer.lrs))) if is_experimental else None
        cells: list[nn.Cell] = []
        for schedule in _schedules_of(self.optimizer):
            cells += [cell for _, cell in schedule.cells_and_names()]
        schedules = [cell for cell in cells if not type(cell).__module__.startswith("mindspore.")]
        self.has_state = any(cell.parameters_dict() for cell in schedules)
        overrides = self.groups is None and type(self.optimizer).get_lr is not nn.Optimizer.get_lr
        self.is_recorded = self.groups is None and bool(schedules or overrides)

    def construct(self) -> Tensor:
        rates: Any = ()
        if self.groups is not None:
            rates = tuple(
                [
                    _rate_in(self.optimizer.param_groups[i], self.optimizer.lrs[i])
                    for i in self.groups
                ]
            )
        elif self.has_state:
            rates = Tensor(math.nan, ms.float32)
        elif not self.optimizer.dynamic_lr:
            rates = self.optimizer.learning_rate
        elif not self.optimizer.is_group_lr:
            rates = self.optimizer.learning_rate(self.optimizer.global_step)
        else:
            for schedule in self.optimizer.learning_rate:
                rates += (schedule(self.optimizer.global_step),)
        if isinstance(rates, (tuple, list)):
            rates = tuple([_copy_of(rate) for rate in rates])
            return ops.stack(rates) if len(rates) > 1 else rates[0]
        return _copy_of(rates)

    def before_update(self) -> Tensor:
        """Return the learning rate of the next update, or NaN if only the update can compute it. Called by the host."""
        if self.is_recorded:
            return Tensor(math.nan, ms.float32)
        with op_by_op():
            rate: Tensor = self()
        return rate

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns the learning rate of the update in this context."""
        rates: list[object] = [math.nan]
        get_lr = self.optimizer.get_lr

        def recorded() -> object:
            rates.append(get_lr())
            return rates[-1]

        def last() -> Tensor:
            values = _floats(rates[-1])
            return Tensor(values[0] if len(values) == 1 else values, ms.float32)

        vars(self.optimizer)["get_lr"] = recorded
        try:
            yield last
        finally:
            del vars(self.optimizer)["get_lr"]


def settable_rates(optimizers: Sequence[nn.Cell]) -> list[float]:
    """Return the learning rates that a program may set between two updates."""
    rates: list[float] = []
    for optimizer in map(inner_optimizer, optimizers):
        if isinstance(optimizer, ExperimentalOptimizer):
            rates += _floats([*map(_rate_in, optimizer.param_groups, optimizer.lrs)])
        elif not optimizer.dynamic_lr:
            rates += _floats(optimizer.learning_rate)
    return rates


def listed_rates(optimizer: nn.Cell) -> int:
    """Return the number of learning rates in the optimizer's list, one for each update; 0 without a list."""
    # MindSpore keeps a list as a schedule whose only attribute of this name is the vector of the rates.
    held = [
        getattr(each, "learning_rate", None) for each in _schedules_of(inner_optimizer(optimizer))
    ]
    return max(
        [each.size for each in held if isinstance(each, Parameter) and each.ndim == 1], default=0
    )


def _schedules_of(optimizer: nn.Cell) -> list[nn.Cell]:
    rates = getattr(optimizer, "learning_rate", None)
    held = rates if isinstance(rates, (tuple, list, nn.CellList)) else [rates]
    return [each for each in held if isinstance(each, nn.Cell)]


def _floats(rates: Any) -> list[float]:
    return list(map(float, rates if isinstance(rates, (tuple, list)) else [rates]))
